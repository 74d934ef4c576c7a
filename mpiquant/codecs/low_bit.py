"""`q1` (`sign`) and `q2`: one and two bits with a least-squares scale per block.

1 bit is the sign, 2 bits are the sign times {1, 3}; a value is 3 above 1.23 times the block's
mean magnitude.  The scale sum(|x| l) / sum(l^2) minimises the block's squared error: relative
error 0.60 (1 bit) and 0.34 (2 bits) on normal data.  Meant for error feedback, whose residual
then stays bounded.  Wire: bits * ceil(n/8) bytes and a scale per block (30.1 and 15.5 times
smaller than float32).

Source: Seide et al., 1-bit SGD, 2014; Karimireddy et al., EF-SGD, 2019.  An absmax scale would
make 2 bits worse than one.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiquant import _kernels
from mpiquant.codecs._block import BlockCodec, check_range
from mpiquant.typing import Array


@dataclass(frozen=True, kw_only=True)
class LowBitCodec(BlockCodec):
    """Sign, or sign times {1, 3}.

    Parameters
    ----------
    bits : int
        1 or 2.
    block : int
        Values that share a scale, 1 to 8192; by default 512.
    """

    bits: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("bits", self.bits, 1, 2)

    @property
    def _bits(self) -> int:
        return self.bits

    def _kind(self, residual: Array | None) -> int:
        return _kernels.LEVELS

    @property
    def spec(self) -> str:
        return self._spec(f"q{self.bits}")
