/* Kernels for x86-64 with AVX2; an empty file elsewhere. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#define MPQ_ISA_NAME avx2
#include "mpq_simd_avx2.h"
#include "mpq_table.h"
#else
typedef int mpq_no_avx2;
#endif
