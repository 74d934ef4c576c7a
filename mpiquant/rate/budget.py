"""The time that communication can hide behind computation, from what earlier iterations measured.

A gradient is ready at one time and its sum is needed at a later one.  The time between, without
what the trainer itself waited in it, is the *overlappable time*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import TypeVar

from mpiquant.rate._numbers import Floats

Number = TypeVar("Number", float, Floats)

MEMORY = 5
"""Iterations that a prediction looks back at: the median of five withstands two that are unlike
the others."""


class Overlap:
    """Overlappable time of one bucket.

    Attributes
    ----------
    last : collections.deque of float
        That of the last iterations, in seconds.
    """

    def __init__(self, last: Iterable[float] = ()) -> None:
        self.last: deque[float] = deque(last, MEMORY)

    def add(self, ready: float, need: float, waited_s: float = 0.0) -> None:
        """Take in an iteration: when it was ready and needed, and the waiting between."""
        self.last.append(max(need - ready - waited_s, 0.0))

    @property
    def predicted_s(self) -> float | None:
        """The time to expect; None before the first iteration."""
        return median(self.last) if self.last else None


def share_s(time_s: Number, values: Number, values_left: Number) -> Number:
    """Seconds of the time left that some of the values left may take; of numbers or of arrays."""
    return time_s * values / values_left
