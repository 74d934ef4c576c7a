"""`threshold`: the values whose magnitude reaches a threshold.

How many these are differs from rank to rank and from call to call.  Each rank sends its own
positions with its values (see `mpiquant.codecs.sparse_message`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpiquant.codecs.sparsifier import Sparsifier, not_below
from mpiquant.typing import Array


@dataclass(frozen=True, kw_only=True)
class ThresholdCodec(Sparsifier):
    """All values x with abs(x) >= threshold; those that are no numbers, too.

    Parameters
    ----------
    threshold : float
        3 by default.
    unit : {"rms", "absolute"}
        Whether the threshold is times the root mean square of the array, or a value.
    values, scope, parts
        See `Sparsifier`.
    """

    threshold: float = 3.0
    unit: Literal["rms", "absolute"] = "rms"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold > 0:
            raise ValueError(f"threshold is {self.threshold}, expected more than 0")
        if self.unit not in ("rms", "absolute"):
            raise ValueError(f"unit is {self.unit!r}, expected 'rms' or 'absolute'")

    @property
    def spec(self) -> str:
        return self._spec("threshold", threshold=self.threshold, unit=self.unit)

    def _choose(self, x: Array, key: int) -> Array:
        bound = self.threshold
        if self.unit == "rms" and x.size:
            with np.errstate(over="ignore", invalid="ignore"):
                bound *= float(np.sqrt(np.dot(x, x) / x.size))
            if not np.isfinite(bound):
                return np.flatnonzero(~np.isfinite(x))  # nothing else is to be seen beside it
        return not_below(x, max(bound, np.nextafter(x.dtype.type(0), x.dtype.type(1))))

    def _most(self, count: int) -> int:
        return count

    def again(self, total: Array, share: int) -> Array:
        return self._choose(total, 0)
