"""Recursive halving and doubling, for any number of ranks.

Let P be the largest power of two up to N.  The first 2(N-P) ranks form pairs (2i, 2i+1): the
*folded* rank 2i+1 sends its whole vector to its *partner* 2i and waits for the result.  The P
remaining *core* ranks halve: in each round a rank keeps one half of its range and sends the other
to the rank whose number differs in one bit.  After log2 P rounds each holds one complete part;
doubling runs the rounds backwards.  At the end a partner forwards all final bytes to its folded
rank.

An allreduce has P chunks, one per core rank.  A reduce-scatter or allgather has N chunks; the
part of a partner is then its own chunk and its folded rank's.

Cost: 2 log2 N alpha + 2 (N-1)/N d beta for N = P, and d + packed d more for a folded pair.  A
value is quantized log2 P times (once more if folded) and once at the end.
Source: Thakur, Rabenseifner and Gropp, 2005; Rabenseifner's folding, 2004.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpiquant.collectives.schedule import Step, Transfer


@dataclass(frozen=True, slots=True)
class _Fold:
    """Numbers of the core ranks.  `number` is None on a folded rank."""

    core: int
    pairs: int
    number: int | None

    def rank_of(self, number: int) -> int:
        return 2 * number if number < self.pairs else number + self.pairs

    def part(self, first: int, last: int, chunks: int) -> tuple[int, int]:
        """Chunks of core ranks first ... last - 1."""
        if chunks == self.core:
            return first, last
        return self.rank_of(first), self.rank_of(last)


def _fold(rank: int, size: int) -> _Fold:
    core = 1 << (size.bit_length() - 1)
    pairs = size - core
    if rank >= 2 * pairs:
        return _Fold(core, pairs, rank - pairs)
    return _Fold(core, pairs, None if rank % 2 else rank // 2)


def chunk_count(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _halvings(fold: _Fold) -> list[tuple[int, int, int, int]]:
    """(peer number, first, middle, last) of the rounds of one core rank, widest range first."""
    assert fold.number is not None
    rounds = []
    first, last = 0, fold.core
    while last - first > 1:
        middle = (first + last) // 2
        half = middle - first
        lower = fold.number < middle
        rounds.append((fold.number + (half if lower else -half), first, middle, last))
        first, last = (first, middle) if lower else (middle, last)
    return rounds


def _halves(fold: _Fold, round_: tuple[int, int, int, int], chunks: int, final: bool) -> Step:
    """One exchange: the kept half comes in for a sum, or goes out when final."""
    number, first, middle, last = round_
    assert fold.number is not None
    low, high = fold.part(first, middle, chunks), fold.part(middle, last, chunks)
    kept, other = (low, high) if fold.number < middle else (high, low)
    peer = fold.rank_of(number)
    sent, received = (kept, other) if final else (other, kept)
    return Step((Transfer(peer, *sent, final),), (Transfer(peer, *received, final),))


def reduce_steps(rank: int, size: int, chunks: int) -> list[Step]:
    fold = _fold(rank, size)
    if fold.number is None:
        return [Step(sends=(Transfer(rank - 1, 0, chunks, final=False),))]
    steps = []
    if fold.number < fold.pairs:
        steps.append(Step(recvs=(Transfer(rank + 1, 0, chunks, final=False),)))
    return steps + [_halves(fold, r, chunks, final=False) for r in _halvings(fold)]


def gather_steps(rank: int, size: int, chunks: int) -> list[Step]:
    fold = _fold(rank, size)
    # A folded rank of an allgather already has its own chunk.
    spans = [(0, chunks)]
    if chunks != fold.core:
        folded = rank if fold.number is None else rank + 1
        spans = [span for span in ((0, folded), (folded + 1, chunks)) if span[0] < span[1]]
    if fold.number is None:
        return [Step(recvs=tuple(Transfer(rank - 1, *span, final=True) for span in spans))]
    steps = [_halves(fold, r, chunks, final=True) for r in reversed(_halvings(fold))]
    if fold.number < fold.pairs:
        steps.append(Step(sends=tuple(Transfer(rank + 1, *span, final=True) for span in spans)))
    return steps


def deliver_steps(rank: int, size: int) -> list[Step]:
    fold = _fold(rank, size)
    if fold.number is None:
        return [Step(recvs=(Transfer(rank - 1, rank, rank + 1, final=True),))]
    if fold.number < fold.pairs:
        return [Step(sends=(Transfer(rank + 1, rank + 1, rank + 2, final=True),))]
    return []


def collect_steps(rank: int, size: int) -> list[Step]:
    fold = _fold(rank, size)
    if fold.number is None:
        return [Step(sends=(Transfer(rank - 1, rank, rank + 1, final=True),))]
    if fold.number < fold.pairs:
        return [Step(recvs=(Transfer(rank + 1, rank + 1, rank + 2, final=True),))]
    return []
