"""Parameter server: all ranks send their vectors to rank 0, which sends the sum back to all.

A baseline to compare with: two steps, and the traffic of all ranks on one link.  A value is
quantized once on the way and once at the end, as in `direct`, which is the same with the array
spread over as many servers as ranks.

Cost: 2 (N-1) (alpha + d beta) on the link of rank 0.  Source: Li et al. 2014, with one server.
"""

from __future__ import annotations

from mpiquant.collectives.schedule import Step, Transfer

SERVER = 0


def chunk_count(size: int) -> int:
    return 1


def _others(size: int) -> range:
    return range(1, size)


def reduce_steps(rank: int, size: int, chunks: int) -> list[Step]:
    if size == 1:
        return []
    if rank != SERVER:
        return [Step(sends=(Transfer(SERVER, 0, chunks, final=False),))]
    return [Step(recvs=tuple(Transfer(p, 0, chunks, final=False) for p in _others(size)))]


def gather_steps(rank: int, size: int, chunks: int) -> list[Step]:
    if size == 1:
        return []
    if rank != SERVER:
        spans = _unknown(rank, size, chunks)
        return [Step(recvs=tuple(Transfer(SERVER, *span, final=True) for span in spans))]
    pairs = [(p, span) for p in _others(size) for span in _unknown(p, size, chunks)]
    return [Step(sends=tuple(Transfer(p, *span, final=True) for p, span in pairs))]


def _unknown(rank: int, size: int, chunks: int) -> list[tuple[int, int]]:
    """Chunks that a rank does not have: in an allgather, where each has one, all but its own."""
    if chunks != size:
        return [(0, chunks)]
    return [span for span in ((0, rank), (rank + 1, chunks)) if span[0] < span[1]]


def deliver_steps(rank: int, size: int) -> list[Step]:
    if rank != SERVER:
        return [Step(recvs=(Transfer(SERVER, rank, rank + 1, final=True),))]
    return [Step(sends=tuple(Transfer(p, p, p + 1, final=True) for p in _others(size)))]


def collect_steps(rank: int, size: int) -> list[Step]:
    if rank != SERVER:
        return [Step(sends=(Transfer(SERVER, rank, rank + 1, final=True),))]
    return [Step(recvs=tuple(Transfer(p, p, p + 1, final=True) for p in _others(size)))]
