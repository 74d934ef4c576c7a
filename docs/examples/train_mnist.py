"""Train small networks on handwritten digits with quantized gradients, on several MPI ranks.

    mpiexec -n 4 python -m mpi4py docs/examples/train_mnist.py

Every rank computes the gradient of its own shard of each batch, and `mpiquant.allreduce` takes
the mean. Each codec trains from the same parameters on the same batches as "exact", so the
differences in test accuracy are paired. The loop to copy into your own program is in `train`.

Ranks that share a machine also share its cores: with more than one BLAS thread each, they fight
over them and a step takes a hundred times as long. So one thread is the default here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # read when NumPy is imported, so before that

import digits
import numpy as np
import report
from mpi4py import MPI
from networks import MLP, NETWORKS, Array, ConvNet, Params

import mpiquant

CODECS = ("exact", "bf16", "q8", "q4", "q2", "q1")


@dataclass(frozen=True)
class Recipe:
    """How to train: steps of stochastic gradient descent, learning rate, momentum, batch size."""

    steps: int
    rate: float
    momentum: float = 0.9
    batch: int = 128


RECIPES = {"mlp": Recipe(steps=500, rate=0.02), "conv": Recipe(steps=500, rate=0.02)}


def batches(samples: int, recipe: Recipe, seed: int) -> Iterator[Array]:
    """Indices of each global batch, reshuffled every epoch, the same on every rank."""
    rng = np.random.default_rng([seed, 1])
    size = min(recipe.batch, samples)
    per_epoch = samples // size  # what is left over goes back into the next shuffle
    for step in range(recipe.steps):
        if step % per_epoch == 0:
            order = rng.permutation(samples)
        first = step % per_epoch * size
        yield order[first : first + size]


def weights_only(codec: str) -> Callable[[str, tuple[int, ...]], str]:
    """Codec policy: quantize matrices; biases are too small to be worth an error."""
    return lambda name, shape: codec if len(shape) > 1 else "exact"


def train(
    net: MLP | ConvNet,
    data: digits.Digits,
    recipe: Recipe,
    seed: int,
    codec: str,
    feedback: mpiquant.ErrorFeedback | None,
    comm: MPI.Intracomm,
) -> tuple[Params, Array]:
    """Train on all ranks; return the parameters and (loss, bytes sent, raw bytes) per step."""
    params = net.init(np.random.default_rng([seed, 0]))  # the same on every rank
    velocity = {name: np.zeros_like(p) for name, p in params.items()}
    policy = weights_only(codec)
    log = np.zeros((recipe.steps, 3))
    for step, batch in enumerate(batches(len(data.x_train), recipe, seed)):
        mine = batch[comm.rank :: comm.size]
        # Shards may differ in size by one image: dividing each sum by the mean size of a shard
        # makes the mean over ranks the exact mean over the batch.
        loss, grads = net.loss_and_grads(
            params, data.x_train[mine], data.y_train[mine], samples=len(batch) / comm.size
        )
        grads, stats = mpiquant.allreduce(
            grads, op="mean", comm=comm, codec=policy, feedback=feedback, stats=True
        )
        rate = recipe.rate * (1 - step / recipe.steps)
        for name, grad in grads.items():
            velocity[name] = recipe.momentum * velocity[name] - rate * grad
            params[name] += velocity[name]
        log[step] = loss, stats.wire_bytes, stats.raw_bytes
    return params, log


def identical_on_all_ranks(params: Params, comm: MPI.Intracomm) -> bool:
    """Whether every rank holds the same parameters, bit for bit."""
    digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params)))
    return len(set(comm.allgather(digest.digest()))) == 1


def wants_feedback(codec: str, mode: str) -> bool:
    """Whether to train with error feedback: "auto" means from 4 bits down."""
    if mode == "auto":
        bits = re.match(r"q(\d+)", codec)
        return bits is not None and int(bits[1]) <= 4
    return mode == "on" and codec != "exact"


def run(
    model: str, codec: str, seed: int, data: digits.Digits, args: argparse.Namespace
) -> report.Run:
    """Train one model with one codec and one seed, and measure."""
    comm = MPI.COMM_WORLD
    net, recipe = NETWORKS[model](data.side), args.recipes[model]
    feedback = mpiquant.ErrorFeedback() if wants_feedback(codec, args.feedback) else None
    comm.Barrier()
    start = time.perf_counter()
    params, log = train(net, data, recipe, seed, codec, feedback, comm)
    seconds = time.perf_counter() - start
    # Each rank logged the loss of its own shard; averaging them here keeps the steps lean.
    losses = np.mean(comm.allgather(log[:, 0]), axis=0)
    wire, raw = log[:, 1:].sum(axis=0)
    return report.Run(
        model=model,
        codec=codec,
        seed=seed,
        accuracy=float(np.mean(100.0 * (net.predict(params, data.x_test) == data.y_test))),
        wire_bytes_per_step=wire / recipe.steps,
        raw_bytes_per_step=raw / recipe.steps,
        ratio=raw / wire if wire else None,  # a single rank sends nothing
        identical=identical_on_all_ranks(params, comm),
        step_ms=1e3 * seconds / recipe.steps,
        losses=[round(float(loss), 6) for loss in losses],
    )


def make_parser() -> argparse.ArgumentParser:
    """Command line options."""

    def names(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        if not found:
            raise argparse.ArgumentTypeError("must name at least one")
        return list(dict.fromkeys(found))

    def positive(text: str) -> int:
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError("must be at least 1")
        return number

    parser = argparse.ArgumentParser(
        prog="train_mnist.py", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--data", choices=list(digits.SOURCES), default="mnist", help="default: %(default)s")
    add("--codecs", type=names, default=list(CODECS), help=f"default: {','.join(CODECS)}")
    add("--models", type=names, default=list(NETWORKS), help=f"default: {','.join(NETWORKS)}")
    add("--seeds", type=positive, default=3, metavar="K", help="runs per codec (default: 3)")
    add("--steps", type=positive, help="steps per run (default: depends on the model)")
    add("--batch", type=positive, default=128, help="images per step, all ranks (default: 128)")
    add(
        "--feedback",
        choices=("auto", "on", "off"),
        default="auto",
        help="error feedback; auto: for codecs of 4 bits or fewer (default)",
    )
    add("--plot", default="train_mnist.png", metavar="FILE", help="default: %(default)s, '': none")
    add("--json", default="", metavar="FILE", help="where to save all raw numbers")
    return parser


def prepare(comm: MPI.Intracomm) -> tuple[argparse.Namespace, digits.Digits]:
    """Parse the options, load the data and try every codec once, so that mistakes show early."""
    parser = make_parser()
    args = parser.parse_args()
    if unknown := set(args.models) - set(NETWORKS):
        parser.error(f"unknown model {unknown.pop()!r}; choose from {', '.join(NETWORKS)}")
    try:
        data = digits.load(args.data)
        for codec in args.codecs:  # also warms up, outside the timed steps
            probe = {"weights": np.ones((8, 8), np.float32)}
            mpiquant.allreduce(probe, op="mean", comm=comm, codec=weights_only(codec))
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    args.recipes = {
        model: Recipe(args.steps or RECIPES[model].steps, RECIPES[model].rate, batch=args.batch)
        for model in args.models
    }
    return args, data


def main() -> int:
    """Train everything and report; 1 if a lossy codec let the ranks drift apart."""
    comm = MPI.COMM_WORLD
    try:
        with contextlib.ExitStack() as silence:
            if comm.rank:  # every rank runs this, one of them speaks
                silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
                silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
            args, data = prepare(comm)
    except SystemExit:
        comm.Barrier()  # else the first rank to leave has MPI stop rank 0 before it has spoken
        raise

    todo = [(m, c, s) for s in range(args.seeds) for m in args.models for c in args.codecs]
    progress = report.Progress(len(todo), enabled=comm.rank == 0)
    runs = []
    for model, codec, seed in todo:
        progress.begin(f"{model} {codec} seed {seed}")
        runs.append(run(model, codec, seed, data, args))
        progress.done(f"{model} {codec} seed {seed}: {runs[-1].accuracy:.1f} % correct")

    if comm.rank == 0:
        report.write(runs, data.name, len(data.y_test), comm.size, args)
    comm.Barrier()  # as above: the exit code must not cut the report short
    return int(any(not r.identical for r in runs if r.codec != "exact"))


if __name__ == "__main__":
    sys.exit(main())
