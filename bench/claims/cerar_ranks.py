"""The points of `make claims-cerar` that are measured on ranks.

cerar_ranks.py wire MIB DTYPE REPEAT
cerar_ranks.py rounds
cerar_ranks.py memory
cerar_ranks.py train SEEDS STEPS
"""

from __future__ import annotations

import sys
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from _digits import train_digits
from _on_ranks import alternate, comm, point

import mpiquant

RESYNC_EVERY = 50
DRIFT_EVERY = 25

SEGMENT = 1 << 18


def ways(dtype: str) -> dict[str, dict[str, Any]]:
    """Options of an allreduce, by what the table calls it."""
    found: dict[str, dict[str, Any]] = {
        "native": {"algorithm": "native"},
        "ring": {"algorithm": "ring"},
    }
    for per_token in (2, 3):
        options = {"algorithm": "cerar", "components": per_token * comm.size}
        found[f"cerar {per_token}N"] = options
    if dtype == "float32":
        found["q16 ring"] = {"algorithm": "ring", "codec": "q16"}
        found["bf16 ring"] = {"algorithm": "ring", "codec": "bf16"}
        found["q8 ring"] = {"algorithm": "ring", "codec": "q8"}
    return found


def wire(mib: int, dtype: str, repeat: int) -> None:
    """Times, bytes and errors of all ways, in turn."""
    count = (mib << 20) // np.dtype(dtype).itemsize
    x = np.random.default_rng(comm.rank).standard_normal(count).astype(dtype)
    exact = np.empty(count)
    comm.Allreduce(x.astype(np.float64), exact)
    out = np.empty_like(x)

    def run(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: mpiquant.Allreduce(x, out, comm=comm, **options)

    functions = {name: run(options) for name, options in ways(dtype).items()}
    facts = {}
    for name, options in ways(dtype).items():
        stats = mpiquant.Allreduce(x, out, comm=comm, stats=True, **options)
        error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
        every = comm.allgather((error, zlib.crc32(out)))
        facts[name] = {
            "sent": stats.wire_bytes / x.nbytes,
            "messages": stats.messages,
            "error": max(e for e, _ in every),
            "identical": len({h for _, h in every}) == 1,
        }
    times = alternate(functions, 1, repeat)
    point(**{name: {**facts[name], "ms": times[name] / 1e3} for name in facts})


def rounds() -> None:
    """Messages and bytes of one-segment components; with c = N, how far the sum is from exact."""
    size = comm.size
    for c in (size, size + 1, 2 * size, 2 * size + 1, 3 * size):
        x = np.random.default_rng(comm.rank).standard_normal(2 * 1000 * c)
        exact, right = np.empty_like(x), np.empty_like(x)
        mpiquant.Allreduce(x, exact, comm=comm, algorithm="ring")
        options = {"algorithm": "cerar", "components": c, "stats": True}
        stats = mpiquant.Allreduce(x, right, comm=comm, **options)
        away = float(np.linalg.norm(right - exact) / np.linalg.norm(exact))
        point(components=c, rounds=stats.messages, sent=stats.wire_bytes / x.nbytes, away=away)


def memory() -> None:
    """Most bytes that a call allocates beside its arrays, by what Python and NumPy tell."""
    x = np.ones(16 << 20, np.float32)
    out = np.empty_like(x)
    for c in (2 * comm.size, 2 * comm.size + 1, 3 * comm.size):
        options = {"algorithm": "cerar", "components": c, "segment": SEGMENT}
        with mpiquant.options(**options):
            mpiquant.Allreduce(x[:1000], out[:1000], comm=comm)  # imports, plans, channels
            tracemalloc.start()
            mpiquant.Allreduce(x, out, comm=comm)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        component = -(-x.size // c) * x.itemsize
        beside = (peak - comm.size * component) / (SEGMENT * x.itemsize)
        point(components=c, array=peak / x.nbytes, segments=max(comm.allgather(beside)))


# ---- training ----


TRAININGS: dict[str, dict[str, Any]] = {
    "exact": {"algorithm": "native"},
    "cerar": {"algorithm": "cerar"},
    "cerar, resync": {"algorithm": "cerar", "resync_every": RESYNC_EVERY},
}


def train(seeds: int, steps: int) -> None:
    """Train the digits network in each way, from the same parameters on the same batches."""
    for seed in range(seeds):
        for way, options in TRAININGS.items():
            drifts: list[float] = []

            def watch(step: int, params: Any, drifts: list[float] = drifts) -> None:
                if step % DRIFT_EVERY == 0 or step == steps:
                    drifts.append(max(mpiquant.parameter_drift(params).values()))

            found = train_digits(seed, steps, {"codec": None, **options}, watch)
            point(way=way, seed=seed, drifts=drifts, **found)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "wire":
        wire(int(arguments[0]), arguments[1], int(arguments[2]))
    elif what in ("rounds", "memory"):
        {"rounds": rounds, "memory": memory}[what]()
    else:
        train(int(arguments[0]), int(arguments[1]))
