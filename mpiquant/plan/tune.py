"""Which algorithm and codec are fastest, by trying.

Calls of one kind and length run their ways in turn: a first round that is not counted (plans are
agreed on, memory is touched for the first time) and some that are.  The last call of a round tells
all ranks what it took on each of them; of a way, the least counts, for a rank that comes late waits
for nobody.  Ways that are far behind are not tried again.  Then the fastest one stays, until what
it takes has changed.  Where a profile of the machine is at hand, its predictions say beforehand
which ways need not be tried at all.

All ranks number the calls alike and decide on the same agreed numbers, so that they decide alike.
Nothing here knows MPI or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mpiquant.codecs import Codec
from mpiquant.plan.shown import shown

ROUNDS = 3
"""Rounds that count."""

BEHIND = 1.5
"""Times the fastest way of a round: what takes longer is not tried again; of the first round, whose
times are longer by what is done but once, twice that."""

ENOUGH = 1.03
"""Times the fastest way that one which changes values less may take: it is preferred."""

LATER, MOST = 64, 1024
"""Calls until a choice is looked at for the first time, then always twice as many, and the most."""

LOOK_S, LOOK_SHARE, LEAST_S = 1.5e-3, 0.02, 50e-6
"""What measuring takes beside the calls, and the share that it may have of all calls until then; of
shorter calls than that, of their number times that.  So short ones are looked at less often."""

SAMPLES = 3
"""Calls in which it is then measured."""

CHANGED = 1.25
"""Times as long, or as short, as when it was chosen: all ways are tried again."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a call may run."""

    algorithm: str
    codec: Codec

    def __str__(self) -> str:
        return f"{self.algorithm} with {self.codec.spec}" if self.codec.lossy else self.algorithm


@dataclass(frozen=True, slots=True)
class Turn:
    """What one call is to do.

    Attributes
    ----------
    way : Way
    closes : bool
        Whether all ranks then tell their times.
    reason : str
    round : int
        Number of the round whose times the call's one is among; none has number -1.
    slot : int
        Its place among them.
    """

    way: Way
    closes: bool
    reason: str
    round: int = -1
    slot: int = 0

    @property
    def asks(self) -> bool:
        """Whether what all ranks then tell is what they expect of each way, in its order."""
        return self.closes and self.round < 0


class Tuner:
    """The ways of one kind of call.

    Parameters
    ----------
    ways : sequence of Way
        Those that change values least first.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = tuple(ways)
        self.best: int | None = 0 if len(self.ways) == 1 else None
        self.reason = "auto has no other way"
        self.chosen_s = math.inf
        self.period = LATER
        self._asking = len(self.ways) > 1
        self._possible = list(range(len(self.ways)))
        self._number = 0
        self._begin_trial(self._possible, first=0)

    def _begin_trial(self, alive: list[int], first: int) -> None:
        self._alive, self._round = list(alive), first
        self._known: list[list[float]] = [[] for _ in self.ways]
        self._begin(len(self._alive), len(self._alive))

    def _begin(self, calls: int, samples: int) -> None:
        """Let a round begin, whose last calls are measured."""
        self._number += 1
        self.left = calls
        self.times = [math.inf] * samples

    # ---- calls ----

    @property
    def settled(self) -> Way | None:
        """The way of the next call, if it was chosen and the call need not be measured."""
        if self.best is None or (self.left <= SAMPLES and len(self.ways) > 1):
            return None
        return self.ways[self.best]

    def skip(self) -> None:
        """Count a call that is not measured; only while there is a settled way."""
        self.left -= len(self.ways) > 1

    def turn(self) -> Turn:
        """What the next call is to do."""
        if self._asking:
            self._asking = False
            return Turn(self.ways[0], True, "auto: the first call")
        if self.left == 0:  # the call that was to close the round failed, on all ranks
            self._begin(self.period if self.best is not None else len(self._alive), len(self.times))
        if self.best is None:
            slot = len(self._alive) - self.left
            self.left -= 1
            reason = f"auto tries it, round {self._round} of {ROUNDS}"
            return Turn(self.ways[self._alive[slot]], self.left == 0, reason, self._number, slot)
        way = self.ways[self.best]
        if self.settled is not None:
            self.skip()
            return Turn(way, False, self.reason)
        self.left -= 1
        return Turn(way, self.left == 0, self.reason, self._number, self.left)

    def note(self, turn: Turn, seconds: float) -> None:
        """What a call took on this rank; too late if its round is over."""
        if turn.round == self._number:
            self.times[turn.slot] = seconds

    def expect(self, times: Sequence[float]) -> None:
        """Leave out what is predicted to be far behind; infinite times are no predictions."""
        known = [seconds for seconds in times if math.isfinite(seconds)]
        if known:
            limit = 2 * BEHIND * min(known)
            slow = [seconds > limit and math.isfinite(seconds) for seconds in times]
            self._possible = [i for i in self._possible if i == 0 or not slow[i]]
            self._begin_trial(self._possible, first=0)

    def agree(self, times: Sequence[float]) -> None:
        """Go on after a round, by the least times of all ranks in the order of its slots."""
        if self.best is not None:
            self._look_again(times)
        else:
            self._close_round(times)

    # ---- decisions ----

    def _look_again(self, times: Sequence[float]) -> None:
        now = median(times)
        if math.isinf(now):  # calls of this round have not ended yet
            self._begin(LATER, SAMPLES)
        elif self.chosen_s / CHANGED <= now <= self.chosen_s * CHANGED:
            self.period = max(min(2 * self.period, MOST), self.period)
            self._begin(self.period, SAMPLES)
        else:
            self.best = None
            self._begin_trial(self._possible, first=1)

    def _close_round(self, times: Sequence[float]) -> None:
        fastest = min(times)
        if math.isfinite(fastest):
            limit = fastest * (BEHIND if self._round else 2 * BEHIND)
            for index, seconds in zip(self._alive, times, strict=True):
                if self._round and math.isfinite(seconds):
                    self._known[index].append(seconds)
            kept = zip(self._alive, times, strict=True)
            self._alive = [i for i, seconds in kept if seconds <= limit or math.isinf(seconds)]
            self._round += 1
        if self._round > ROUNDS or (len(self._alive) == 1 and self._round > 1):
            self._choose()
        else:
            self._begin(len(self._alive), len(self._alive))

    def _choose(self) -> None:
        medians = [median(seconds) if seconds else math.inf for seconds in self._known]
        fastest = min(medians[i] for i in self._alive)
        best = next(i for i in self._alive if medians[i] <= ENOUGH * fastest)
        self.best, self.chosen_s = best, medians[best]
        self.period = max(LATER, int(LOOK_S / (LOOK_SHARE * max(self.chosen_s, LEAST_S))))
        others = [i for i in range(len(self.ways)) if i != best and math.isfinite(medians[i])]
        self.reason = f"auto measured {self.ways[best]} at {shown(medians[best])}"
        if others:
            second = min(others, key=lambda i: medians[i])
            self.reason += f", the next best, {self.ways[second]}, at {shown(medians[second])}"
        self._begin(self.period, SAMPLES)
