"""`fp16` and `bf16`: IEEE binary16 and bfloat16, nearest with ties to even.

Wire: 2 bytes per value, little-endian.  Relative error at most 2^-11 (fp16, for values from
6.1e-5 to 65504 in magnitude; larger ones become infinite, smaller ones lose bits) or 2^-8 (bf16,
for all normal float32 values).  float64 values are first rounded to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiquant import _kernels
from mpiquant.codecs.abc import Codec
from mpiquant.typing import Array, Bytes


class _CastCodec(Codec):
    _bfloat: ClassVar[bool]

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return 2 * count

    def encode(
        self,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        _kernels.cast_encode(x, wire, self._bfloat, residual)

    def decode(self, wire: Bytes, out: Array) -> bool:
        return _kernels.cast_decode(wire, out, self._bfloat)

    def decode_add(self, wire: Bytes, addend: Array, out: Array) -> bool:
        return _kernels.cast_decode(wire, out, self._bfloat, addend)


@dataclass(frozen=True)
class Float16Codec(_CastCodec):
    """IEEE binary16: 11 significant bits, largest value 65504."""

    _bfloat: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return "fp16"


@dataclass(frozen=True)
class BFloat16Codec(_CastCodec):
    """bfloat16: 8 significant bits, the range of float32."""

    _bfloat: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return "bf16"
