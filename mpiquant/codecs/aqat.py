"""`aqat`: a width for every message, chosen when it is sent (see `mpiquant.rate`).

Not a format of its own: each message is one of `q1` ... `q8`, `q16` or `exact`, and says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from mpiquant.codecs.abc import Codec, WithoutFormat
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.low_bit import LowBitCodec
from mpiquant.codecs.uniform import UniformCodec
from mpiquant.rate import ROUND_UP_BITS, Levels

EXACT_BITS = 32
"""Name of the level that sends the values themselves, of 64 bits too."""

LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 16, EXACT_BITS)


@lru_cache
def codec_of(bits: int) -> Codec:
    """The codec of a level."""
    if bits == EXACT_BITS:
        return IdentityCodec()
    return LowBitCodec(bits=bits) if bits < 3 else UniformCodec(bits=bits)


@dataclass(frozen=True, kw_only=True)
class AqatCodec(WithoutFormat):
    """Widths that follow the time that is left.

    Parameters
    ----------
    lowest, highest : int
        Levels to choose from: 1 to 8, 16 and 32, which is exact; 2 to 32 by default.
    margin : float
        Part of the time up to the deadline that is kept in reserve, 0 to 0.5.
    """

    adaptive: ClassVar[bool] = True

    lowest: int = 2
    highest: int = EXACT_BITS
    margin: float = 0.02

    def __post_init__(self) -> None:
        for name in ("lowest", "highest"):
            if getattr(self, name) not in LEVELS:
                raise ValueError(f"{name} is {getattr(self, name)}, expected one of {LEVELS}")
        if self.lowest > self.highest:
            raise ValueError(f"lowest is {self.lowest}, above highest, {self.highest}")
        if not 0 <= self.margin <= 0.5:
            raise ValueError(f"margin is {self.margin}, expected 0 to 0.5")

    @property
    def spec(self) -> str:
        return f"aqat(lowest={self.lowest},highest={self.highest},margin={self.margin})"

    @property
    def bits(self) -> float:
        return float(self.highest)

    @property
    def granule(self) -> int:
        return 512

    def levels(self, dtype: np.dtype) -> Levels:
        """The levels, with what a value of the dtype costs at each."""
        return _levels(self.lowest, self.highest, dtype)

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Bytes of the longest message of count values."""
        raw = count * dtype.itemsize
        return max(min(codec_of(b).nbytes(count, dtype), raw) for b in self.levels(dtype).bits)

    def level(self, levels: Levels, allowed: float, count: int, dtype: np.dtype) -> int:
        """Level of a message of count values that may have so many bits each, or a little more.

        As `Levels.near`, but exact if that is not longer, as with a few values that share a scale.
        """
        bits = levels.highest(allowed + ROUND_UP_BITS)
        if count >= self.granule:
            return bits  # surely shorter
        smaller = codec_of(bits).nbytes(count, dtype) < count * dtype.itemsize
        return bits if smaller else EXACT_BITS


@lru_cache
def _levels(lowest: int, highest: int, dtype: np.dtype) -> Levels:
    bits = tuple(b for b in LEVELS if lowest <= b <= highest)
    count = 1 << 20
    return Levels(bits, tuple(8 * codec_of(b).nbytes(count, dtype) / count for b in bits))
