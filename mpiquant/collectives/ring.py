"""Ring: chunks travel around the ranks, summed on the way.

Reduce-scatter: in step s, rank r sends chunk r-1-s to rank r+1 and adds chunk r-2-s from rank
r-1 to its own; after N-1 steps chunk r is complete on rank r.  Allgather: chunk r-s goes on.

Cost: 2(N-1) (alpha + d/N beta); the least traffic, the most steps.  A value is quantized N-1
times on the way and once at the end.  Source: Patarasuk and Yuan, 2009.
"""

from __future__ import annotations

from mpiquant.collectives.schedule import Step, Transfer


def chunk_count(size: int) -> int:
    return size


def _step(rank: int, size: int, sent: int, final: bool) -> Step:
    sent %= size
    received = (sent - 1) % size
    return Step(
        sends=(Transfer((rank + 1) % size, sent, sent + 1, final),),
        recvs=(Transfer((rank - 1) % size, received, received + 1, final),),
    )


def reduce_steps(rank: int, size: int, chunks: int) -> list[Step]:
    return [_step(rank, size, rank - 1 - s, final=False) for s in range(size - 1)]


def gather_steps(rank: int, size: int, chunks: int) -> list[Step]:
    return [_step(rank, size, rank - s, final=True) for s in range(size - 1)]


def deliver_steps(rank: int, size: int) -> list[Step]:
    return []


def collect_steps(rank: int, size: int) -> list[Step]:
    return []
