/* Kernels for x86-64 with AVX512; an empty file elsewhere. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define MPQ_ISA_NAME avx512
#include "mpq_simd_avx512.h"
#include "mpq_table.h"
#else
typedef int mpq_no_avx512;
#endif
