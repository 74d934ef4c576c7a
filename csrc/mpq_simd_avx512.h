/* Group operations with AVX-512 (F, BW, DQ, VL).  See mpq_simd_portable.h for what each must do. */
#ifndef MPQ_SIMD_H
#define MPQ_SIMD_H

#include <immintrin.h>

#include "mpq_random.h"

#define MPQ_VECTOR_NBYTES 64
#define MPQ_MIX_VECTORS 4
#define MPQ_INLINE static inline __attribute__((always_inline))

typedef __m512i lanes; /* 16 int32 */
typedef __m512i q8;    /* 64 int8 */
typedef struct {
  __m512i part[2]; /* 32 int16 each */
} q16;

/* ---- 16 values <-> 16 integers ---- */

MPQ_INLINE lanes nearest16_f32(const float *x, float inverse)
{
  return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse)));
}

MPQ_INLINE lanes join_halves(__m256i low, __m256i high)
{
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

MPQ_INLINE lanes nearest16_f64(const double *x, double inverse)
{
  __m512d factor = _mm512_set1_pd(inverse);
  return join_halves(_mm512_cvtpd_epi32(_mm512_mul_pd(_mm512_loadu_pd(x), factor)),
                     _mm512_cvtpd_epi32(_mm512_mul_pd(_mm512_loadu_pd(x + 8), factor)));
}

MPQ_INLINE lanes random16(mpq_draw draw, int quarter)
{
  const __m512i index = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i weyl = _mm512_mullo_epi32(index, _mm512_set1_epi32((int)MPQ_GOLDEN32));
  __m512i h = _mm512_add_epi32(
      weyl, _mm512_set1_epi32((int)(draw.a + (quarter & 1 ? 16 * MPQ_GOLDEN32 : 0))));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)MPQ_MIX1));
  h = _mm512_xor_si512(h, _mm512_set1_epi32((int)draw.b));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 15));
  h = _mm512_mullo_epi32(h, _mm512_set1_epi32((int)MPQ_MIX2));
  h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
  h = quarter < 2 ? _mm512_and_si512(_mm512_slli_epi32(h, 1), _mm512_set1_epi32(0x1FFFE))
                  : _mm512_srli_epi32(h, 15);
  return _mm512_or_si512(h, _mm512_set1_epi32(1));
}

MPQ_INLINE lanes stochastic16_f32(const float *x, float inverse, float limit, lanes random)
{
  __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(inverse));
  y = _mm512_max_ps(_mm512_min_ps(y, _mm512_set1_ps(limit)), _mm512_set1_ps(-limit));
  __m512 floor = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 rest = _mm512_mul_ps(_mm512_sub_ps(y, floor), _mm512_set1_ps(131072.0f));
  __mmask16 up = _mm512_cmp_ps_mask(_mm512_cvtepi32_ps(random), rest, _CMP_LT_OQ);
  lanes q = _mm512_cvttps_epi32(floor);
  return _mm512_mask_sub_epi32(q, up, q, _mm512_set1_epi32(-1));
}

MPQ_INLINE __m256i stochastic8_f64(const double *x, double inverse, double limit, __m256i random)
{
  __m512d y = _mm512_mul_pd(_mm512_loadu_pd(x), _mm512_set1_pd(inverse));
  y = _mm512_max_pd(_mm512_min_pd(y, _mm512_set1_pd(limit)), _mm512_set1_pd(-limit));
  __m512d floor = _mm512_roundscale_pd(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512d rest = _mm512_mul_pd(_mm512_sub_pd(y, floor), _mm512_set1_pd(131072.0));
  __mmask8 up = _mm512_cmp_pd_mask(_mm512_cvtepi32_pd(random), rest, _CMP_LT_OQ);
  __m256i q = _mm512_cvttpd_epi32(floor);
  return _mm256_mask_sub_epi32(q, up, q, _mm256_set1_epi32(-1));
}

MPQ_INLINE lanes stochastic16_f64(const double *x, double inverse, double limit, lanes random)
{
  return join_halves(
      stochastic8_f64(x, inverse, limit, _mm512_castsi512_si256(random)),
      stochastic8_f64(x + 8, inverse, limit, _mm512_extracti64x4_epi64(random, 1)));
}

enum apply_mode { APPLY_SET, APPLY_ADD, APPLY_REST };

MPQ_INLINE void apply16_f32(lanes q, float scale, const float *source, float *out, int mode)
{
  __m512 v = _mm512_mul_ps(_mm512_cvtepi32_ps(q), _mm512_set1_ps(scale));
  if (mode == APPLY_ADD) v = _mm512_add_ps(_mm512_loadu_ps(source), v);
  if (mode == APPLY_REST) v = _mm512_sub_ps(_mm512_loadu_ps(source), v);
  _mm512_storeu_ps(out, v);
}

MPQ_INLINE void apply16_f64(lanes q, double scale, const double *source, double *out, int mode)
{
  __m256i half[2] = {_mm512_castsi512_si256(q), _mm512_extracti64x4_epi64(q, 1)};
  for (int i = 0; i < 2; ++i) {
    __m512d v = _mm512_mul_pd(_mm512_cvtepi32_pd(half[i]), _mm512_set1_pd(scale));
    if (mode == APPLY_ADD) v = _mm512_add_pd(_mm512_loadu_pd(source + 8 * i), v);
    if (mode == APPLY_REST) v = _mm512_sub_pd(_mm512_loadu_pd(source + 8 * i), v);
    _mm512_storeu_pd(out + 8 * i, v);
  }
}

MPQ_INLINE uint64_t join_masks(const __mmask16 k[4])
{
  return _mm512_kunpackd(_mm512_kunpackw(k[3], k[2]), _mm512_kunpackw(k[1], k[0]));
}

typedef __m512 sums_f32[4];
typedef __m512d sums_f64[8];

MPQ_INLINE uint64_t above64_f64(const double *x, double threshold, sums_f64 sum)
{
  __mmask8 k[8];
  __mmask16 joined[4];
  for (int i = 0; i < 8; ++i) {
    __m512d v = _mm512_abs_pd(_mm512_loadu_pd(x + 8 * i));
    k[i] = _mm512_cmp_pd_mask(v, _mm512_set1_pd(threshold), _CMP_GT_OQ);
    sum[i] = _mm512_mask_add_pd(sum[i], k[i], sum[i], v);
  }
  for (int i = 0; i < 4; ++i) joined[i] = _mm512_kunpackb(k[2 * i + 1], k[2 * i]);
  return join_masks(joined);
}

/* ---- 64 integers <-> planes ---- */

MPQ_INLINE q8 pack8(const lanes v[4])
{
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]),
                                                            _mm512_packs_epi32(v[2], v[3])));
}

MPQ_INLINE uint64_t signs64_f32(const float *x)
{
  /* Packing with saturation keeps signs, and costs less than joining masks. */
  lanes v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_si512(x + 16 * i);
  return _mm512_movepi8_mask(pack8(v));
}

MPQ_INLINE uint64_t signs64_f64(const double *x)
{
  lanes v[4];
  const __m512i high = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (int i = 0; i < 4; ++i)
    v[i] = _mm512_permutex2var_epi32(_mm512_loadu_si512(x + 16 * i), high,
                                     _mm512_loadu_si512(x + 16 * i + 8));
  return _mm512_movepi8_mask(pack8(v));
}

MPQ_INLINE uint64_t above64_f32(const float *x, float threshold, sums_f32 sum)
{
  /* Magnitudes compare as integers; the sign of a difference is both the mask of the sum and,
     packed, the bit of the plane. */
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i limit = _mm512_castps_si512(_mm512_set1_ps(threshold));
  lanes below[4];
  for (int i = 0; i < 4; ++i) {
    __m512i v = _mm512_and_si512(_mm512_loadu_si512(x + 16 * i), magnitude);
    below[i] = _mm512_sub_epi32(limit, v);
    v = _mm512_and_si512(v, _mm512_srai_epi32(below[i], 31));
    sum[i] = _mm512_add_ps(sum[i], _mm512_castsi512_ps(v));
  }
  return _mm512_movepi8_mask(pack8(below));
}

MPQ_INLINE q16 pack16(const lanes v[4])
{
  const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
  q16 q = {{_mm512_permutexvar_epi64(order, _mm512_packs_epi32(v[0], v[1])),
            _mm512_permutexvar_epi64(order, _mm512_packs_epi32(v[2], v[3]))}};
  return q;
}

MPQ_INLINE void unpack8(q8 q, lanes v[4])
{
  v[0] = _mm512_cvtepi8_epi32(_mm512_castsi512_si128(q));
  v[1] = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(q, 1));
  v[2] = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(q, 2));
  v[3] = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(q, 3));
}

MPQ_INLINE void unpack16(q16 q, lanes v[4])
{
  for (int i = 0; i < 2; ++i) {
    v[2 * i] = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(q.part[i]));
    v[2 * i + 1] = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(q.part[i], 1));
  }
}

MPQ_INLINE q8 set8(int value) { return _mm512_set1_epi8((char)value); }
MPQ_INLINE uint64_t signs8(q8 q) { return _mm512_movepi8_mask(q); }
MPQ_INLINE q8 magnitude8(q8 q) { return _mm512_abs_epi8(q); }

MPQ_INLINE uint64_t plane8(q8 q, int bit)
{
  return _mm512_test_epi8_mask(q, _mm512_set1_epi8((char)(1 << bit)));
}

MPQ_INLINE q8 insert8(q8 q, uint64_t plane, int bit)
{
  return _mm512_or_si512(q, _mm512_maskz_set1_epi8(plane, (char)(1 << bit)));
}

MPQ_INLINE q8 negate8(q8 q, uint64_t signs)
{
  return _mm512_mask_sub_epi8(q, signs, _mm512_setzero_si512(), q);
}

MPQ_INLINE q16 set16(int value)
{
  q16 q = {{_mm512_set1_epi16((short)value), _mm512_set1_epi16((short)value)}};
  return q;
}

MPQ_INLINE q16 load16(const int16_t *codes)
{
  q16 q = {{_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 32)}};
  return q;
}

MPQ_INLINE void store16(q16 q, int16_t *codes)
{
  _mm512_storeu_si512(codes, q.part[0]);
  _mm512_storeu_si512(codes + 32, q.part[1]);
}

MPQ_INLINE uint64_t signs16(q16 q)
{
  return _mm512_movepi16_mask(q.part[0]) | (uint64_t)_mm512_movepi16_mask(q.part[1]) << 32;
}

MPQ_INLINE q16 magnitude16(q16 q)
{
  q16 m = {{_mm512_abs_epi16(q.part[0]), _mm512_abs_epi16(q.part[1])}};
  return m;
}

MPQ_INLINE uint64_t plane16(q16 q, int bit)
{
  __m512i mask = _mm512_set1_epi16((short)(1 << bit));
  return _mm512_test_epi16_mask(q.part[0], mask)
         | (uint64_t)_mm512_test_epi16_mask(q.part[1], mask) << 32;
}

MPQ_INLINE q16 insert16(q16 q, uint64_t plane, int bit)
{
  short value = (short)(1 << bit);
  q.part[0] = _mm512_or_si512(q.part[0], _mm512_maskz_set1_epi16((__mmask32)plane, value));
  q.part[1] = _mm512_or_si512(q.part[1], _mm512_maskz_set1_epi16((__mmask32)(plane >> 32), value));
  return q;
}

MPQ_INLINE q16 negate16(q16 q, uint64_t signs)
{
  __m512i zero = _mm512_setzero_si512();
  q.part[0] = _mm512_mask_sub_epi16(q.part[0], (__mmask32)signs, zero, q.part[0]);
  q.part[1] = _mm512_mask_sub_epi16(q.part[1], (__mmask32)(signs >> 32), zero, q.part[1]);
  return q;
}

/* ---- half precision ---- */

MPQ_INLINE void half_from_float16(const float *x, uint16_t *out)
{
  _mm256_storeu_si256((__m256i *)out,
                      _mm512_cvtps_ph(_mm512_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}

MPQ_INLINE void float_from_half16(const uint16_t *x, float *out)
{
  _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)));
}

#endif
