/* bfloat16 <-> float in groups of 16, and the search for non-finite 16-bit words. */
#ifndef MPQ_CAST_H
#define MPQ_CAST_H

#include <string.h>

#include "mpq.h"

typedef uint32_t word_vector __attribute__((vector_size(64)));
typedef uint16_t short_vector __attribute__((vector_size(32)));

/* Nearest, ties to even; a NaN keeps its upper payload and becomes quiet. */
MPQ_INLINE void bfloat_from_float16(const float *x, uint16_t *out)
{
  word_vector w;
  memcpy(&w, x, sizeof w);
  word_vector nan = (word_vector)((w & 0x7FFFFFFFu) > 0x7F800000u);
  word_vector rounded = (w + 0x7FFFu + ((w >> 16) & 1u)) >> 16;
  w = (nan & ((w >> 16) | 0x40u)) | (~nan & rounded);
  short_vector words = __builtin_convertvector(w, short_vector);
  memcpy(out, &words, sizeof words);
}

MPQ_INLINE void float_from_bfloat16(const uint16_t *x, float *out)
{
  short_vector words;
  memcpy(&words, x, sizeof words);
  word_vector w = __builtin_convertvector(words, word_vector) << 16;
  memcpy(out, &w, sizeof w);
}

MPQ_INLINE int has_exponent(const uint16_t *words, uint16_t exponent)
{
  short_vector w;
  uint64_t found[4];
  memcpy(&w, words, sizeof w);
  w = (short_vector)((w & exponent) == exponent);
  memcpy(found, &w, sizeof found);
  return (found[0] | found[1]) | (found[2] | found[3]) ? MPQ_NONFINITE : 0;
}

MPQ_INLINE int has_nonfinite_half(const uint16_t *words) { return has_exponent(words, 0x7C00u); }
MPQ_INLINE int has_nonfinite_bfloat(const uint16_t *words) { return has_exponent(words, 0x7F80u); }

#endif
