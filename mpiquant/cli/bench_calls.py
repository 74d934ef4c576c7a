"""The calls that are compared, and how they are timed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiquant
from mpiquant.cli.bench_verify import mpi_op
from mpiquant.collectives import own_part
from mpiquant.typing import Array

Start = Callable[[], Callable[[], Any]]
"""Starts a collective and returns what ends it, with its result; a blocking one has ended."""


# ---- the calls ----


def ours(arguments: argparse.Namespace, x: Array, out: Array, stats: Any = None) -> Start:
    """mpiquant's call; the codec and the algorithm are those of the options in force."""
    kind, nonblocking = arguments.kind, arguments.nonblocking
    op = arguments.op if arguments.op in ("sum", "mean", "none") else mpi_op(arguments.op)

    def start() -> Callable[[], Any]:
        if kind == "allgather":
            result = mpiquant.allgather(x, out=out.reshape(-1, x.size), stats=stats)
        elif kind == "reduce_scatter":
            result = mpiquant.reduce_scatter(x, op, out=out, stats=stats)
        elif x.dtype == out.dtype:
            call = mpiquant.Iallreduce if nonblocking else mpiquant.Allreduce
            result = call(x, out, op, stats=stats)
        else:  # a mean of integers
            function = mpiquant.iallreduce if nonblocking else mpiquant.allreduce
            result = function(x, op, out=out, stats=stats)
        return result.wait if nonblocking else lambda: result

    return start


def native(comm: MPI.Intracomm, arguments: argparse.Namespace, x: Array, out: Array) -> Start:
    """mpi4py's own call, and the division of a mean."""
    total = out if out.dtype == x.dtype else np.empty(out.shape, x.dtype)
    lengths = [part.stop - part.start for part in _parts(x.size, comm.size)]
    op = mpi_op(arguments.op)

    def divide() -> bool:
        if arguments.op == "mean":
            np.divide(total, comm.size, out=out)
        return True

    def start() -> Callable[[], Any]:
        if arguments.nonblocking:
            request = comm.Iallreduce(x, total, op)
            return lambda: request.Wait() and divide()
        if arguments.kind == "allgather":
            comm.Allgather(x, out)
        elif arguments.kind == "reduce_scatter":
            comm.Reduce_scatter(x, total, lengths, op)
        else:
            comm.Allreduce(x, total, op)
        return divide

    return start


def _parts(count: int, ranks: int) -> list[slice]:
    return [own_part(count, rank, ranks) for rank in range(ranks)]


# ---- times ----


def times(
    comm: MPI.Intracomm, actions: Sequence[Callable[[], Any]], iters: int, warmup: int
) -> Array:
    """Seconds that actions take on the slowest rank, in turn; a row for each iteration."""
    taken = np.empty((warmup + iters, len(actions)))
    for row in taken:
        for i, action in enumerate(actions):
            comm.Barrier()
            begin = time.perf_counter()
            action()
            row[i] = time.perf_counter() - begin
    comm.Allreduce(MPI.IN_PLACE, taken, MPI.MAX)
    return taken[warmup:]


PHASES = ("encode", "decode", "wire", "python", "idle", "total")


def phases(comm: MPI.Intracomm, start: Start) -> tuple[float, ...]:
    """Seconds of one call by what this rank spends them on.

    Kernels; MPI, on the core, with the polling for messages; Python; and time off the core, which
    a waiting rank leaves to others.  Each has a clock of its own: they need not add up to the last
    figure, the time of the whole call.
    """
    comm.Barrier()
    begin = time.perf_counter()
    result = start()()
    total = time.perf_counter() - begin
    stats = result[1] if isinstance(result, tuple) else result
    wire = stats.mpi_s + stats.native_s + stats.wait_s - stats.idle_s
    return stats.encode_s, stats.decode_s, wire, stats.python_s, stats.idle_s, total


def overlap_times(comm: MPI.Intracomm, start: Start, iters: int, warmup: int) -> Array:
    """Seconds of communication alone, of computation as long as that, and of both together."""

    def alone() -> None:
        start()()

    def together() -> None:
        end = start()
        compute()
        end()

    target = float(np.median(times(comm, [alone], min(iters, 7), warmup)))
    compute = computation(comm, target)
    return times(comm, [alone, compute, together], iters, warmup)


def computation(comm: MPI.Intracomm, seconds: float) -> Callable[[], None]:
    """NumPy work on small arrays that takes the slowest rank about so many seconds; collective."""
    values, roots = np.full(4096, 2.0), np.empty(4096)

    def compute(repeats: int) -> None:
        for _ in range(repeats):
            np.sqrt(values, out=roots)

    repeats = 20
    for _ in range(3):  # the longer the work, the better it can be measured
        taken = float(np.median(times(comm, [partial(compute, repeats)], 5, 1)))
        repeats = max(1, round(repeats * seconds / taken))
    return partial(compute, repeats)
