"""The points of `make claims-sim` that need ranks; run under mpiexec."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from _on_ranks import alternate, comm, point

import mpiquant

CHOICES = ("q8", "q4")
SIZES = (8, 256, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
MOST_CALLS = 120
"""Calls until a choice has been made, whatever it is."""


def auto(time_s: float) -> None:
    """`auto` beside native and all fixed ways, for each size; a point has about so many seconds."""
    rows = []
    for nbytes in SIZES:
        x = np.random.default_rng(comm.rank).standard_normal(nbytes // 4).astype(np.float32)
        out = np.empty_like(x)
        ways: dict[str, Callable[[], Any]] = {"native": lambda x=x, out=out: comm.Allreduce(x, out)}
        for codec in ("exact", *CHOICES):
            for algorithm in ("ring", "halving_doubling", "direct")[: 3 if comm.size > 2 else 1]:
                ways[f"{algorithm} {codec}"] = fixed(x, out, codec, algorithm)
        with mpiquant.options(codec=f"auto(choices={'+'.join(CHOICES)})"):
            ways["auto"] = lambda x=x, out=out: mpiquant.Allreduce(x, out, comm=comm)
            chosen = settle(x, out)
            first = alternate(ways, 1, 2)
            # What is far from the best is of no interest, and may take most of the time.
            least = min(first.values())
            kept = {
                k: f for k, f in ways.items() if k in ("native", "auto") or first[k] < 3 * least
            }
            total = sum(first[name] for name in kept) * 1e-6
            calls = max(1, min(200, int(2e-3 / (least * 1e-6))))
            repeat = max(3, min(31, int(time_s / (total * calls))))
            rows.append({"nbytes": nbytes, "chosen": chosen, "us": alternate(kept, calls, repeat)})
    point(rows=rows)


def fixed(x: np.ndarray, out: np.ndarray, codec: str, algorithm: str) -> Callable[[], Any]:
    return lambda: mpiquant.Allreduce(x, out, comm=comm, codec=codec, algorithm=algorithm)


def settle(x: np.ndarray, out: np.ndarray) -> str:
    """Make calls until `auto` has chosen; what, and why."""
    for _ in range(MOST_CALLS):
        stats = mpiquant.Allreduce(x, out, comm=comm, stats=True)
        if not stats.reason.startswith("auto") or stats.reason.startswith("auto measured"):
            break
    return f"{stats.algorithm} {stats.codec}: {stats.reason}"


if __name__ == "__main__":
    auto(float(sys.argv[2])) if sys.argv[1] == "auto" else sys.exit(f"no part {sys.argv[1]!r}")
