"""`exact`: the values themselves.

Wire: the bytes of the array.  Error 0; 32 or 64 bits per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiquant.codecs.abc import Codec
from mpiquant.typing import Array, Bytes


def _values(wire: Bytes, array: Array) -> Array:
    """The values on a wire, as many as an array has; NumPy would repeat a single one."""
    if wire.size != array.nbytes:
        raise ValueError(f"wire has {wire.size} bytes, expected {array.nbytes}")
    return wire.view(array.dtype)


@dataclass(frozen=True)
class IdentityCodec(Codec):
    """Sends values unchanged; works for every numeric dtype."""

    lossy: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return "exact"

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return count * dtype.itemsize

    def encode(
        self,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        _values(wire, x)[...] = x
        if residual is not None:
            residual[...] = 0

    def decode(self, wire: Bytes, out: Array) -> bool:
        out[...] = _values(wire, out)
        return not np.all(np.isfinite(out))

    def decode_add(self, wire: Bytes, addend: Array, out: Array) -> bool:
        np.add(addend, _values(wire, out), out=out)
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
        np.add(x, _values(wire_in, x), out=_values(wire, x))
        if residual is not None:
            residual[...] = 0
