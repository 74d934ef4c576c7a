"""What the scripts on ranks share: points as JSON lines, and times of functions in turn."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD


def point(**values: Any) -> None:
    if comm.rank == 0:
        print(json.dumps(values), flush=True)


def memory_kib(field: str) -> int:
    """A line of this process's status, such as VmRSS."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0])


def alternate(functions: dict[str, Callable[[], Any]], calls: int, repeat: int) -> dict[str, float]:
    """Median microseconds of a call, of functions in turn; the slowest rank counts.

    The order rotates and turns round, since what ran before decides what is in the caches.
    """
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeat):
        order = list(functions.items())
        order = order[i % len(order) :] + order[: i % len(order)]
        for name, function in order if i // len(order) % 2 else order[::-1]:
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            mine = (time.perf_counter() - begin) / calls * 1e6
            taken[name].append(comm.allreduce(mine, MPI.MAX))
    return {name: float(np.median(values[1:])) for name, values in taken.items()}
