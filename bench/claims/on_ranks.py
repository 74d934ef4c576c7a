"""Measured on one number of ranks for `main.py`: JSON lines of points, printed by rank 0."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiquant
from mpiquant import UniformCodec

comm = MPI.COMM_WORLD
ALGORITHMS = ("ring", "halving_doubling", "direct")
CODECS: tuple[Any, ...] = (
    *("exact", "fp16", "bf16", *(f"q{bits}" for bits in range(1, 17)), "ternary"),
    UniformCodec(bits=4, rounding="stochastic", seed=1),
)
LOSSY = CODECS[1:]


def point(name: str, figure: float, bound: float, sense: str) -> None:
    if comm.rank == 0:
        print(json.dumps({"point": name, "figure": figure, "bound": bound, "sense": sense}))


def normals(count: int, dtype: str, step: int) -> np.ndarray:
    rng = np.random.default_rng([comm.rank, step])
    return rng.standard_normal(count).astype(dtype)


def digest(array: np.ndarray) -> bytes:
    return hashlib.sha256(array.tobytes()).digest()


def ratios() -> None:
    """Raw over wire at 1 Mi values, headers and scales included; the worst rank counts."""
    x = normals(1 << 20, "f4", 0)
    for name, bound in (("q8", 3.9), ("q4", 7.7), ("q2", 15.0), ("q1", 29.0)):
        worst = float("inf")
        for algorithm in ALGORITHMS:
            _, stats = mpiquant.allreduce(x, codec=name, algorithm=algorithm, stats=True)
            # A folded rank of halving and doubling may send, or receive, more than others.
            worst = min(worst, stats.ratio or float("inf"))
        worst = comm.allreduce(worst, MPI.MIN)
        if comm.size > 1:
            point(
                f"raw/wire at 1 Mi values, {name}, worst algorithm and rank", worst, bound, "least"
            )


def identity() -> None:
    """Ranks whose result differs; segment sizes and repeats that change a bit."""
    differing = changed = repeated = 0
    x = normals(70_001, "f4", 1)
    for algorithm in ALGORITHMS:
        for codec in CODECS:
            twins = []
            for segment in (511 * 512, 4096):
                private = comm.Dup()
                with mpiquant.options(segment=segment):
                    twins.append(
                        mpiquant.allreduce(x, comm=private, codec=codec, algorithm=algorithm)
                    )
                private.Free()
            private = comm.Dup()
            again = mpiquant.allreduce(x, comm=private, codec=codec, algorithm=algorithm)
            private.Free()
            differing += len(set(comm.allgather(digest(twins[0])))) - 1
            changed += comm.allreduce(int(digest(twins[0]) != digest(twins[1])))
            repeated += comm.allreduce(int(digest(twins[0]) != digest(again)))
    point("results that differ between ranks, all algorithms and codecs", differing, 0, "most")
    point("results that change with the segment size", changed, 0, "most")
    point("results that do not repeat with one seed", repeated, 0, "most")


def telescoping() -> None:
    """Outputs plus residuals against the true sums, over 50 steps."""
    for dtype, bound in (("f4", 1e-4), ("f8", 1e-9)):
        worst = 0.0
        for algorithm in ALGORITHMS:
            for codec in LOSSY:
                feedback = mpiquant.ErrorFeedback()
                outputs, total = np.zeros(2000), np.zeros(2000)
                for step in range(50):
                    x = normals(2000, dtype, step)
                    outputs += mpiquant.allreduce(
                        x, codec=codec, algorithm=algorithm, feedback=feedback
                    )
                    total += x
                rest = feedback.residual("")
                rest = np.zeros(2000) if rest is None else rest.astype(np.float64)
                found, true = comm.allreduce(rest), comm.allreduce(total)
                error = np.linalg.norm(outputs + found - true) / np.linalg.norm(true)
                worst = max(worst, float(error))
        name = {"f4": "float32", "f8": "float64"}[dtype]
        point(f"telescoping identity over 50 steps, {name}, relative error", worst, bound, "most")


ratios()
identity()
telescoping()
