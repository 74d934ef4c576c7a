/* Choice of the instruction set at run time. */
#include "mpq.h"

#include <string.h>

extern const mpq_kernels mpq_kernels_baseline;

#if defined(__x86_64__)
extern const mpq_kernels mpq_kernels_avx2, mpq_kernels_avx512;

static int has_avx2(void)
{
  /* Every CPU with AVX2 and FMA has F16C too. */
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static int has_avx512(void)
{
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
         && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

const mpq_kernels *mpq_find_kernels(const char *name)
{
  int any = strcmp(name, "auto") == 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if ((any || strcmp(name, "avx512") == 0) && has_avx512()) return &mpq_kernels_avx512;
  if ((any || strcmp(name, "avx2") == 0) && has_avx2()) return &mpq_kernels_avx2;
#endif
  if (any || strcmp(name, "baseline") == 0) return &mpq_kernels_baseline;
  return NULL;
}
