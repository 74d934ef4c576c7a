"""Direct: every rank sends each other rank its chunk, and then its own sum to all.

Two exchanges, so the fewest steps, and the smallest error: a value is quantized once on the way
and once at the end.  Peers are visited in rotated order, so that no rank is the first target of
all.

Cost: 2 (N-1) (alpha + d/N beta) with all messages of an exchange in flight at once.  Known as
scatter-reduce-allgather (SRA).
"""

from __future__ import annotations

from mpiquant.collectives.schedule import Step, Transfer


def chunk_count(size: int) -> int:
    return size


def reduce_steps(rank: int, size: int, chunks: int) -> list[Step]:
    peers = [(rank + i) % size for i in range(1, size)]
    sends = tuple(Transfer(p, p, p + 1, final=False) for p in peers)
    recvs = tuple(Transfer(p, rank, rank + 1, final=False) for p in reversed(peers))
    return [Step(sends, recvs)] if peers else []


def gather_steps(rank: int, size: int, chunks: int) -> list[Step]:
    peers = [(rank + i) % size for i in range(1, size)]
    sends = tuple(Transfer(p, rank, rank + 1, final=True) for p in peers)
    recvs = tuple(Transfer(p, p, p + 1, final=True) for p in reversed(peers))
    return [Step(sends, recvs)] if peers else []


def deliver_steps(rank: int, size: int) -> list[Step]:
    return []


def collect_steps(rank: int, size: int) -> list[Step]:
    return []
