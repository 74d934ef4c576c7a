"""How many bits a value gets, so that calls end at their deadlines.

A deadline leaves a link some time; the bits that the link moves in it, over the values that it has
to move, are the bits that each value can have.  Several arrays may share the link, each with a
deadline of its own.  What is due by a deadline must have been sent by then, whatever else is
sent, so an array may have

    min over deadlines D' at or behind its own of   8 B (D' - t) / V(D')

bits per value, where V(D') counts all values due by D', its own among them, and B is in bytes per
second.  The link serves the earliest deadline first.  Of an array that is known to take fewer bits,
for want of time or of levels, only those are counted, and the others share what it leaves.

Why that ends near the deadline: a width is the largest level below what fits, so each part takes at
most its share of the time, and what it leaves goes to the parts behind it, which then choose among
more.  Only the last part's remainder, less than a level's worth of its own share, is never used.
Where the estimate of B was too high, the parts that follow have less time and take fewer bits; only
the last one's delay is not made up for.

All functions take numbers or arrays, so that a simulator can ask for all ranks at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpiquant.rate._numbers import Floats, floats

ROUND_UP_BITS = 0.5
"""A message may take so many bits more than fit: those behind it make up for that, and if all took
less than they may, nearly as much would never be used."""


@dataclass(frozen=True)
class Levels:
    """The widths to choose from.

    Attributes
    ----------
    bits : tuple of int
        Rising; the last one may be the exact values themselves.
    costs : tuple of float
        Bits on the wire for each value at each level, scales included.
    """

    bits: tuple[int, ...]
    costs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bits or len(self.bits) != len(self.costs):
            raise ValueError(f"{len(self.bits)} levels have {len(self.costs)} costs")
        for name, values in (("bits", self.bits), ("costs", self.costs)):
            if any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} of levels must rise, not {values}")

    def highest(self, allowed: float) -> int:
        """Bits of the highest level that costs no more than is allowed, or of the lowest one."""
        return self.bits[max(bisect_right(self.costs, allowed) - 1, 0)]

    def index(self, allowed: ArrayLike) -> NDArray[np.intp]:
        """Number of the highest level that costs no more than is allowed; 0 if there is none."""
        return np.maximum(np.searchsorted(self.costs, allowed, side="right") - 1, 0)

    def floor(self, allowed: ArrayLike) -> NDArray[np.int64]:
        """Bits of that level."""
        return np.asarray(self.bits)[self.index(allowed)]

    def near(self, allowed: ArrayLike) -> NDArray[np.intp]:
        """Number of the level of messages that may have so many bits each, or a little more."""
        return self.index(floats(allowed) + ROUND_UP_BITS)


def fitting_bits(time_s: ArrayLike, bandwidth: ArrayLike, values: ArrayLike) -> Floats:
    """Bits that each of some values can have.

    Parameters
    ----------
    time_s : array_like
        Seconds until the deadline; nothing fits if they are over.
    bandwidth : array_like
        Bytes per second.
    values : array_like
        Values to be sent.  Any number of bits fits where there are none.
    """
    values = floats(values)
    bits = 8.0 * floats(bandwidth) * np.maximum(floats(time_s), 0.0)
    return np.where(values > 0, bits / np.where(values > 0, values, 1.0), np.inf)


def shared_bits(
    now: ArrayLike,
    deadlines: ArrayLike,
    values: ArrayLike,
    bandwidth: ArrayLike,
    most: ArrayLike = np.inf,
) -> Floats:
    """Bits that the values of each of several arrays on one link can have.

    Parameters
    ----------
    now : array_like
        Seconds on the clock of the deadlines.
    deadlines, values : (..., m) array_like
        Of all arrays that are still to be sent in this iteration, or expected to be; the values are
        those that are left.
    bandwidth : array_like
        Bytes per second.
    most : (..., m) array_like
        Bits that each array takes at most, in the eyes of the others: what it leaves is theirs.

    Returns
    -------
    (..., m) array
        In the order of the arrays.
    """
    count = np.broadcast(*map(floats, (deadlines, values, most))).shape[-1]
    each = (shared_bits_of(i, now, deadlines, values, bandwidth, most) for i in range(count))
    return np.stack(list(each), axis=-1)


def shared_bits_of(
    which: int,
    now: ArrayLike,
    deadlines: ArrayLike,
    values: ArrayLike,
    bandwidth: ArrayLike,
    most: ArrayLike = np.inf,
) -> Floats:
    """`shared_bits` for one of the arrays, whose own `most` does not matter.

    At each deadline from its own on, all due by then may have the largest b for which the sum of
    values * min(b, most) is no more than the room.  If the first k of them, in the order of what
    they take at most, have all of that, the others share the rest evenly.  For no k is that too
    much, and for the right one it is just b.
    """
    ends, left, caps = np.broadcast_arrays(floats(deadlines), floats(values), floats(most))
    room = 8.0 * floats(bandwidth)[..., None] * np.maximum(ends - floats(now)[..., None], 0.0)
    caps = caps.copy()
    caps[..., which] = np.inf
    order = np.argsort(caps, axis=-1, kind="stable")
    ends_in_order, counts, takes = (np.take_along_axis(a, order, -1) for a in (ends, left, caps))
    matters = (ends >= ends[..., which, None]) & (left > 0)
    some = matters.reshape(-1, matters.shape[-1]).any(axis=0)  # of all ranks, if they are many
    ends, room, matters = ends[..., some], room[..., some], matters[..., some]
    due = np.where(ends_in_order[..., None, :] <= ends[..., :, None], counts[..., None, :], 0.0)
    allowed = np.where(matters, _levels(room, due, takes), np.inf)
    return np.asarray(allowed.min(axis=-1, initial=np.inf))


def _levels(room: Floats, due: Floats, most: Floats) -> Floats:
    """Bits for which there is room, at each deadline.

    Parameters
    ----------
    room : (..., k) array
        Bits until each deadline.
    due : (..., k, m) array
        Values due by then, of arrays in the order of the most that they take.
    most : (..., m) array
        That, rising.
    """
    shared = np.cumsum(due[..., ::-1], axis=-1)[..., ::-1]
    takes = np.where(due > 0, most[..., None, :], 0.0) * due
    rest = np.empty_like(shared)
    rest[..., 0] = room
    rest[..., 1:] = room[..., None] - np.cumsum(takes[..., :-1], axis=-1)
    level = np.where(shared > 0, rest / np.where(shared > 0, shared, 1.0), -np.inf)
    return np.asarray(np.maximum(level.max(axis=-1), 0.0))


def bits_until(
    deadline: float, now: float, arrays: Iterable[tuple[float, float, float]], bandwidth: float
) -> float:
    """`shared_bits` for one array of a given deadline, without NumPy: some are needed per message.

    Parameters
    ----------
    deadline, now : float
    arrays : iterable of (float, float, float)
        Deadline, values left and most bits of all arrays, the one in question among them, with an
        infinite last one.
    bandwidth : float
    """
    allowed = math.inf
    due: list[tuple[float, float]] = []  # most bits and values, in this order
    for end, together in groupby(sorted(arrays), key=itemgetter(0)):
        for _, values, most in together:
            if values > 0:
                insort(due, (most, values))
        if end >= deadline and due:
            room = 8.0 * bandwidth * max(end - now, 0.0)
            allowed = min(allowed, _level_of(room, due))
    return allowed


def _level_of(room: float, due: list[tuple[float, float]]) -> float:
    """The same, at one deadline, of some arrays, in the order of what they take at most."""
    shared, level = sum(values for _, values in due), 0.0
    for most, values in due:
        level = max(level, room / shared)
        room -= most * values
        shared -= values
        if shared <= 0:
            break
    return level
