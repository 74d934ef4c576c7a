"""The time that communication can hide behind computation, from what earlier iterations measured.

A gradient is ready at one time and its sum is needed at a later one.  The time between, without
what the trainer itself waited in it, is the *overlappable time*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Generic, TypeVar

import numpy as np

from mpiquant.rate._numbers import Floats

Number = TypeVar("Number", float, Floats)

MEMORY = 5
"""Iterations that a prediction looks back at: the median of five withstands two that are unlike
the others."""


class Overlap(Generic[Number]):
    """Overlappable time of one bucket; of arrays, on each of many ranks.

    Attributes
    ----------
    last : collections.deque of float or array
        That of the last iterations, in seconds.
    """

    def __init__(self, last: Iterable[Number] = ()) -> None:
        self.last: deque[Number] = deque(last, MEMORY)

    def add(self, ready: Number, need: Number, waited_s: Number | float = 0.0) -> None:
        """Take in an iteration: when it was ready and needed, and the waiting between."""
        seconds = need - ready - waited_s
        if isinstance(seconds, np.ndarray):
            self.last.append(seconds.clip(0.0))
        else:
            self.last.append(max(seconds, 0.0))

    @property
    def predicted_s(self) -> Number | None:
        """The time to expect; None before the first iteration."""
        if not self.last:
            return None
        if isinstance(self.last[0], np.ndarray):
            return np.median(np.array(self.last), axis=0)
        return median(self.last)


def share_s(time_s: Number, values: Number, values_left: Number) -> Number:
    """Seconds of the time left that some of the values left may take; of numbers or of arrays."""
    return time_s * values / values_left
