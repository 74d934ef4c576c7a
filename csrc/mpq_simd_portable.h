/* Group operations in portable C; the definition of what the vector versions must compute.
 *
 * The kernels work on groups of 64 values.  A type-dependent half turns 16 values into 16 integers
 * (`lanes`) and back; a type-free half packs 64 integers into bytes (`q8`, up to 8 bits) or words
 * (`q16`, up to 16 bits) and moves single bits between them and 64-bit plane words.
 */
#ifndef MPQ_SIMD_H
#define MPQ_SIMD_H

#include <string.h>

#include "mpq_random.h"

#define MPQ_PORTABLE /* one loop serves all widths */
#define MPQ_VECTOR_NBYTES 16
#define MPQ_INLINE static inline __attribute__((always_inline))

typedef struct {
  int32_t v[16];
} lanes;
typedef struct {
  uint8_t v[64];
} q8;
typedef struct {
  uint16_t v[64];
} q16;

/* ---- 16 values <-> 16 integers ---- */

/* Integers nearest to x * inverse, ties to even; the products stay far below 2^22. */
MPQ_INLINE lanes nearest16_f32(const mpq_f32 *x, float inverse)
{
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  lanes q;
  for (int i = 0; i < 16; ++i) q.v[i] = (int32_t)((x[i] * inverse + magic) - magic);
  return q;
}

MPQ_INLINE lanes nearest16_f64(const mpq_f64 *x, double inverse)
{
  const double magic = 6755399441055744.0; /* 1.5 * 2^52 */
  lanes q;
  for (int i = 0; i < 16; ++i) q.v[i] = (int32_t)((x[i] * inverse + magic) - magic);
  return q;
}

/* The random numbers of values 16 * quarter ... of the group, odd and below 2^17. */
MPQ_INLINE lanes random16(mpq_draw draw, int quarter)
{
  lanes r;
  for (int i = 0; i < 16; ++i) r.v[i] = (int32_t)mpq_draw_value(draw, 16 * quarter + i);
  return r;
}

/* floor(y), plus one where the random number is below the fraction; y within +-limit. */
MPQ_INLINE lanes stochastic16_f32(const mpq_f32 *x, float inverse, float limit, lanes random)
{
  lanes q;
  for (int i = 0; i < 16; ++i) {
    float y = x[i] * inverse;
    y = y < limit ? y : limit;
    y = y > -limit ? y : -limit;
    int32_t t = (int32_t)y;
    t -= (float)t > y;
    q.v[i] = t + ((float)random.v[i] < (y - (float)t) * 131072.0f);
  }
  return q;
}

MPQ_INLINE lanes stochastic16_f64(const mpq_f64 *x, double inverse, double limit, lanes random)
{
  lanes q;
  for (int i = 0; i < 16; ++i) {
    double y = x[i] * inverse;
    y = y < limit ? y : limit;
    y = y > -limit ? y : -limit;
    int32_t t = (int32_t)y;
    t -= (double)t > y;
    q.v[i] = t + ((double)random.v[i] < (y - (double)t) * 131072.0);
  }
  return q;
}

/* out = q * scale, source + q * scale, or source - q * scale. */
enum apply_mode { APPLY_SET, APPLY_ADD, APPLY_REST };

#define MPQ_APPLY16(S, REAL)                                                                      \
  MPQ_INLINE void apply16_##S(lanes q, REAL scale, const mpq_##S *source, mpq_##S *out, int mode) \
  {                                                                                               \
    for (int i = 0; i < 16; ++i) {                                                                \
      REAL v = (REAL)q.v[i] * scale;                                                              \
      out[i] = mode == APPLY_SET ? v : mode == APPLY_ADD ? source[i] + v : source[i] - v;         \
    }                                                                                             \
  }
MPQ_APPLY16(f32, float)
MPQ_APPLY16(f64, double)

/* Bit i: the sign bit of x[i]; and whether |x[i]| > threshold, where sum[i] += |x[i]| too. */
#define MPQ_MASKS64(S, REAL)                                                                      \
  typedef REAL sums_##S[64];                                                                      \
  MPQ_INLINE uint64_t signs64_##S(const mpq_##S *x)                                               \
  {                                                                                               \
    uint64_t mask = 0;                                                                            \
    for (int i = 0; i < 64; ++i) mask |= (uint64_t)(__builtin_signbit(x[i]) != 0) << i;           \
    return mask;                                                                                  \
  }                                                                                               \
  MPQ_INLINE uint64_t above64_##S(const mpq_##S *x, REAL threshold, sums_##S sum)                 \
  {                                                                                               \
    uint64_t mask = 0;                                                                            \
    for (int i = 0; i < 64; ++i) {                                                                \
      REAL v = x[i] < 0 ? -x[i] : x[i];                                                           \
      uint64_t above = v > threshold;                                                             \
      sum[i] += above ? v : 0;                                                                    \
      mask |= above << i;                                                                         \
    }                                                                                             \
    return mask;                                                                                  \
  }
MPQ_MASKS64(f32, float)
MPQ_MASKS64(f64, double)

/* ---- 64 integers <-> planes ---- */

MPQ_INLINE q8 pack8(const lanes v[4])
{
  q8 q;
  for (int i = 0; i < 64; ++i) q.v[i] = (uint8_t)v[i / 16].v[i % 16];
  return q;
}

MPQ_INLINE q16 pack16(const lanes v[4])
{
  q16 q;
  for (int i = 0; i < 64; ++i) q.v[i] = (uint16_t)v[i / 16].v[i % 16];
  return q;
}

MPQ_INLINE void unpack8(q8 q, lanes v[4])
{
  for (int i = 0; i < 64; ++i) v[i / 16].v[i % 16] = (int8_t)q.v[i];
}

MPQ_INLINE void unpack16(q16 q, lanes v[4])
{
  for (int i = 0; i < 64; ++i) v[i / 16].v[i % 16] = (int16_t)q.v[i];
}

MPQ_INLINE q8 set8(int value)
{
  q8 q;
  memset(q.v, value, 64);
  return q;
}

/* Bit `bit` of each of the 64 bytes, gathered eight at a time: the product brings bit 0 of byte i
   to bit 56 + i without a carry. */
MPQ_INLINE uint64_t plane8(q8 q, int bit)
{
  uint64_t plane = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t w;
    memcpy(&w, q.v + 8 * i, 8);
    w = (w >> bit) & UINT64_C(0x0101010101010101);
    plane |= ((w * UINT64_C(0x0102040810204080)) >> 56) << 8 * i;
  }
  return plane;
}

MPQ_INLINE uint64_t signs8(q8 q) { return plane8(q, 7); }

MPQ_INLINE q8 magnitude8(q8 q)
{
  for (int i = 0; i < 64; ++i) q.v[i] = (uint8_t)((int8_t)q.v[i] < 0 ? -q.v[i] : q.v[i]);
  return q;
}

/* Eight bytes of 0 or 1 from the eight bits of a byte. */
MPQ_INLINE uint64_t spread_byte(uint64_t byte)
{
  uint64_t w = (byte * UINT64_C(0x0101010101010101)) & UINT64_C(0x8040201008040201);
  return ((w + UINT64_C(0x7F7F7F7F7F7F7F7F)) >> 7) & UINT64_C(0x0101010101010101);
}

/* Sets bit `bit` of the bytes (words) whose bit in the plane is set. */
MPQ_INLINE q8 insert8(q8 q, uint64_t plane, int bit)
{
  for (int i = 0; i < 8; ++i) {
    uint64_t w;
    memcpy(&w, q.v + 8 * i, 8);
    w |= spread_byte((plane >> 8 * i) & 255) << bit;
    memcpy(q.v + 8 * i, &w, 8);
  }
  return q;
}

MPQ_INLINE q8 negate8(q8 q, uint64_t signs)
{
  for (int i = 0; i < 64; ++i) q.v[i] = (uint8_t)((signs >> i) & 1 ? -q.v[i] : q.v[i]);
  return q;
}

MPQ_INLINE q16 set16(int value)
{
  q16 q;
  for (int i = 0; i < 64; ++i) q.v[i] = (uint16_t)value;
  return q;
}

MPQ_INLINE q16 load16(const int16_t *codes)
{
  q16 q;
  memcpy(q.v, codes, sizeof q.v);
  return q;
}

MPQ_INLINE void store16(q16 q, int16_t *codes) { memcpy(codes, q.v, sizeof q.v); }

MPQ_INLINE uint64_t plane16(q16 q, int bit)
{
  uint64_t plane = 0;
  for (int i = 0; i < 64; ++i) plane |= (uint64_t)((q.v[i] >> bit) & 1) << i;
  return plane;
}

MPQ_INLINE uint64_t signs16(q16 q) { return plane16(q, 15); }

MPQ_INLINE q16 magnitude16(q16 q)
{
  for (int i = 0; i < 64; ++i) q.v[i] = (uint16_t)((int16_t)q.v[i] < 0 ? -q.v[i] : q.v[i]);
  return q;
}

MPQ_INLINE q16 insert16(q16 q, uint64_t plane, int bit)
{
  for (int i = 0; i < 64; ++i) q.v[i] |= (uint16_t)(((plane >> i) & 1) << bit);
  return q;
}

MPQ_INLINE q16 negate16(q16 q, uint64_t signs)
{
  for (int i = 0; i < 64; ++i) q.v[i] = (uint16_t)((signs >> i) & 1 ? -q.v[i] : q.v[i]);
  return q;
}

/* ---- half precision ---- */

/* IEEE 754 binary16, nearest with ties to even, NaN payloads cut and made quiet. */
MPQ_INLINE uint16_t half_from_float(float x)
{
  uint32_t w, sign, magnitude;
  memcpy(&w, &x, 4);
  sign = (w >> 16) & 0x8000u;
  magnitude = w & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7E00u | ((magnitude >> 13) & 0x1FFu));
  if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); /* 65520 and more */
  if (magnitude < 0x38800000u) {                                   /* a subnormal half */
    float lifted;
    memcpy(&lifted, &magnitude, 4);
    lifted += 0.5f; /* whose last place is the smallest half */
    memcpy(&w, &lifted, 4);
    return (uint16_t)(sign | (w - 0x3F000000u));
  }
  magnitude += 0xFFFu + ((magnitude >> 13) & 1u);
  return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

MPQ_INLINE float float_from_half(uint16_t h)
{
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7FFFu, w;
  float x;
  if (magnitude >= 0x7C00u) {
    w = sign | 0x7F800000u | (magnitude & 0x3FFu) << 13 | (magnitude > 0x7C00u ? 0x400000u : 0u);
  } else if (magnitude >= 0x400u) {
    w = sign | ((magnitude << 13) + 0x38000000u);
  } else {
    x = (float)magnitude * 0x1p-24f;
    memcpy(&w, &x, 4);
    w |= sign;
  }
  memcpy(&x, &w, 4);
  return x;
}

MPQ_INLINE void half_from_float16(const float *x, uint16_t *out)
{
  for (int i = 0; i < 16; ++i) out[i] = half_from_float(x[i]);
}

MPQ_INLINE void float_from_half16(const uint16_t *x, float *out)
{
  for (int i = 0; i < 16; ++i) out[i] = float_from_half(x[i]);
}

#endif
