"""What a link moves per second, from the arrival of messages.

A sample is the bytes of some messages over the time in which they arrived.  If their sender had
nothing else to send meanwhile, the link may be faster than that, so such a sample can only raise an
estimate: otherwise few bits would make small messages, these low estimates, and those fewer bits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from mpiquant.rate._numbers import Floats, floats

HALF_S, HALF_UP_S = 0.05, 0.01
"""A sample of so many seconds counts as much as all that were before it; the second one if it is
higher: a link that has become faster makes for short messages, and so for short samples."""


MEDIAN_OF = 5
"""A sample stands for the median of the latest ones: a rank that was held up for some milliseconds
makes one of them low, and the slowest of many ranks would always be such a one."""


def blend(
    estimate: ArrayLike, sample: ArrayLike, seconds: ArrayLike, idle: ArrayLike = False
) -> Floats | float:
    """The estimate behind a new sample; NaN stands for none yet.

    Parameters
    ----------
    estimate, sample : array_like
        Bytes per second.
    seconds : array_like
        Time that the sample took: what was seen for longer says more.
    idle : array_like of bool
        Whether the sender was idle at times.
    """
    if type(estimate) is type(sample) is type(seconds) is float:
        return _blend(estimate, sample, seconds, bool(idle))
    estimate, sample = floats(estimate), floats(sample)
    half_s = np.where(sample > estimate, HALF_UP_S, HALF_S)
    weight = 1.0 - 0.5 ** (floats(seconds) / half_s)
    blended = estimate + weight * (sample - estimate)
    kept = np.where(np.asarray(idle, bool) & (sample < estimate), estimate, blended)
    return np.where(np.isnan(estimate), sample, kept)


def _blend(estimate: float, sample: float, seconds: float, idle: bool) -> float:
    """The same for plain numbers, in a tenth of the time."""
    if estimate != estimate:
        return sample
    if idle and sample < estimate:
        return estimate
    half_s = HALF_UP_S if sample > estimate else HALF_S
    weight: float = 1.0 - 0.5 ** (seconds / half_s)
    return estimate + weight * (sample - estimate)


@dataclass
class Throughput:
    """A link's estimate.

    Attributes
    ----------
    bandwidth : float
        Bytes per second; NaN before the first sample.
    samples : int
        How many there have been.
    """

    bandwidth: float = float("nan")
    samples: int = 0

    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=MEDIAN_OF), repr=False)

    def add(self, nbytes: int, seconds: float, idle: bool = False) -> None:
        """Take in that so many bytes arrived in so many seconds."""
        if seconds <= 0:
            return
        sample = nbytes / seconds
        if not idle:
            self._latest.append(sample)
            sample = sorted(self._latest)[len(self._latest) // 2]
        self.bandwidth = float(blend(self.bandwidth, sample, seconds, idle))
        self.samples += 1


def slowest(*bandwidths: float) -> float:
    """The least of some estimates, of which NaN are not known; NaN if none is."""
    least = float("nan")
    for bandwidth in bandwidths:
        if bandwidth < least or least != least:
            least = bandwidth
    return least
