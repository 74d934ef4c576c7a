"""The most bits that any schedule could have sent, on a link whose future is known.

A controller is judged against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Window(NamedTuple):
    """An array to be sent: when it is ready and due, in seconds, and how many values it has."""

    ready: float
    due: float
    values: float


@dataclass(frozen=True)
class Trace:
    """A link's bandwidth over time.

    Attributes
    ----------
    times : sequence of float
        Seconds, rising, from which on each bandwidth holds; the last one holds for ever, and
        nothing is sent before the first.
    bandwidths : sequence of float
        Bytes per second.
    """

    times: Sequence[float]
    bandwidths: Sequence[float]

    def __post_init__(self) -> None:
        if not self.times or len(self.times) != len(self.bandwidths):
            raise ValueError(f"{len(self.times)} times have {len(self.bandwidths)} bandwidths")
        if any(a >= b for a, b in pairwise(self.times)):
            raise ValueError("times of a trace must rise")

    def pieces(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Seconds and bandwidth of each steady piece between two times."""
        stops = [*self.times[1:], math.inf]
        found = []
        for start, stop, bandwidth in zip(self.times, stops, self.bandwidths, strict=True):
            seconds = min(stop, end) - max(start, begin)
            if seconds > 0:
                found.append((seconds, bandwidth))
        return found

    def nbytes(self, begin: float, end: float) -> float:
        """Bytes that the link moves between two times."""
        return sum(seconds * bandwidth for seconds, bandwidth in self.pieces(begin, end))


@dataclass(frozen=True)
class Best:
    """What the best schedule sends.

    Attributes
    ----------
    bits : float
        Mean over all values: b*.
    widths : tuple of float
        Bits per value of each array, in the order given; one of several ways to reach the mean.
    feasible : bool
        Whether all deadlines can be met at the lowest width.
    """

    bits: float
    widths: tuple[float, ...]
    feasible: bool


def oracle(
    trace: Trace, windows: Sequence[Window], lowest: float = 2.0, highest: float = 32.0
) -> Best:
    """The largest mean width of any schedule that meets all deadlines.

    Earliest deadline first sends the most, whatever limits the arrays have: an array that is due
    later never needs the time that an earlier one can use.  And whatever meets all deadlines at the
    lowest width can be extended to a schedule that sends as much.

    Parameters
    ----------
    trace : Trace
    windows : sequence of Window
    lowest, highest : float
        Bits per value.
    """
    fewest, _ = _earliest_first(trace, windows, lowest)
    most, values = _earliest_first(trace, windows, highest)
    feasible = all(
        math.isclose(sent, lowest * w.values, rel_tol=1e-9)
        for sent, w in zip(fewest, windows, strict=True)
    )
    pairs = zip(most, windows, strict=True)
    widths = tuple(bits / w.values if w.values else highest for bits, w in pairs)
    return Best(sum(most) / values if values else highest, widths, feasible)


def _earliest_first(
    trace: Trace, windows: Sequence[Window], bits: float
) -> tuple[list[float], float]:
    """Bits sent of each array, if none sends more than so many per value, and all values."""
    left = [bits * w.values for w in windows]
    sent = [0.0] * len(windows)
    events = sorted({t for w in windows for t in (w.ready, w.due)} | set(trace.times))
    for begin, end in pairwise(events):
        room = 8.0 * trace.nbytes(begin, end)
        open_now = [i for i, w in enumerate(windows) if w.ready <= begin and w.due >= end]
        for i in sorted(open_now, key=lambda i: windows[i].due):
            part = min(room, left[i])
            left[i] -= part
            sent[i] += part
            room -= part
    return sent, sum(w.values for w in windows)
