/* Kernels in portable C: any 64-bit little-endian machine. */
#define MPQ_ISA_NAME baseline
#include "mpq_simd_portable.h"
#include "mpq_table.h"
