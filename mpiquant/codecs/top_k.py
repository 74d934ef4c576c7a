"""`top_k`: the values of the largest magnitude.

Each rank sends its own positions with its values (see `mpiquant.codecs.sparse_message`): 40 to 46
bits for each float32 value at 1 %.  Of equal magnitudes the lowest positions; what is no number
comes first.  Without error feedback the others are lost for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiquant.codecs.sparsifier import Sparsifier, check_ratio, largest, share_of
from mpiquant.typing import Array


@dataclass(frozen=True, kw_only=True)
class TopKCodec(Sparsifier):
    """k = max(1, ceil(ratio n)) of n values.

    Parameters
    ----------
    ratio : float
        Part of the values that is sent; 1 % by default.
    values, scope, parts
        See `Sparsifier`.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)

    @property
    def spec(self) -> str:
        return self._spec("top_k", ratio=self.ratio)

    def _choose(self, x: Array, key: int) -> Array:
        return largest(x, self._most(x.size))

    def _most(self, count: int) -> int:
        return share_of(count, self.ratio)
