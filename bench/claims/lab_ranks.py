"""The points of `make claims-lab` that need ranks of one host; run under mpiexec."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _on_ranks import alternate, comm, memory_kib, point
from mpi4py import MPI

import mpiquant

MIB = 1 << 20


def shared() -> None:
    """Default settings and codecs against native, where the network is the memory."""
    for nbytes, calls, repeat in (
        (8, 500, 41),
        (4 << 10, 500, 41),
        (64 << 10, 100, 41),
        (MIB, 20, 41),
        (16 * MIB, 2, 61),
        (64 * MIB, 1, 41),
    ):
        x = np.random.default_rng(comm.rank).standard_normal(nbytes // 4).astype(np.float32)
        out = np.empty_like(x)

        def with_codec(codec: str | None, x: Any = x, out: Any = out) -> Callable[[], Any]:
            return lambda: mpiquant.Allreduce(x, out, comm=comm, codec=codec)

        native = {"native": lambda x=x, out=out: comm.Allreduce(x, out)}
        default = {"default": lambda x=x, out=out: mpiquant.Allreduce(x, out, comm=comm)}
        codecs = {codec: with_codec(codec) for codec in ("q8", "q4", "q2")}
        # Apart: what codecs leave in the caches is not what a program of native calls finds there.
        pair = alternate({**native, **default}, calls, repeat)
        beside = alternate({**native, **codecs}, calls, repeat // 2)
        ratios = {codec: beside[codec] / beside["native"] for codec in codecs}
        point(nbytes=nbytes, **pair, ratios=ratios)


def memory() -> None:
    """Resident memory beyond the arrays: its peak, and its growth over 10,000 calls."""
    count = 16 * MIB
    x = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
    out = np.ones_like(x)
    small = np.ones(100_000, np.float32)
    for codec in ("exact", "q8", "q4", "bf16"):
        mpiquant.allreduce(small, codec=codec, algorithm="ring", comm=comm)
    base = memory_kib("VmRSS")
    for codec in ("q4", "q8", "bf16", "exact"):
        _reset_peak()
        for _ in range(3):
            mpiquant.Allreduce(x, out, codec=codec, algorithm="ring", comm=comm)
        extra = comm.allreduce(memory_kib("VmHWM") - base, MPI.MAX) * 1024 / x.nbytes
        for _ in range(500):
            mpiquant.allreduce(small, codec=codec, algorithm="ring", comm=comm)
        before = memory_kib("VmRSS")
        for _ in range(10_000):
            mpiquant.allreduce(small, codec=codec, algorithm="ring", comm=comm)
        grown = comm.allreduce(memory_kib("VmRSS") - before, MPI.MAX)
        point(codec=codec, extra=extra, grown_kib=grown)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {"shared": shared, "memory": memory}[sys.argv[1]]()
