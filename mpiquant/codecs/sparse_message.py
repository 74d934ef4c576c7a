"""Messages of positions and the values there.

Little-endian::

    offset  0  number of values k   (8)
            8  values, in the codec that sender and receiver agree on
            .  positions: nothing, if k is 0; else their code, of a length that follows from k and
               the number n of values that there are

*Positions* are coded as Elias (1974) and Fano (1971) did: of each ascending position the w lower
bits as they are, and the rest, as the differences from one to the next, in unary: a bitmap of
k + n / 2^w bits.  For w = 0 that is replaced by the plain bitmap of n bits.  Of the widths 0, 4, 8,
16 and 32, with which no bits need to be moved, the one with the fewest bytes is taken.  For 1 % of
the values that is 9.4 bits for each, 16 % above the least possible.

What a receiver reads is checked: positions ascend and lie in the array.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from mpiquant.codecs.abc import Codec
from mpiquant.typing import Array, Bytes

_COUNT = struct.Struct("<Q")
_LOW: dict[int, Any] = {4: np.uint8, 8: np.uint8, 16: np.dtype("<u2"), 32: np.dtype("<u4")}


# ---- positions ----


def positions_width(total: int, count: int) -> int:
    """Lower bits of a position that are sent as they are; 0: a bitmap."""
    return min((0, *_LOW), key=lambda width: _nbytes(total, count, width))


def positions_nbytes(total: int, count: int) -> int:
    """Bytes of the code of `count` positions below `total`."""
    return _nbytes(total, count, positions_width(total, count)) if count else 0


def _nbytes(total: int, count: int, width: int) -> int:
    if width == 0:
        return -(-total // 8)
    return _low_nbytes(count, width) + -(-_unary_bits(total, count, width) // 8)


def _low_nbytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def _unary_bits(total: int, count: int, width: int) -> int:
    return count + (max(total - 1, 0) >> width)


def encode_positions(at: Array, total: int, wire: Bytes) -> None:
    """Write (k,) ascending positions below `total` to `positions_nbytes(total, k)` bytes."""
    width = positions_width(total, at.size)
    if at.size == 0:
        return
    if width == 0:
        bits = np.zeros(total, bool)
        bits[at] = True
        wire[...] = np.packbits(bits, bitorder="little")
        return
    end = _low_nbytes(at.size, width)
    wire[:end] = _lower_bits(at, width)
    bits = np.zeros(_unary_bits(total, at.size, width), bool)
    bits[(at >> width) + np.arange(at.size)] = True
    wire[end:] = np.packbits(bits, bitorder="little")


def _lower_bits(at: Array, width: int) -> Bytes:
    low: Any = at.astype(_LOW[width])
    if width != 4:
        return np.asarray(low.view(np.uint8))
    low &= 15
    pairs: Bytes = low[::2].copy()
    pairs[: low.size // 2] |= low[1::2] << 4
    return pairs


def _from_lower_bits(wire: Bytes, width: int, count: int) -> Array:
    if width != 4:
        return np.asarray(np.ascontiguousarray(wire).view(_LOW[width]))
    return np.stack((wire & 15, wire >> 4), axis=1).reshape(-1)[:count]


def decode_positions(wire: Bytes, total: int, count: int) -> Array:
    """(count,) int64 array; ValueError if these bytes are no such positions."""
    if wire.size != positions_nbytes(total, count):
        raise ValueError(f"positions have {wire.size} bytes")
    if count == 0:
        return np.zeros(0, np.int64)
    width = positions_width(total, count)
    end = _low_nbytes(count, width)
    at = np.flatnonzero(np.unpackbits(wire[end:], bitorder="little"))
    if at.size != count:
        raise ValueError(f"{at.size} positions, expected {count}")
    if width:
        at -= np.arange(count)
        at <<= width
        at |= _from_lower_bits(wire[:end], width, count)
    if at[-1] >= total or np.any(at[1:] <= at[:-1]):
        raise ValueError(f"positions do not ascend up to {total - 1}")
    return at


# ---- messages ----


def message_nbytes(total: int, count: int, codec: Codec, dtype: np.dtype) -> int:
    """Bytes of a message of `count` of `total` values."""
    return _COUNT.size + positions_nbytes(total, count) + codec.nbytes(count, dtype)


def encode_message(at: Array, values: Array, total: int, codec: Codec, stream: int = 0) -> Bytes:
    """A message of (k,) values at ascending positions below `total`.

    The values are replaced by what the codec lost of them.
    """
    count, dtype = at.size, values.dtype
    wire = np.empty(message_nbytes(total, count, codec, dtype), np.uint8)
    wire[: _COUNT.size] = np.frombuffer(_COUNT.pack(count), np.uint8)
    end = _COUNT.size + codec.nbytes(count, dtype)
    codec.encode(values, wire[_COUNT.size : end], residual=values, stream=stream)
    encode_positions(at, total, wire[end:])
    return wire


def decode_message(
    wire: Bytes, total: int, codec: Codec, dtype: np.dtype
) -> tuple[Array, Array, bool]:
    """Positions, values and whether any of these is no number.

    Raises
    ------
    ValueError
        If it is no message about so many values.
    """
    if wire.size < _COUNT.size:
        raise ValueError(f"a message has {_COUNT.size} bytes or more, not {wire.size}")
    (count,) = _COUNT.unpack(wire[: _COUNT.size].tobytes())
    if count > total or wire.size != message_nbytes(total, count, codec, dtype):
        raise ValueError(f"a message of {wire.size} bytes says that it has {count} values")
    end = _COUNT.size + codec.nbytes(count, dtype)
    values = np.empty(count, dtype)
    nonfinite = codec.decode(wire[_COUNT.size : end], values)
    return decode_positions(wire[end:], total, count), values, nonfinite
