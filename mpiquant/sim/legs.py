"""What a call of a bucket sends: runs of alike steps, the same on all ranks.

A *leg* is one message of a rank, or some messages of steps that follow each other.  Steps of very
many ranks are taken together in groups, since each of them takes next to no time.  A chunk may be
divided into *lanes*, segments which go around a ring one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

LEGS = 192
"""Legs of a phase, of which no more than that are made by dividing chunks."""

GROUPS = 64
"""Into so many legs a phase of more steps than `LEGS` is joined, and fewer steps are divided where
the pieces of a step are needed together."""


Work = Mapping[str, float]
"""Values that each kernel handles."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One or more messages of each rank.

    Attributes
    ----------
    phase : {"partial", "final"}
        Whether they hold partial sums, or what their owner has encoded for all.
    exchange : {"chain", "pair", "spread"}
        To the next rank, which needs what came before; with one whose number differs in a bit; or
        to all in turn, of what was there at the beginning.
    lane : int
    first, steps : int
        Number of the first step, and how many.
    values : int
        Of each message.
    distance : int
        To the peer: around the ring, or the bit.
    last : bool
        Whether it ends its step, where pieces of one step are needed together.
    before, after : mapping of str to float
        Values that each kernel handles on the way, at each step: before the message can go, and
        what can wait until it has.
    ends : int
        Ends of messages that are handled before: its own, and that of the one which it needs.
    """

    phase: str
    exchange: str
    lane: int
    first: int
    steps: int
    values: int
    distance: int
    last: bool
    before: Work = field(default_factory=dict)
    after: Work = field(default_factory=dict)
    ends: int = 2


@dataclass(frozen=True)
class Course:
    """All that a call does on each rank.

    Attributes
    ----------
    legs : tuple of Leg
    lanes : int
    tail : mapping of str to float
        Values that kernels handle behind the last message.
    volume : int
        Values that a rank sends.
    """

    legs: tuple[Leg, ...]
    lanes: int
    tail: Work

    @property
    def volume(self) -> int:
        return sum(leg.values * leg.steps for leg in self.legs)


def course_of(algorithm: str, values: int, size: int, lane: int, *, group: bool = True) -> Course:
    """The legs of a call.

    Parameters
    ----------
    algorithm : {"ring", "halving_doubling", "broadcast", "cerar"}
    values : int
        Rounded up, so that all messages of a step are alike.
    size : int
        Ranks.
    lane : int
        Values of a message, about, if a chunk has more.
    group : bool
        Whether steps may be taken together.

    Raises
    ------
    ValueError
        For other algorithms, and for halving and doubling on no power of two.
    """
    if size == 1:
        return Course((), 1, {})
    if algorithm == "ring":
        return _ring(values, size, lane, group)
    if algorithm == "halving_doubling":
        return _halving_doubling(values, size, lane)
    if algorithm == "broadcast":
        return _broadcast(values, size, lane, group)
    if algorithm == "cerar":
        return _coded_ring(values, size, lane, group)
    raise ValueError(f"no training is simulated with algorithm {algorithm!r}")


def _lanes(values: int, lane: int, most: int) -> tuple[int, int]:
    """Lanes that some values are divided into, `most` at most, and values of a message of one."""
    lanes = max(1, min(-(-values // lane), most))
    return lanes, -(-values // lanes)


def _runs(first: int, last: int, group: bool) -> Iterator[tuple[int, int]]:
    """First step and number of steps of each leg, of the steps first ... last - 1."""
    steps = -(-(last - first) // GROUPS) if group and last - first > LEGS else 1
    for begin in range(first, last, steps):
        yield begin, min(steps, last - begin)


def _ring(values: int, size: int, lane: int, group: bool) -> Course:
    """N - 1 steps in which each hop adds, and as many in which it passes on."""
    lanes, n = _lanes(-(-values // size), lane, LEGS // (size - 1))
    legs = []
    for i in range(lanes):
        legs.append(Leg("partial", "chain", i, 0, 1, n, 1, True, {"encode": n}, ends=1))
    for first, steps in _runs(1, size - 1, group):
        for i in range(lanes):
            legs.append(Leg("partial", "chain", i, first, steps, n, 1, True, {"hop": n}))
    for i in range(lanes):
        legs.append(Leg("final", "chain", i, 0, 1, n, 1, True, {"hop": n, "decode": n}))
    for first, steps in _runs(1, size - 1, group):
        for i in range(lanes):
            legs.append(Leg("final", "chain", i, first, steps, n, 1, True, {}, {"decode": n}))
    return Course(tuple(legs), lanes, {"decode": n})


def _halving_doubling(values: int, size: int, lane: int) -> Course:
    """log2 N exchanges of ever smaller halves, and the same backwards."""
    if size & (size - 1):
        raise ValueError(f"halving and doubling is simulated on powers of two, not on {size} ranks")
    rounds = size.bit_length() - 1
    chunk = -(-values // size)
    legs: list[Leg] = []
    came: Work = {}  # what is to be done with a piece of the step before
    for step in range(rounds):
        bit = size >> (step + 1)
        count, n = _lanes(chunk * bit, lane, GROUPS // rounds)
        for piece in range(count):
            head = {**came, "encode": n} if piece == 0 else {"encode": n}
            ends = 2 if piece == 0 and step else 1
            rest: Work = {"decode_add": n} if piece and step < rounds - 1 else {}
            last = piece == count - 1
            legs.append(Leg("partial", "pair", 0, step, 1, n, bit, last, head, rest, ends))
        came = {"decode_add": n}
    for step in range(rounds):
        bit = 1 << step
        count, n = _lanes(chunk * bit, lane, GROUPS // rounds)
        for piece in range(count):
            head = {"hop": n, "decode": n} if step == 0 else {}
            rest = {"decode": n / 2} if step else {}
            last = piece == count - 1
            ends = 2 if piece == 0 else 1
            legs.append(Leg("final", "pair", 0, step, 1, n, bit, last, head, rest, ends))
    return Course(tuple(legs), 1, {"decode": n})


def _broadcast(values: int, size: int, lane: int, group: bool) -> Course:
    """The whole array to each other rank, which adds up what comes."""
    lanes, n = _lanes(values, lane, LEGS // (size - 1))
    legs = []
    for first, steps in [(0, 1), *_runs(1, size - 1, group)]:
        head = {"encode": n} if first == 0 else {}
        for i in range(lanes):
            rest = {"decode_add": n}
            legs.append(Leg("final", "spread", i, first, steps, n, first + 1, True, head, rest))
    return Course(tuple(legs), lanes, {})


def _coded_ring(values: int, size: int, lane: int, group: bool) -> Course:
    """3 N - 2 rounds with components of half a chunk: c = 2 N."""
    rounds = 3 * size - 2
    lanes, n = _lanes(-(-values // (2 * size)), lane, LEGS // rounds)
    legs = []
    for first, steps in [(0, 1), *_runs(1, rounds, group)]:
        # What is encoded for the first round is a product of small matrices with the whole array.
        head = {"hop": values / lanes} if first == 0 else {"decode_add": n}
        ends = 2 if first else 1
        for i in range(lanes):
            legs.append(Leg("partial", "chain", i, first, steps, n, 1, True, head, ends=ends))
    return Course(tuple(legs), lanes, {"hop": values / lanes})
