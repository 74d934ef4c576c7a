"""`bounded`: the error of every sum stays within a bound; the bits are what that takes.

Each rank writes its values as integers of one step, the same on all ranks, and the integers are
summed without loss (`codecs/integer.py`): whatever the schedule, each rank's one rounding of half a
step is all that is lost, so N ranks may have a step of 2/N of the bound.  Sums do not depend on the
order in which they are made.

Source: error-bounded prediction and fixed-length coding as in SZ (Di and Cappello, 2016) and ZCCL
(Huang et al., 2025); sums of the integers themselves as in hZCCL (Huang et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpiquant.codecs.abc import WithoutFormat
from mpiquant.codecs.integer import IntegerCodec
from mpiquant.typing import Array

INTEGERS = IntegerCodec()

MOST = {4: 2.0**31 - 1, 8: 2.0**40}
"""Largest sum of integers, by their bytes: what int32 holds, and what doubles round to within 2^-11
steps."""

SAFE = 1 - 2.0**-10
"""Part of the step that a bound allows which is used: doubles round, too."""


@dataclass(frozen=True, kw_only=True)
class BoundedCodec(WithoutFormat):
    """A bound on the error of each element of the result.

    Parameters
    ----------
    absolute : float, optional
        Largest difference between a result and the exact one, in the unit of the values; of a mean,
        that of the mean.
    relative : float, optional
        The same over the largest magnitude of any element of any rank, which is worked out in every
        call.  By default 0.001, if no absolute one is given.

    Notes
    -----
    Cost: log2(N) messages of 8 bytes before the data, and as many behind them, beside the integers:
    log2(range / step) + 1 bits a value, or less where neighbours are close.
    """

    absolute: float | None = None
    relative: float | None = None

    def __post_init__(self) -> None:
        if self.absolute is None and self.relative is None:
            object.__setattr__(self, "relative", 1e-3)
        if self.absolute is not None and self.relative is not None:
            raise ValueError("the bound is absolute or relative, not both")
        for name in ("absolute", "relative"):
            value = getattr(self, name)
            if value is not None and not 0 < value < np.inf:
                raise ValueError(f"{name} is {value}, expected more than 0 and less than inf")

    @property
    def spec(self) -> str:
        name = "relative" if self.absolute is None else "absolute"
        return f"bounded({name}={getattr(self, name)!r})"

    @property
    def granule(self) -> int:
        return INTEGERS.granule

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Bytes of the longest message of count values."""
        return INTEGERS.nbytes(count, dtype)

    def step(self, largest: float, ranks: int, dtype: np.dtype, *, mean: bool) -> float | None:
        """The step of all ranks' integers; None if only exact sums keep within the bound.

        Parameters
        ----------
        largest : float
            Largest magnitude of any element of any rank; inf if not all are finite.
        ranks : int
            Arrays that are summed.
        dtype : numpy.dtype
            float32 or float64.
        mean : bool
            Whether the sum will be divided by the number of ranks.

        Raises
        ------
        ValueError
            If not even sums in this dtype keep within the bound.
        """
        if largest == 0:
            return 1.0
        if not ranks * largest < float(np.finfo(dtype).max):
            return None
        bound = largest * (self.relative or 0.0) if self.absolute is None else self.absolute
        total = bound * ranks if mean else bound
        left = total - rounding(largest, ranks, dtype)
        step = 2 * left / ranks * SAFE
        normal = step > np.finfo(np.float64).tiny
        if left > total / 2 and normal and ranks * (largest / step + 1) <= MOST[dtype.itemsize]:
            return step
        if total >= exact_rounding(largest, ranks, dtype, mean=mean):
            return None
        raise ValueError(
            f"an error of {bound:.3g} is less than {dtype} can promise: sums of {ranks} values up "
            f"to {largest:.3g} are rounded by as much; use a larger bound, or float64"
        )


def largest_magnitude(x: Array) -> float:
    """The largest |x|, 0 of nothing; inf if not all are finite."""
    if x.size == 0:
        return 0.0
    largest = max(float(x.max()), -float(x.min()))
    return largest if np.isfinite(largest) else np.inf


def rounding(largest: float, ranks: int, dtype: np.dtype) -> float:
    """What is lost when the sum of integers becomes one of floats, and then perhaps a mean."""
    info = np.finfo(dtype)
    return ranks * (largest * float(info.eps) + float(info.smallest_subnormal))


def exact_rounding(largest: float, ranks: int, dtype: np.dtype, *, mean: bool) -> float:
    """What sums of floats lose, and then perhaps a mean; those of subnormal ones lose nothing."""
    info = np.finfo(dtype)
    if ranks * largest <= float(info.tiny):
        return ranks * float(info.smallest_subnormal) if mean else 0.0
    return ranks * ranks * largest * float(info.eps) / 2
