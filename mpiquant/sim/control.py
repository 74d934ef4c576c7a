"""The control of an adaptive scheme on all ranks at a time, by the functions of `mpiquant.rate`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpiquant.rate import (
    Levels,
    Overlap,
    blend,
    expected_bits,
    remembered,
    shared_bits_of,
    with_reserve,
)

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class Control:
    """What each rank knows of its links and of the time, and the bits that follow from it.

    Parameters
    ----------
    ranks : int
    volumes : sequence of int
        Values of each bucket that a rank sends.
    levels : Levels
    unknown : int
        Level while nothing is known.
    margin : float
        Part of the time up to a deadline that is kept in reserve.

    Attributes
    ----------
    slow : (ranks,) array
        Bandwidth of the slowest link that earlier calls knew of; NaN before the first one.
    """

    def __init__(
        self, ranks: int, volumes: Sequence[int], levels: Levels, unknown: int, margin: float
    ) -> None:
        count = len(volumes)
        self.levels, self.unknown, self.margin = levels, unknown, margin
        self.estimate, self.slow = np.full((2, ranks), np.nan)
        self.overlaps: list[Overlap[Floats]] = [Overlap() for _ in volumes]
        self.until_need: list[Overlap[Floats]] = [Overlap() for _ in volumes]
        self.volumes = np.array(volumes, np.float64)
        self.left = self.volumes.copy()
        self.lowest = np.full((count, ranks), np.nan)
        self._deadlines = np.full((count, ranks), np.nan)
        self._most = np.full((count, ranks), np.inf)
        self._chosen_bits = np.zeros((count, ranks))

    def begin_step(self, now: Floats) -> None:
        """Expect all buckets, when they were needed in the steps before."""
        self.left[:] = self.volumes
        self.lowest[:] = np.nan
        self._chosen_bits[:] = 0
        for k, until in enumerate(self.until_need):
            if until.predicted_s is not None:
                self._deadlines[k] = now + until.predicted_s

    def begin_call(self, k: int, ready: Floats) -> None:
        """A bucket's call begins: its own deadline takes the place of what was expected."""
        overlap_s = self.overlaps[k].predicted_s
        if overlap_s is not None:
            self._deadlines[k] = with_reserve(ready + overlap_s, ready, self.margin)
        self._most[k] = np.inf

    def choose(self, k: int, now: Floats, *, final: bool) -> Indices:
        """Number of the level of each rank's next message of a bucket.

        A final sum holds something of all ranks, and word of their links came with it.
        """
        lowest = np.fmin(self.lowest[k], self.estimate)
        bandwidth = lowest if final else np.fmin(lowest, self.slow)
        known = ~(np.isnan(bandwidth) | np.isnan(self._deadlines[k]))
        if not known.any():
            return np.full(len(now), self.unknown)
        open_now = np.flatnonzero(self.left > 0)
        allowed = shared_bits_of(
            int(np.searchsorted(open_now, k)),
            now,
            self._deadlines[open_now].T,
            self.left[open_now],
            bandwidth,
            self._most[open_now].T,
        )
        return np.where(known, self.levels.near(allowed), self.unknown)

    def account(self, k: int, values: float, bits: Floats | float) -> None:
        """So many values of a bucket have their bits."""
        self.left[k] = max(self.left[k] - values, 0.0)
        self._chosen_bits[k] += bits * values
        self._most[k] = expected_bits(self._chosen_bits[k], self.volumes[k] - self.left[k])

    def measured(self, nbytes: Floats, seconds: Floats) -> None:
        """Messages of so many bytes have come in so many seconds each."""
        sample = nbytes / np.where(seconds > 0, seconds, np.inf)
        self.estimate = np.asarray(blend(self.estimate, sample, seconds))

    def end_call(self, k: int, partial_bits: Floats) -> None:
        """A call has ended; the next one of its bucket is expected to take as many bits."""
        self.left[k] = 0.0
        self.slow = remembered(self.slow, np.fmin(self.lowest[k], self.estimate))
        self._most[k] = partial_bits
