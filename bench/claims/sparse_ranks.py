"""The points of `make claims-sparse` that are measured on ranks.

sparse_ranks.py identity
sparse_ranks.py aggregation MIB REPEAT
sparse_ranks.py hierarchical MIB
sparse_ranks.py train SEEDS STEPS
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from _on_ranks import alternate, comm, point

import mpiquant
from mpiquant import BlockRandomKCodec, RandomKCodec, ThresholdCodec, TopKCodec

RATIO = 0.01
OWN = {"draw": "own"}
WAYS: dict[str, tuple[Any, str]] = {
    "top_k, allgather": (TopKCodec(ratio=RATIO), "sparse_allgather"),
    "top_k, reduce_scatter": (TopKCodec(ratio=RATIO), "sparse_reduce_scatter"),
    "threshold, allgather": (ThresholdCodec(), "sparse_allgather"),
    "threshold, reduce_scatter": (ThresholdCodec(), "sparse_reduce_scatter"),
    "random_k, allreduce": (RandomKCodec(ratio=RATIO), "ring"),
    "random_k, allgather": (RandomKCodec(ratio=RATIO, **OWN), "sparse_allgather"),
    "block_random_k, allreduce": (BlockRandomKCodec(ratio=RATIO), "ring"),
    "block_random_k, allgather": (BlockRandomKCodec(ratio=RATIO, **OWN), "sparse_allgather"),
}


def identity() -> None:
    """What was sent and what is kept, against the sum of all inputs; bytes that were sent."""
    count = 200_000
    for name, (codec, algorithm) in WAYS.items():
        feedback = mpiquant.ErrorFeedback()
        sent, right = np.zeros(count), np.zeros(count)
        for step in range(10):
            x = np.random.default_rng([comm.rank, step]).standard_normal(count)
            options = {"codec": codec, "algorithm": algorithm, "feedback": feedback, "name": "x"}
            found, stats = mpiquant.allreduce(x, comm=comm, stats=True, **options)
            sent += found
            right += comm.allreduce(x)
        kept = comm.allreduce(feedback.residual("x").copy())
        values = codec.most(count) * x.itemsize
        point(
            way=name,
            away=float(np.abs(sent + kept - right).max()),
            sent=comm.allreduce(stats.wire_bytes),
            values=values,
            drawn=codec.drawn,
            ranks=comm.size,
        )


def aggregation(mib: int, repeat: int) -> None:
    """Milliseconds of all ways, in turn."""
    x = np.random.default_rng(comm.rank).standard_normal(mib << 18).astype(np.float32)

    def run(codec: Any, algorithm: str) -> Callable[[], Any]:
        feedback = mpiquant.ErrorFeedback()
        return lambda: mpiquant.allreduce(
            x, comm=comm, codec=codec, algorithm=algorithm, feedback=feedback
        )

    functions = {name: run(*way) for name, way in WAYS.items()}
    times = alternate(functions, 1, repeat)
    point(**{name: us / 1e3 for name, us in times.items()})


def hierarchical(mib: int) -> None:
    """One call, whose bytes are counted at the interfaces."""
    x = np.random.default_rng(comm.rank).standard_normal(mib << 18).astype(np.float32)
    for _ in range(3):
        mpiquant.allreduce(x, comm=comm, codec="q8", algorithm="hierarchical")
    point(calls=3, bytes=mpiquant.UniformCodec(bits=8).nbytes(x.size, x.dtype))


TRAININGS: dict[str, dict[str, Any]] = {
    "exact": {"codec": None, "algorithm": "native"},
    "top_k": {"codec": TopKCodec(ratio=RATIO)},
    "top_k, global": {"codec": TopKCodec(ratio=RATIO, scope="global")},
    "block_random_k": {"codec": BlockRandomKCodec(ratio=RATIO, block=64)},
    "block_random_k, global": {"codec": BlockRandomKCodec(ratio=RATIO, block=64, scope="global")},
    "random_k": {"codec": RandomKCodec(ratio=RATIO)},
    "random_k, global": {"codec": RandomKCodec(ratio=RATIO, scope="global")},
    "threshold": {"codec": ThresholdCodec()},
    "block_random_k 10 %": {"codec": BlockRandomKCodec(ratio=0.1, block=64)},
    "local SGD 8": {"every": 8},
}


def train(seeds: int, steps: int) -> None:
    """Train the digits network in each way, from the same parameters on the same batches."""
    from _digits import train_digits

    for seed in range(seeds):
        for way, options in TRAININGS.items():
            point(way=way, seed=seed, **train_digits(seed, steps, options))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    parts = {
        "identity": identity,
        "aggregation": aggregation,
        "hierarchical": hierarchical,
        "train": train,
    }
    parts[what](*map(int, arguments))
