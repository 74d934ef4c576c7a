"""`exact`: the values themselves.

Wire: the bytes of the array.  Error 0; 32 or 64 bits per value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpiquant.codecs.abc import Codec
from mpiquant.typing import Array, Bytes


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
        wire.view(x.dtype)[...] = x
        if residual is not None:
            residual[...] = 0

    def decode(self, wire: Bytes, out: Array) -> bool:
        out[...] = wire.view(out.dtype)
        return not np.all(np.isfinite(out))

    def decode_add(self, wire: Bytes, addend: Array, out: Array) -> bool:
        np.add(addend, wire.view(out.dtype), out=out)
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
        np.add(x, wire_in.view(x.dtype), out=wire.view(x.dtype))
        if residual is not None:
            residual[...] = 0
