/* Counter-based random numbers: 64 numbers for each group of 64 values.
 *
 * A group's counter and the message's key are mixed by SplitMix64 (Steele, Lea, Flood 2014) into
 * two 32-bit words.  Lane j of 32 then hashes word a + j * golden ratio with a two-round
 * multiply-xorshift mixer, word b entering between the rounds; its low half serves value j of the
 * group and its high half value 32 + j.  A half u becomes the odd number 2u + 1 below 2^17, the
 * middle of its bin, so that rounding up with probability f happens with f's nearest multiple of
 * 2^-16, and never for f = 0.  Nothing depends on the order of evaluation, so a vector
 * of any width gives the same numbers.
 */
#ifndef MPQ_RANDOM_H
#define MPQ_RANDOM_H

#include "mpq.h"

#define MPQ_GOLDEN32 0x9E3779B9u
#define MPQ_MIX1 0x7FEB352Du
#define MPQ_MIX2 0x846CA68Bu

typedef struct {
  uint32_t a, b;
} mpq_draw;

static inline mpq_draw mpq_draw_group(mpq_stream stream, int64_t position)
{
  uint64_t group = (uint64_t)(stream.index + position) / MPQ_GROUP;
  uint64_t z = stream.key + (group + 1) * UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  z ^= z >> 31;
  mpq_draw draw = {(uint32_t)z, (uint32_t)(z >> 32)};
  return draw;
}

static inline uint32_t mpq_draw_lane(mpq_draw draw, uint32_t lane)
{
  uint32_t h = draw.a + lane * MPQ_GOLDEN32;
  h = (h ^ (h >> 16)) * MPQ_MIX1;
  h ^= draw.b;
  h = (h ^ (h >> 15)) * MPQ_MIX2;
  return h ^ (h >> 16);
}

/* The number of value i (0 to 63) of the group: odd, below 2^17. */
static inline uint32_t mpq_draw_value(mpq_draw draw, int i)
{
  uint32_t h = mpq_draw_lane(draw, (uint32_t)i & 31u);
  return ((i < 32 ? h & 0xFFFFu : h >> 16) << 1) | 1u;
}

#endif
