/* mpiquant kernels: block quantization of float arrays into bit planes.
 *
 * Plain C11, no allocation, no global state but the chosen instruction set.  All functions are
 * reentrant, accept unaligned pointers and any n >= 0, and give the same bits on every instruction
 * set.  Sizes are in elements unless a name says `nbytes`.
 *
 * Wire format of one segment of n values with blocks of B values (little-endian):
 *
 *     offset 0                 scale of block 0, 1, ... ceil(n/B)-1      sizeof(real) bytes each
 *     then                     sign plane                                ceil(n/8) bytes
 *     then, bits-1 times       magnitude plane, most significant first   ceil(n/8) bytes
 *
 * Value i owns bit (i % 8) of byte (i / 8) of every plane; bits behind the last value are 0.
 */
#ifndef MPQ_H
#define MPQ_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian and so must the machine be"
#endif

/* How a block of values becomes integers. */
enum mpq_kind {
  MPQ_NEAREST = 0,    /* scale = absmax / L, L = 2^(bits-1)-1; round to nearest, ties to even */
  MPQ_STOCHASTIC = 1, /* the same scale; unbiased random rounding */
  MPQ_LEVELS = 2,     /* bits = 1: sign; bits = 2: sign times {1, 3}; least-squares scale */
  MPQ_TERNARY = 3     /* bits = 2: {-1, 0, 1} by threshold; least-squares scale */
};

#define MPQ_BITS_MAX 16
#define MPQ_BLOCK_MAX 8192 /* the fused hop keeps one block on the stack */
#define MPQ_GROUP 64       /* values whose bits of one plane make one 64-bit word */
#define MPQ_MIX_MAX 8      /* blocks that can be mixed */
#define MPQ_INTEGERS 128   /* integers of a message that have one width */
#define MPQ_BATCH_NBYTES 4096 /* values measured before the first of them is packed */
#define MPQ_AHEAD_NBYTES 4096 /* how far behind the next block memory is fetched while packing */

/* Reals at any address: what x, residual, addend and out point to. */
typedef float mpq_f32 __attribute__((aligned(1)));
typedef double mpq_f64 __attribute__((aligned(1)));

/* Flags that the functions return. */
#define MPQ_NONFINITE 1 /* a block held a NaN or an infinity: it is NaN as a whole once decoded */

typedef struct {
  int32_t kind;  /* enum mpq_kind */
  int32_t bits;  /* 1 to 16 planes, the sign plane included */
  int64_t block; /* values that share a scale, 1 to MPQ_BLOCK_MAX */
} mpq_format;

/* Key of the random numbers of a message; value i of the message draws number index + i. */
typedef struct {
  uint64_t key;
  int64_t index; /* a multiple of MPQ_GROUP */
} mpq_stream;

#define MPQ_DECLARE(S, REAL, INT)                                                                 \
  /* Writes the segment of x to wire.  residual, if not NULL, gets x minus what wire decodes to;  \
     it may be x itself. */                                                                       \
  int (*encode_##S)(const REAL *x, int64_t n, uint8_t *wire, const mpq_format *format,            \
                    mpq_stream stream, REAL *residual);                                           \
  /* out = decoded values. */                                                                     \
  int (*decode_##S)(const uint8_t *wire, int64_t n, const mpq_format *format, REAL *out);         \
  /* out = addend + decoded values; out may be addend itself. */                                  \
  int (*decode_add_##S)(const uint8_t *wire, int64_t n, const mpq_format *format,                 \
                        const REAL *addend, REAL *out);                                           \
  /* One hop of a ring: encode(x + decode(wire_in)) without the sum ever being stored.  Both      \
     formats have the same block. */                                                              \
  int (*hop_##S)(const uint8_t *wire_in, const mpq_format *format_in, const REAL *x, int64_t n,   \
                 uint8_t *wire_out, const mpq_format *format_out, mpq_stream stream,              \
                 REAL *residual);                                                                 \
  /* Casts to 16 bits (nearest, ties to even) and back, with the same residual and sum. */        \
  int (*to_half_##S)(const REAL *x, int64_t n, uint16_t *out, REAL *residual);                    \
  int (*from_half_##S)(const uint16_t *wire, int64_t n, const REAL *addend, REAL *out);           \
  int (*to_bfloat_##S)(const REAL *x, int64_t n, uint16_t *out, REAL *residual);                  \
  int (*from_bfloat_##S)(const uint16_t *wire, int64_t n, const REAL *addend, REAL *out);         \
  /* out[p] = sum over q of matrix[p * columns + q] * in[q], for blocks of n values; in doubles.  \
     An output may be one of the inputs, and none may overlap in another way.                     \
     1 <= columns <= MPQ_MIX_MAX, rows at most one more. */                                       \
  int (*mix_##S)(const REAL *const *in, int columns, REAL *const *out, int rows,                  \
                 const double *matrix, int64_t n);                                                \
  /* x += addend. */                                                                              \
  int (*add_##S)(const REAL *addend, int64_t n, REAL *x);                                          \
  /* q = x / step, to the nearest, for quotients below 2^51 that INT holds; returns the largest    \
     |x - q step|.  residual, if not NULL, gets x - q step.  All may be the same memory. */        \
  double (*to_integers_##S)(const REAL *x, int64_t n, double step, INT *q, REAL *residual);        \
  /* out = q step, for magnitudes of q below 2^51; out may be q. */                                \
  int (*from_integers_##S)(const INT *q, int64_t n, double step, REAL *out);                       \
  /* Writes q, or q plus the integers of a message in, without loss; returns the bytes written, or \
     -1 if in is no message of n integers.  wire has room for mpq_integers_nbytes. */              \
  int64_t (*pack_integers_##S)(const uint8_t *in, int64_t in_nbytes, const INT *q, int64_t n,      \
                               uint8_t *wire);                                                     \
  /* out = (addend +) the integers of a message; -1 if it is none. */                              \
  int (*unpack_integers_##S)(const uint8_t *wire, int64_t nbytes, int64_t n, const INT *addend,    \
                             INT *out);

typedef struct {
  const char *name; /* "baseline", "avx2", "avx512" */
  MPQ_DECLARE(f32, float, int32_t)
  MPQ_DECLARE(f64, double, int64_t)
} mpq_kernels;

/* The table of the named instruction set ("auto": the best of this CPU), or NULL if this CPU or
 * this build does not have it. */
const mpq_kernels *mpq_find_kernels(const char *name);

/* Bytes of a segment of n values whose scales have scale_nbytes bytes. */
static inline int64_t mpq_segment_nbytes(int64_t n, const mpq_format *format, int64_t scale_nbytes)
{
  int64_t blocks = n / format->block + (n % format->block != 0);
  return blocks * scale_nbytes + format->bits * (n / 8 + (n % 8 != 0));
}

/* Most bytes of a message of n integers of itemsize bytes. */
static inline int64_t mpq_integers_nbytes(int64_t n, int64_t itemsize)
{
  return n / MPQ_INTEGERS + (n % MPQ_INTEGERS != 0) + n * itemsize;
}

#endif
