"""`q3` ... `q16`: symmetric uniform quantization with a scale per block.

A block's scale is its largest magnitude A over L = 2^(bits-1) - 1, in the data's own precision;
a value is an integer of -L ... L times the scale.  Nearest rounding errs by at most A / (2L),
stochastic rounding by less than A / L and is unbiased (to within 2^-17 of a step, the resolution
of its random numbers).  Wire: bits * ceil(n/8) bytes and a scale per block (float32: 3.97 times
smaller at 8 bits, 7.88 at 4).

The default block is 512, but 128 at 3 bits: with 7 levels only, the largest of 512 values leaves
most of the others in the zero bin, and on heavy-tailed data 3 bits would be no better than the
least-squares 2 bits.

Source: Alistarh et al., QSGD, 2017 (stochastic uniform quantization); block scales as in
Dettmers, 8-bit approximations, 2015.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiquant import _kernels
from mpiquant.codecs._block import BlockCodec, Rounding, check_range
from mpiquant.typing import Array


@dataclass(frozen=True, kw_only=True)
class UniformCodec(BlockCodec):
    """Uniform quantization.

    Parameters
    ----------
    bits : int
        3 to 16, the sign included.
    block : int
        Values that share a scale, 1 to 8192; by default 512, or 128 at 3 bits.
    rounding : {"nearest", "stochastic"}
    seed : int
        Of the random numbers of stochastic rounding.
    """

    bits: int = 8
    rounding: Rounding = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 3, _kernels.BITS_MAX)
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is {self.rounding!r}, expected 'nearest' or 'stochastic'")

    @property
    def default_block(self) -> int:
        return 128 if self.bits == 3 else 512

    @property
    def _bits(self) -> int:
        return self.bits

    @property
    def _seed(self) -> int:
        return self.seed

    def _kind(self, residual: Array | None) -> int:
        return _kernels.NEAREST if self.rounding == "nearest" else _kernels.STOCHASTIC

    @property
    def spec(self) -> str:
        if self.rounding == "nearest":
            return self._spec(f"q{self.bits}")
        return self._spec(f"q{self.bits}", rounding=self.rounding, seed=self.seed)
