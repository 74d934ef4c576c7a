/* Instantiates the kernels of one instruction set for float and double and makes its table.
 * Expects MPQ_ISA_NAME and the group operations of one mpq_simd_*.h. */
#include <float.h>
#include <math.h>

#include "mpq_cast.h"

typedef double mpq_mix_vector __attribute__((vector_size(64)));

#ifndef MPQ_MIX_VECTORS
#define MPQ_MIX_VECTORS 1 /* as many of each block as the registers hold */
#endif

/* How a block of integers is written: the width of its planes, 0 or 2 to 16 bits, or as it is; with
 * MPQ_DIFFERENCES its planes hold what each integer has more than the one before it, in its block or
 * the one before. */
enum { MPQ_AS_INTEGERS = 17, MPQ_DIFFERENCES = 32 };

#define REAL float
#define INT int32_t
#define UINT uint32_t
#define WORD uint32_t
#define SIGN_BIT UINT32_C(0x80000000)
#define INFINITY_WORD UINT32_C(0x7F800000)
#define NAN_WORD UINT32_C(0x7FC00000)
#define NORMAL_MIN 0x1p-126f
#define REAL_MAX FLT_MAX
#define LIFT 0x1p64f    /* takes the smallest subnormal into the normal range */
#define SUBNORMAL_MIN 0x1p-149f
#define SINK 0x1p-64f   /* takes a sum of the largest values below overflow */
#define FN(name) name##_f32
#include "mpq_codec.inc"
#include "mpq_integers.inc"
#include "mpq_mix.inc"
#include "mpq_undef.h"

#define REAL double
#define INT int64_t
#define UINT uint64_t
#define WORD uint64_t
#define SIGN_BIT UINT64_C(0x8000000000000000)
#define INFINITY_WORD UINT64_C(0x7FF0000000000000)
#define NAN_WORD UINT64_C(0x7FF8000000000000)
#define NORMAL_MIN 0x1p-1022
#define REAL_MAX DBL_MAX
#define LIFT 0x1p128
#define SUBNORMAL_MIN 0x1p-1074
#define SINK 0x1p-64
#define FN(name) name##_f64
#include "mpq_codec.inc"
#include "mpq_integers.inc"
#include "mpq_mix.inc"
#include "mpq_undef.h"

#define MPQ_JOIN_(a, b) a##b
#define MPQ_JOIN(a, b) MPQ_JOIN_(a, b)
#define MPQ_STRING_(a) #a
#define MPQ_STRING(a) MPQ_STRING_(a)
#define MPQ_ENTRIES(S)                                                                            \
  .encode_##S = encode_##S, .decode_##S = decode_##S, .decode_add_##S = decode_add_##S,           \
  .hop_##S = hop_##S, .to_half_##S = to_half_##S, .from_half_##S = from_half_##S,                 \
  .to_bfloat_##S = to_bfloat_##S, .from_bfloat_##S = from_bfloat_##S, .mix_##S = mix_##S, .add_##S = add_##S,             \
  .to_integers_##S = to_integers_##S, .from_integers_##S = from_integers_##S,                     \
  .pack_integers_##S = pack_integers_##S, .unpack_integers_##S = unpack_integers_##S

const mpq_kernels MPQ_JOIN(mpq_kernels_, MPQ_ISA_NAME) = {
    .name = MPQ_STRING(MPQ_ISA_NAME), MPQ_ENTRIES(f32), MPQ_ENTRIES(f64)};
