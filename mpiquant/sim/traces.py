"""Bandwidths of hosts over time: steady, at random, over a day, or as a file has them.

All are steps: a bandwidth holds until the next one.  What is drawn at random is drawn as far as a
simulation asks for it; one seed draws the same, however far that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mpiquant.rate import Trace

Floats = NDArray[np.float64]
Rows = Callable[[int], Floats]
"""The next so many steps: of each host, or of all in one column."""

BLOCK = 256
"""Steps that are drawn at a time."""

LOWEST = 0.2
"""Share of the nominal bandwidth that changing links keep at least."""

WALK = 0.15
"""Standard deviation of a step of a random walk, of the logarithm."""

FAST_STEPS, SLOW_STEPS = 20.0, 10.0
"""Mean steps that a Markov link stays fast, and slow."""

DAY_NOISE = 0.05
"""Relative standard deviation of a day-like link around its course."""


class Bandwidths:
    """Bandwidths of hosts.

    Parameters
    ----------
    times : (m,) array
        Seconds from which on each row holds, rising from 0 or less.
    table : (m, hosts) or (m, 1) array
        Bytes per second; one column is for all hosts.
    more : callable, optional
        Rows behind those, as many as it is asked for; without it the last row holds for ever.

    Raises
    ------
    ValueError
        If a bandwidth is not positive, or the times do not rise from 0 or less.
    """

    def __init__(self, times: Floats, table: Floats, more: Rows | None = None) -> None:
        if len(times) != len(table) or times[0] > 0 or not np.all(np.diff(times) > 0):
            raise ValueError("times of bandwidths must rise, from 0 on")
        if not np.all(table > 0):
            raise ValueError(f"the least bandwidth is {table.min()}, expected more than 0")
        self.times, self.table, self._more = times, table, more

    @property
    def common(self) -> bool:
        """Whether all hosts have the same."""
        return bool(self.table.shape[1] == 1)

    @property
    def steady(self) -> bool:
        return len(self.times) == 1 and self._more is None

    def upto(self, time: float) -> None:
        """Draw as far as a time."""
        while self._more is not None and time >= self.times[-1]:
            interval = self.times[-1] - self.times[-2]
            self.table = np.concatenate([self.table, self._more(BLOCK)])
            self.times = interval * np.arange(len(self.table))

    def slowest(self, begin: float, end: float) -> Trace:
        """The slowest host's bandwidth at each time between two times."""
        self.upto(end)
        first = max(int(np.searchsorted(self.times, begin, side="right")) - 1, 0)
        last = max(int(np.searchsorted(self.times, end, side="right")), first + 1)
        times = self.times[first:last].copy()
        times[0] = min(times[0], begin)
        return Trace(times.tolist(), self.table[first:last].min(axis=1).tolist())


def steady(bandwidth: float) -> Bandwidths:
    """All hosts always have so many bytes per second."""
    return Bandwidths(np.zeros(1), np.full((1, 1), float(bandwidth)))


def _drawn(interval_s: float, rows: Rows) -> Bandwidths:
    return Bandwidths(interval_s * np.arange(BLOCK, dtype=np.float64), rows(BLOCK), rows)


def random_walk(
    bandwidth: float, hosts: int, interval_s: float, rng: np.random.Generator
) -> Bandwidths:
    """Logarithms that wander between `LOWEST` and 1, reflected at both ends.

    Parameters
    ----------
    bandwidth : float
        Bytes per second, at most.
    hosts : int
        Columns, each with a walk of its own.
    interval_s : float
        Seconds of a step.
    rng : numpy.random.Generator
    """
    span = -math.log(LOWEST)
    place = rng.uniform(0, 2 * span, hosts)  # on a circle: its halves are each other's reflection

    def rows(count: int) -> Floats:
        nonlocal place
        places = place + np.cumsum(rng.normal(0, WALK, (count, hosts)), axis=0)
        place = places[-1] % (2 * span)
        return np.asarray(bandwidth * np.exp(-np.abs(places % (2 * span) - span)))

    return _drawn(interval_s, rows)


def markov(bandwidth: float, hosts: int, interval_s: float, rng: np.random.Generator) -> Bandwidths:
    """Links that are fast or slow, `LOWEST`, and change with the same chance at each step."""
    slow = rng.random(hosts) < SLOW_STEPS / (FAST_STEPS + SLOW_STEPS)

    def rows(count: int) -> Floats:
        nonlocal slow
        table = np.empty((count, hosts))
        for row in table:
            row[:] = np.where(slow, LOWEST * bandwidth, bandwidth)
            changes = rng.random(hosts) < np.where(slow, 1 / SLOW_STEPS, 1 / FAST_STEPS)
            slow = slow ^ changes
        return table

    return _drawn(interval_s, rows)


def day(
    bandwidth: float, hosts: int, interval_s: float, rng: np.random.Generator, period_s: float
) -> Bandwidths:
    """A slow wave between 1 and `LOWEST`, with a little noise of each host's own.

    Parameters
    ----------
    bandwidth, hosts, interval_s, rng
        As of `random_walk`.
    period_s : float
        Seconds of a day: as short as what is simulated.
    """
    done = 0

    def rows(count: int) -> Floats:
        nonlocal done
        times = interval_s * np.arange(done, done + count)[:, None]
        done += count
        wave = 0.5 + 0.5 * np.cos(2 * np.pi * times / period_s)
        noise = 1 + DAY_NOISE * rng.normal(size=(count, hosts)).clip(-3, 3)
        return np.asarray(bandwidth * (LOWEST + (1 - LOWEST) * wave) * noise)

    return _drawn(interval_s, rows)


def replay(
    changes: Sequence[tuple[float, float, int | None]], bandwidth: float, hosts: int
) -> Bandwidths:
    """What a file says.

    Parameters
    ----------
    changes : sequence of (float, float, int or None)
        Seconds, not falling; bytes per second; and the host, or None for all of them.
    bandwidth : float
        Until the first change.
    hosts : int

    Raises
    ------
    ValueError
        If there are none, times fall, or a host does not exist.
    """
    if not changes:
        raise ValueError("a trace needs a line at least")
    common = all(host is None for _, _, host in changes)
    now = np.full(1 if common else hosts, float(bandwidth))
    times, rows = [0.0], [now.copy()]
    for seconds, value, host in changes:
        if host is not None and not 0 <= host < hosts:
            raise ValueError(f"the trace names host {host} of {hosts}")
        if seconds < times[-1]:
            raise ValueError(f"time {seconds} of the trace is before the one in front of it")
        now[slice(None) if host is None else host] = value
        if seconds > times[-1]:
            times.append(seconds)
            rows.append(now.copy())
        rows[-1] = now.copy()
    return Bandwidths(np.array(times), np.array(rows))
