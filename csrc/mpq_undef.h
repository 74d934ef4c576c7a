/* Ends one instantiation of mpq_codec.inc. */
#undef REAL
#undef INT
#undef UINT
#undef WORD
#undef SIGN_BIT
#undef INFINITY_WORD
#undef NAN_WORD
#undef NORMAL_MIN
#undef REAL_MAX
#undef LIFT
#undef SUBNORMAL_MIN
#undef SINK
#undef FN
