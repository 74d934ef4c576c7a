"""Integers without loss, blocks of 128 in the width that each needs; what `bounded` sends.

int32 and int64 arrays, with the bit planes of the other codecs: a block has 0 or 2 to 16 of them,
of its integers or of the differences between neighbours, whichever takes fewer; or it is written as
it is.  Constant blocks take a byte.  Messages therefore differ in length: the first 8 bytes say how
many follow, and what is behind those in a buffer has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiquant import _kernels
from mpiquant.codecs.abc import Codec
from mpiquant.typing import Array, Bytes

HEAD_NBYTES = 8


def _head(wire: Bytes) -> Array:
    return wire[:HEAD_NBYTES].view("<i8")


def _body(wire: Bytes) -> Bytes:
    """What the head says belongs to a message."""
    if wire.size < HEAD_NBYTES:
        raise ValueError(f"wire has {wire.size} bytes, expected {HEAD_NBYTES} or more")
    (length,) = _head(wire)
    if not 0 <= length <= wire.size - HEAD_NBYTES:
        raise ValueError(f"wire has {wire.size} bytes, but {HEAD_NBYTES} + {length} in its message")
    return wire[HEAD_NBYTES : HEAD_NBYTES + int(length)]


@dataclass(frozen=True)
class IntegerCodec(Codec):
    """Integers in as many bits as they need."""

    lossy: ClassVar[bool] = False
    ragged: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return "integers"

    @property
    def granule(self) -> int:
        return 128

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return HEAD_NBYTES + _kernels.integers_nbytes(count, dtype.itemsize)

    def used(self, wire: Bytes) -> int:
        return HEAD_NBYTES + _body(wire).size

    def encode(
        self,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        _head(wire)[0] = _kernels.pack_integers(x, wire[HEAD_NBYTES:])
        if residual is not None:
            residual[...] = 0

    def decode(self, wire: Bytes, out: Array) -> bool:
        _kernels.unpack_integers(_body(wire), out)
        return False

    def decode_add(self, wire: Bytes, addend: Array, out: Array) -> bool:
        _kernels.unpack_integers(_body(wire), out, addend)
        return False

    def hop(
        self,
        wire_in: Bytes,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        _head(wire)[0] = _kernels.pack_integers(x, wire[HEAD_NBYTES:], _body(wire_in))
        if residual is not None:
            residual[...] = 0
