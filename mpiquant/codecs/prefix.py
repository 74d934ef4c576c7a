"""Messages that were cut short behind some of their bit planes.

Planes are sent most significant first, so the first `sent` planes of a `bits`-bit message are a
coarser message: they tell the magnitude down to a bin of 2^(bits - sent) integers.  A value is
rebuilt in the middle of its bin, and that of the lowest bin at zero, where most of its values are.
That bin is twice as wide as the others, so the error is up to 1.4 times that of a message that had
`sent` bits from the start (on normal, Laplace and Student-t data; 1.5 times if it had 16 before).

`expand` writes that middle as planes of a message of one more bit, with half the scale, so that the
ordinary kernels decode it: behind the planes that came there is a plane of zeros, and then, for
every value that is not zero, ones.  A message of 16 bits has no room for one more; there it is ones
and then zeros, half an integer above the middle, which is little if 4 planes or more are missing.

Cutting at fewer than 3 planes would leave one magnitude bit, of which values near the end of the
lowest bin lose everything; messages of 1 and 2 bits have levels of another kind, and are never
prefixes.
"""

from __future__ import annotations

import numpy as np

from mpiquant import _kernels
from mpiquant.codecs.uniform import UniformCodec
from mpiquant.typing import Array, Bytes

FEWEST = 3
"""Planes that are always sent."""

WIDE_MOST = 12
"""Most planes of a cut message of 16 bits."""


def prefix_nbytes(codec: UniformCodec, count: int, dtype: np.dtype, sent: int) -> int:
    """Bytes of the scales and the first `sent` planes of a message of count values."""
    return codec.nbytes(count, dtype) - (codec.bits - sent) * -(-count // 8)


def expand(
    codec: UniformCodec, prefix: Bytes, count: int, dtype: np.dtype, sent: int
) -> tuple[UniformCodec, Bytes]:
    """A whole message that decodes to the middles of the bins of a cut one.

    Parameters
    ----------
    codec : UniformCodec
        That of the message before it was cut.
    prefix : (prefix_nbytes(codec, count, dtype, sent),) uint8 array
    count : int
        Values of the message.
    dtype : numpy.dtype
        Of its scales.
    sent : int
        Planes that came, the sign plane included: 3 to codec.bits, but of 16 bits not 13 to 15.

    Returns
    -------
    codec, wire
        What the middles are written in; `codec` and `prefix` themselves if nothing was cut.
    """
    if not FEWEST <= sent <= codec.bits:
        raise ValueError(f"{sent} planes were sent, expected {FEWEST} to {codec.bits}")
    expected = prefix_nbytes(codec, count, dtype, sent)
    if prefix.nbytes != expected:
        raise ValueError(f"the message has {prefix.nbytes} bytes, expected {expected}")
    if sent == codec.bits:
        return codec, prefix
    wide = codec.bits == _kernels.BITS_MAX
    if wide and sent > WIDE_MOST:
        raise ValueError(f"{sent} of 16 planes were sent, expected at most {WIDE_MOST} or all")
    finer = codec if wide else UniformCodec(bits=codec.bits + 1, block=codec.block)
    wire = np.empty(finer.nbytes(count, dtype), np.uint8)
    stride = -(-count // 8)
    head = wire.nbytes - finer.bits * stride
    scales = prefix[:head].view(dtype)
    wire[:head].view(dtype)[...] = scales if wide else scales * dtype.type(0.5)
    planes, came = wire[head:].reshape(finer.bits, stride), prefix[head:].reshape(sent, stride)
    nonzero = np.bitwise_or.reduce(came[1:], axis=0)
    planes[:sent] = came
    planes[sent] = nonzero if wide else 0
    planes[sent + 1 :] = 0 if wide else nonzero
    return finer, wire


def decode_prefix(codec: UniformCodec, prefix: Bytes, out: Array, sent: int) -> bool:
    """Write what a cut message decodes to; True if a non-finite value was met."""
    whole, wire = expand(codec, prefix, out.size, out.dtype, sent)
    return whole.decode(wire, out)
