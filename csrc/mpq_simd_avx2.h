/* Group operations with AVX2 and F16C.  See mpq_simd_portable.h for what each must do. */
#ifndef MPQ_SIMD_H
#define MPQ_SIMD_H

#include <immintrin.h>

#include "mpq_random.h"

#define MPQ_VECTOR_NBYTES 32
#define MPQ_INLINE static inline __attribute__((always_inline))

typedef struct {
  __m256i half[2]; /* 8 int32 each */
} lanes;
typedef struct {
  __m256i part[2]; /* 32 int8 each */
} q8;
typedef struct {
  __m256i part[4]; /* 16 int16 each */
} q16;

/* ---- 16 values <-> 16 integers ---- */

MPQ_INLINE lanes nearest16_f32(const float *x, float inverse)
{
  __m256 factor = _mm256_set1_ps(inverse);
  lanes q = {{_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), factor)),
              _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), factor))}};
  return q;
}

MPQ_INLINE lanes nearest16_f64(const double *x, double inverse)
{
  __m256d factor = _mm256_set1_pd(inverse);
  __m128i q[4];
  for (int i = 0; i < 4; ++i)
    q[i] = _mm256_cvtpd_epi32(_mm256_mul_pd(_mm256_loadu_pd(x + 4 * i), factor));
  lanes joined = {{_mm256_set_m128i(q[1], q[0]), _mm256_set_m128i(q[3], q[2])}};
  return joined;
}

MPQ_INLINE __m256i hash8(mpq_draw draw, uint32_t first_lane)
{
  const __m256i index = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  __m256i weyl = _mm256_mullo_epi32(index, _mm256_set1_epi32((int)MPQ_GOLDEN32));
  __m256i h =
      _mm256_add_epi32(weyl, _mm256_set1_epi32((int)(draw.a + first_lane * MPQ_GOLDEN32)));
  h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
  h = _mm256_mullo_epi32(h, _mm256_set1_epi32((int)MPQ_MIX1));
  h = _mm256_xor_si256(h, _mm256_set1_epi32((int)draw.b));
  h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 15));
  h = _mm256_mullo_epi32(h, _mm256_set1_epi32((int)MPQ_MIX2));
  return _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
}

MPQ_INLINE lanes random16(mpq_draw draw, int quarter)
{
  lanes r;
  for (int i = 0; i < 2; ++i) {
    __m256i h = hash8(draw, (uint32_t)(16 * (quarter & 1) + 8 * i));
    h = quarter < 2 ? _mm256_and_si256(_mm256_slli_epi32(h, 1), _mm256_set1_epi32(0x1FFFE))
                    : _mm256_srli_epi32(h, 15);
    r.half[i] = _mm256_or_si256(h, _mm256_set1_epi32(1));
  }
  return r;
}

MPQ_INLINE lanes stochastic16_f32(const float *x, float inverse, float limit, lanes random)
{
  lanes q;
  for (int i = 0; i < 2; ++i) {
    __m256 y = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse));
    y = _mm256_max_ps(_mm256_min_ps(y, _mm256_set1_ps(limit)), _mm256_set1_ps(-limit));
    __m256 floor = _mm256_floor_ps(y);
    __m256 rest = _mm256_mul_ps(_mm256_sub_ps(y, floor), _mm256_set1_ps(131072.0f));
    __m256 up = _mm256_cmp_ps(_mm256_cvtepi32_ps(random.half[i]), rest, _CMP_LT_OQ);
    q.half[i] = _mm256_sub_epi32(_mm256_cvttps_epi32(floor), _mm256_castps_si256(up));
  }
  return q;
}

MPQ_INLINE __m128i stochastic4_f64(const double *x, double inverse, double limit, __m128i random)
{
  __m256d y = _mm256_mul_pd(_mm256_loadu_pd(x), _mm256_set1_pd(inverse));
  y = _mm256_max_pd(_mm256_min_pd(y, _mm256_set1_pd(limit)), _mm256_set1_pd(-limit));
  __m256d floor = _mm256_floor_pd(y);
  __m256d rest = _mm256_mul_pd(_mm256_sub_pd(y, floor), _mm256_set1_pd(131072.0));
  __m256d up = _mm256_cmp_pd(_mm256_cvtepi32_pd(random), rest, _CMP_LT_OQ);
  return _mm256_cvttpd_epi32(_mm256_add_pd(floor, _mm256_and_pd(up, _mm256_set1_pd(1.0))));
}

MPQ_INLINE lanes stochastic16_f64(const double *x, double inverse, double limit, lanes random)
{
  lanes q;
  for (int i = 0; i < 2; ++i) {
    const double *part = x + 8 * i;
    __m128i low = stochastic4_f64(part, inverse, limit, _mm256_castsi256_si128(random.half[i]));
    __m128i high =
        stochastic4_f64(part + 4, inverse, limit, _mm256_extracti128_si256(random.half[i], 1));
    q.half[i] = _mm256_set_m128i(high, low);
  }
  return q;
}

enum apply_mode { APPLY_SET, APPLY_ADD, APPLY_REST };

MPQ_INLINE void apply16_f32(lanes q, float scale, const float *source, float *out, int mode)
{
  for (int i = 0; i < 2; ++i) {
    __m256 v = _mm256_mul_ps(_mm256_cvtepi32_ps(q.half[i]), _mm256_set1_ps(scale));
    if (mode == APPLY_ADD) v = _mm256_add_ps(_mm256_loadu_ps(source + 8 * i), v);
    if (mode == APPLY_REST) v = _mm256_sub_ps(_mm256_loadu_ps(source + 8 * i), v);
    _mm256_storeu_ps(out + 8 * i, v);
  }
}

MPQ_INLINE void apply16_f64(lanes q, double scale, const double *source, double *out, int mode)
{
  __m128i part[4] = {
      _mm256_castsi256_si128(q.half[0]), _mm256_extracti128_si256(q.half[0], 1),
      _mm256_castsi256_si128(q.half[1]), _mm256_extracti128_si256(q.half[1], 1)};
  for (int i = 0; i < 4; ++i) {
    __m256d v = _mm256_mul_pd(_mm256_cvtepi32_pd(part[i]), _mm256_set1_pd(scale));
    if (mode == APPLY_ADD) v = _mm256_add_pd(_mm256_loadu_pd(source + 4 * i), v);
    if (mode == APPLY_REST) v = _mm256_sub_pd(_mm256_loadu_pd(source + 4 * i), v);
    _mm256_storeu_pd(out + 4 * i, v);
  }
}

MPQ_INLINE uint64_t signs64_f32(const float *x)
{
  uint64_t mask = 0;
  for (int i = 0; i < 8; ++i)
    mask |= (uint64_t)_mm256_movemask_ps(_mm256_loadu_ps(x + 8 * i)) << 8 * i;
  return mask;
}

MPQ_INLINE uint64_t signs64_f64(const double *x)
{
  uint64_t mask = 0;
  for (int i = 0; i < 16; ++i)
    mask |= (uint64_t)_mm256_movemask_pd(_mm256_loadu_pd(x + 4 * i)) << 4 * i;
  return mask;
}

typedef __m256 sums_f32[8];
typedef __m256d sums_f64[16];

MPQ_INLINE uint64_t above64_f32(const float *x, float threshold, sums_f32 sum)
{
  uint64_t mask = 0;
  for (int i = 0; i < 8; ++i) {
    __m256 v = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x + 8 * i));
    __m256 above = _mm256_cmp_ps(v, _mm256_set1_ps(threshold), _CMP_GT_OQ);
    sum[i] = _mm256_add_ps(sum[i], _mm256_and_ps(v, above));
    mask |= (uint64_t)_mm256_movemask_ps(above) << 8 * i;
  }
  return mask;
}

MPQ_INLINE uint64_t above64_f64(const double *x, double threshold, sums_f64 sum)
{
  uint64_t mask = 0;
  for (int i = 0; i < 16; ++i) {
    __m256d v = _mm256_andnot_pd(_mm256_set1_pd(-0.0), _mm256_loadu_pd(x + 4 * i));
    __m256d above = _mm256_cmp_pd(v, _mm256_set1_pd(threshold), _CMP_GT_OQ);
    sum[i] = _mm256_add_pd(sum[i], _mm256_and_pd(v, above));
    mask |= (uint64_t)_mm256_movemask_pd(above) << 4 * i;
  }
  return mask;
}

/* ---- 64 integers <-> planes ---- */

MPQ_INLINE q8 pack8(const lanes v[4])
{
  const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
  q8 q;
  for (int i = 0; i < 2; ++i) {
    __m256i low = _mm256_packs_epi32(v[2 * i].half[0], v[2 * i].half[1]);
    __m256i high = _mm256_packs_epi32(v[2 * i + 1].half[0], v[2 * i + 1].half[1]);
    q.part[i] = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  }
  return q;
}

MPQ_INLINE q16 pack16(const lanes v[4])
{
  q16 q;
  for (int i = 0; i < 4; ++i)
    q.part[i] = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[i].half[0], v[i].half[1]), 0xD8);
  return q;
}

MPQ_INLINE void unpack8(q8 q, lanes v[4])
{
  for (int i = 0; i < 4; ++i) {
    __m256i part = q.part[i / 2];
    __m128i sixteen = i % 2 ? _mm256_extracti128_si256(part, 1) : _mm256_castsi256_si128(part);
    v[i].half[0] = _mm256_cvtepi8_epi32(sixteen);
    v[i].half[1] = _mm256_cvtepi8_epi32(_mm_srli_si128(sixteen, 8));
  }
}

MPQ_INLINE void unpack16(q16 q, lanes v[4])
{
  for (int i = 0; i < 4; ++i) {
    v[i].half[0] = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(q.part[i]));
    v[i].half[1] = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(q.part[i], 1));
  }
}

MPQ_INLINE q8 set8(int value)
{
  q8 q = {{_mm256_set1_epi8((char)value), _mm256_set1_epi8((char)value)}};
  return q;
}

MPQ_INLINE uint64_t signs8(q8 q)
{
  return (uint32_t)_mm256_movemask_epi8(q.part[0])
         | (uint64_t)(uint32_t)_mm256_movemask_epi8(q.part[1]) << 32;
}

MPQ_INLINE q8 magnitude8(q8 q)
{
  q8 m = {{_mm256_abs_epi8(q.part[0]), _mm256_abs_epi8(q.part[1])}};
  return m;
}

MPQ_INLINE uint64_t plane8(q8 q, int bit)
{
  /* movemask reads the top bit of each byte; bits that a 16-bit shift brings in from a
     neighbouring byte stay below it. */
  __m128i shift = _mm_cvtsi32_si128(7 - bit);
  q8 shifted = {{_mm256_sll_epi16(q.part[0], shift), _mm256_sll_epi16(q.part[1], shift)}};
  return signs8(shifted);
}

/* Bytes of all ones where the bit of the 32-bit word is set. */
MPQ_INLINE __m256i spread_bits(uint32_t word)
{
  const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202,
                                         0x0101010101010101, 0x0000000000000000);
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
  __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32((int)word), byte);
  return _mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit);
}

MPQ_INLINE q8 insert8(q8 q, uint64_t plane, int bit)
{
  __m256i value = _mm256_set1_epi8((char)(1 << bit));
  for (int i = 0; i < 2; ++i)
    q.part[i] = _mm256_or_si256(
        q.part[i], _mm256_and_si256(spread_bits((uint32_t)(plane >> 32 * i)), value));
  return q;
}

MPQ_INLINE q8 negate8(q8 q, uint64_t signs)
{
  for (int i = 0; i < 2; ++i) {
    __m256i mask = spread_bits((uint32_t)(signs >> 32 * i));
    q.part[i] = _mm256_sub_epi8(_mm256_xor_si256(q.part[i], mask), mask);
  }
  return q;
}

MPQ_INLINE q16 set16(int value)
{
  q16 q;
  for (int i = 0; i < 4; ++i) q.part[i] = _mm256_set1_epi16((short)value);
  return q;
}

MPQ_INLINE q16 load16(const int16_t *codes)
{
  q16 q;
  for (int i = 0; i < 4; ++i) q.part[i] = _mm256_loadu_si256((const __m256i *)codes + i);
  return q;
}

MPQ_INLINE void store16(q16 q, int16_t *codes)
{
  for (int i = 0; i < 4; ++i) _mm256_storeu_si256((__m256i *)codes + i, q.part[i]);
}

/* The top bit of each of 32 int16. */
MPQ_INLINE uint64_t tops32(__m256i low, __m256i high)
{
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
  return (uint32_t)_mm256_movemask_epi8(packed);
}

MPQ_INLINE uint64_t signs16(q16 q)
{
  return tops32(q.part[0], q.part[1]) | tops32(q.part[2], q.part[3]) << 32;
}

MPQ_INLINE q16 magnitude16(q16 q)
{
  for (int i = 0; i < 4; ++i) q.part[i] = _mm256_abs_epi16(q.part[i]);
  return q;
}

MPQ_INLINE uint64_t plane16(q16 q, int bit)
{
  for (int i = 0; i < 4; ++i)
    q.part[i] = _mm256_sll_epi16(q.part[i], _mm_cvtsi32_si128(15 - bit));
  return signs16(q);
}

/* Words of all ones where the bit of the 16-bit word is set. */
MPQ_INLINE __m256i spread_words(uint16_t word)
{
  const __m256i bit = _mm256_set_epi16((short)0x8000, 0x4000, 0x2000, 0x1000, 0x800, 0x400, 0x200,
                                       0x100, 0x80, 0x40, 0x20, 0x10, 8, 4, 2, 1);
  return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((short)word), bit), bit);
}

MPQ_INLINE q16 insert16(q16 q, uint64_t plane, int bit)
{
  __m256i value = _mm256_set1_epi16((short)(1 << bit));
  for (int i = 0; i < 4; ++i)
    q.part[i] = _mm256_or_si256(
        q.part[i], _mm256_and_si256(spread_words((uint16_t)(plane >> 16 * i)), value));
  return q;
}

MPQ_INLINE q16 negate16(q16 q, uint64_t signs)
{
  for (int i = 0; i < 4; ++i) {
    __m256i mask = spread_words((uint16_t)(signs >> 16 * i));
    q.part[i] = _mm256_sub_epi16(_mm256_xor_si256(q.part[i], mask), mask);
  }
  return q;
}

/* ---- half precision ---- */

MPQ_INLINE void half_from_float16(const float *x, uint16_t *out)
{
  for (int i = 0; i < 2; ++i)
    _mm_storeu_si128((__m128i *)out + i,
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + 8 * i), _MM_FROUND_TO_NEAREST_INT));
}

MPQ_INLINE void float_from_half16(const uint16_t *x, float *out)
{
  for (int i = 0; i < 2; ++i)
    _mm256_storeu_ps(out + 8 * i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x + i)));
}

#endif
