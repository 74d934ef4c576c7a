"""What an algorithm is: who sends which chunks to whom, step by step.

An array is cut into *chunks*; a `Step` names, for one rank, ranges of chunks to send and to
receive.  An algorithm is a pure function from (rank, size) to its steps; every runner reads the
same steps.

There are two kinds of messages.  A *partial* message carries a partial sum, encoded anew by its
sender; the receiver adds it to what it has.  A *final* message carries chunks whose sum is
complete: each was encoded once, by its owner, and is passed on byte for byte, so that all ranks
decode the same bytes.

Within a step, a rank's sends read the state before the step's receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks first ... last - 1 go to, or come from, rank peer."""

    peer: int
    first: int
    last: int
    final: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one round; sends and receives of a step run side by side."""

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()


def renamed(step: Step, ranks: Sequence[int]) -> Step:
    """A step of a group, whose rank i is rank ranks[i] of all."""

    def of_all(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, peer=ranks[t.peer]) for t in transfers)

    return Step(of_all(step.sends), of_all(step.recvs))


class Algorithm(Protocol):
    """A module of this folder."""

    def chunk_count(self, size: int) -> int:
        """Chunks of an allreduce over size ranks."""

    def reduce_steps(self, rank: int, size: int, chunks: int) -> list[Step]:
        """Steps after which each chunk's sum is complete on its owner."""

    def gather_steps(self, rank: int, size: int, chunks: int) -> list[Step]:
        """Steps that bring the owners' final chunks to all ranks."""

    def deliver_steps(self, rank: int, size: int) -> list[Step]:
        """Steps behind a reduce-scatter that bring chunk r from its owner to rank r."""

    def collect_steps(self, rank: int, size: int) -> list[Step]:
        """Steps before an allgather that bring chunk r from rank r to its owner."""


def chunk_bounds(count: int, chunks: int) -> tuple[int, ...]:
    """Offsets of chunks whose lengths differ by at most one, the longer ones first.

    Returns
    -------
    tuple of chunks + 1 int
        Chunk i is elements bounds[i] ... bounds[i+1] - 1.
    """
    short, longer = divmod(count, chunks)
    lengths = (short + (i < longer) for i in range(chunks))
    return tuple(accumulate(lengths, initial=0))


def own_part(count: int, rank: int, size: int) -> slice:
    """Elements of chunk `rank` of `size`: a rank's part of a reduce-scatter or an allgather."""
    short, longer = divmod(count, size)
    begin = rank * short + min(rank, longer)
    return slice(begin, begin + short + (rank < longer))
