"""The points of `make claims-sparse` about `bounded` that are measured on ranks.

bounded_ranks.py errors ARRAYS
bounded_ranks.py ratios MIB
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from _on_ranks import comm, point

import mpiquant
from mpiquant import BoundedCodec

LARGEST = 2000
"""Values of an array."""


def _constant(rng: np.random.Generator, count: int) -> Any:
    return np.full(count, rng.standard_normal())


def _huge_range(rng: np.random.Generator, count: int) -> Any:
    return rng.standard_normal(count) * 10.0 ** rng.uniform(-30, 30, count)


def _subnormal(rng: np.random.Generator, count: int) -> Any:
    return rng.standard_normal(count) * 1e-42


def _normal(rng: np.random.Generator, count: int) -> Any:
    return rng.standard_normal(count)


def _smooth(rng: np.random.Generator, count: int) -> Any:
    return np.sin(np.linspace(0, rng.uniform(1, 9), count) + rng.uniform(0, 6))


def _outlier(rng: np.random.Generator, count: int) -> Any:
    x = rng.standard_normal(count)
    x[rng.integers(count)] = 1e6
    return x


def _halves(rng: np.random.Generator, count: int) -> Any:
    """Values half way between integers of many steps."""
    return (rng.integers(-9, 10, count) + 0.5) * 2.0 ** int(rng.integers(-9, 10))


KINDS = {
    "constant": _constant,
    "huge range": _huge_range,
    "subnormal": _subnormal,
    "normal": _normal,
    "smooth": _smooth,
    "outlier": _outlier,
    "halves": _halves,
    "zeros": lambda rng, count: np.zeros(count),
}


def errors(arrays: int) -> None:
    """The largest error over the bound, of random arrays with random bounds; by kind."""
    shared = np.random.default_rng(comm.size)  # the same on all ranks
    worst, refused, tried = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0), 0
    for i in range(arrays):
        kind, count = list(KINDS)[i % len(KINDS)], int(shared.integers(1, LARGEST))
        dtype = (np.float32, np.float64)[int(shared.integers(2))]
        x = KINDS[kind](np.random.default_rng([comm.size, i, comm.rank]), count).astype(dtype)
        every = np.array(comm.allgather(x))
        right = every.astype(np.longdouble).sum(axis=0)
        largest = float(np.abs(every).max())
        relative = 10.0 ** shared.uniform(-6, -0.5)
        wanted = relative * largest or 1e-3
        codec = BoundedCodec(absolute=wanted) if i % 2 else BoundedCodec(relative=relative)
        algorithm = ("ring", "halving_doubling", "direct", "broadcast")[i % 4]
        mean = bool(shared.integers(2))
        try:
            options = {"codec": codec, "algorithm": algorithm}
            found = mpiquant.allreduce(x, "mean" if mean else "sum", comm=comm, **options)
        except ValueError:
            refused[kind] += 1
            continue
        tried += 1
        error = np.abs(found - (right / comm.size if mean else right)).max()
        worst[kind] = max(worst[kind], float(error / wanted))
    point(ranks=comm.size, worst=worst, refused=refused, tried=tried)


def ratios(mib: int) -> None:
    """How much shorter than the array what is sent is, and time over that of the exact ring."""
    count = mib << 18
    at = np.linspace(0, 1, count)
    smooth = (np.sin(40 * at + comm.rank) * np.exp(-3 * at)).astype(np.float32)
    normal = np.random.default_rng(comm.rank).standard_normal(count).astype(np.float32)
    for data, x in (("smooth", smooth), ("N(0,1)", normal)):
        for relative in (1e-2, 1e-3, 1e-4, 1e-5):
            codec = BoundedCodec(relative=relative)
            _, stats = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm="ring", stats=True)
            point(data=data, relative=relative, ratio=stats.ratio)


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    {"errors": errors, "ratios": ratios}[what](*map(int, arguments))
