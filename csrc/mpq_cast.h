/* bfloat16 <-> float in groups of 16, and the search for non-finite 16-bit words. */
#ifndef MPQ_CAST_H
#define MPQ_CAST_H

#include <string.h>

#include "mpq.h"

/* Nearest, ties to even; a NaN keeps its upper payload and becomes quiet. */
MPQ_INLINE void bfloat_from_float16(const float *x, uint16_t *out)
{
  for (int i = 0; i < 16; ++i) {
    uint32_t w;
    memcpy(&w, x + i, 4);
    uint32_t rounded = (w + 0x7FFFu + ((w >> 16) & 1u)) >> 16, nan = (w >> 16) | 0x40u;
    out[i] = (uint16_t)((w & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
  }
}

MPQ_INLINE void float_from_bfloat16(const uint16_t *x, float *out)
{
  for (int i = 0; i < 16; ++i) {
    uint32_t w = (uint32_t)x[i] << 16;
    memcpy(out + i, &w, 4);
  }
}

MPQ_INLINE int has_exponent(const uint16_t *words, unsigned exponent)
{
  unsigned found = 0;
  for (int i = 0; i < 16; ++i) found |= (words[i] & exponent) == exponent;
  return found ? MPQ_NONFINITE : 0;
}

MPQ_INLINE int has_nonfinite_half(const uint16_t *words) { return has_exponent(words, 0x7C00u); }
MPQ_INLINE int has_nonfinite_bfloat(const uint16_t *words) { return has_exponent(words, 0x7F80u); }

#endif
