"""`ternary`: {-1, 0, 1} times a scale per block.

Without error feedback: a value becomes +-A with probability |x| / A, A the block's largest
magnitude, and 0 otherwise; this is unbiased (TernGrad).  With error feedback, whose residual that
random rounding would let grow without bound, a value is +-1 above 0.7 times the block's mean
magnitude and the scale is the mean magnitude of those (the least-squares choice).  Wire: two bit
planes, 2 * ceil(n/8) bytes, and a scale per block.

Source: Wen et al., TernGrad, 2017; threshold of Li et al., Ternary Weight Networks, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiquant import _kernels
from mpiquant.codecs._block import BlockCodec
from mpiquant.typing import Array


@dataclass(frozen=True, kw_only=True)
class TernaryCodec(BlockCodec):
    """Ternary quantization.

    Parameters
    ----------
    block : int
        Values that share a scale, 1 to 8192; by default 512.
    seed : int
        Of the random numbers.
    """

    seed: int = 0

    @property
    def _bits(self) -> int:
        return 2

    @property
    def _seed(self) -> int:
        return self.seed

    def _kind(self, residual: Array | None) -> int:
        return _kernels.STOCHASTIC if residual is None else _kernels.TERNARY

    @property
    def spec(self) -> str:
        return self._spec("ternary", **({"seed": self.seed} if self.seed else {}))
