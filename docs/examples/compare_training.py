"""Train one network with each way to exchange gradients, and note what each of them costs.

    mpiexec -n 4 python -m mpi4py docs/examples/compare_training.py conv
    mpiexec -n 4 python -m mpi4py docs/examples/compare_training.py gpt --steps 200

"conv" is a convolutional network in NumPy on handwritten digits, "gpt" a transformer in PyTorch on
English text.  All ways begin with the same parameters and see the same batches.  With --json what
was measured is written to a file, of which `compare_report.py` makes tables and plots.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # read when NumPy is imported, so before that

import digits
import numpy as np
from mpi4py import MPI
from networks import ConvNet, cross_entropy

import mpiquant
from mpiquant.codecs import by_name

comm = MPI.COMM_WORLD


Periodic = mpiquant.LocalSGD | mpiquant.DelayedAverage


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients, or parameters after some steps.

    Attributes
    ----------
    options : dict
        Of `DistributedOptimizer`, `LocalSGD` or `DelayedAverage`.
    every : int
        Steps of each rank by itself, from one mean of the parameters to the next; 0: none, each
        step uses the mean of all gradients.
    staleness : int
        How many steps old the gradients are whose mean a step uses.
    """

    options: dict[str, Any] = field(default_factory=dict)
    every: int = 0
    staleness: int = 0

    def periodic(self, optimizer: mpiquant.SGD | mpiquant.Adam, **options: Any) -> Periodic | None:
        """What takes all gradients of a step at once; None if each is sent when it is there."""
        if self.every:
            return mpiquant.LocalSGD(optimizer, self.every, **{**options, **self.options})
        if self.staleness:
            return mpiquant.DelayedAverage(optimizer, self.staleness, **self.options)
        return None


def _codec(name: str, **options: Any) -> Method:
    return Method({"codec": name, **options})


METHODS = {
    "exact": _codec("exact", feedback=False),
    "bf16": _codec("bf16"),
    "8 bit": _codec("q8"),
    "4 bit": _codec("q4"),
    "4 bit direct": _codec("q4", algorithm="direct"),
    "2 bit": _codec("q2"),
    "1 bit": _codec("q1"),
    "aqat": _codec("aqat"),
    "cerar": _codec("exact", algorithm="cerar", feedback=False),
    "top-k 1 %": _codec("top_k(ratio=0.01)"),
    "random-k 1 %": _codec("random_k(ratio=0.01)"),
    "block-random-k 1 %": _codec("block_random_k(ratio=0.01)"),
    "block-random-k 10 %": _codec("block_random_k(ratio=0.1)"),
    "threshold": _codec("threshold(threshold=3.0)"),
    "local SGD 8": Method(every=8),
    "local SGD 2 at 8 bit": Method({"codec": "q8"}, every=2),
    "local SGD 2 at 4 bit": Method({"codec": "q4"}, every=2),
    "delayed 4 bit": Method({"codec": "q4"}, staleness=1),
}


class Clock:
    """Seconds of each phase of the steps so far."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.phases[phase].append(time.perf_counter() - begin)

    def mean_ms(self) -> dict[str, float]:
        """Means over the steps behind the first quarter."""
        return {
            phase: 1e3 * float(np.mean(values[len(values) // 4 :]))
            for phase, values in self.phases.items()
        }


class Training(Protocol):
    """A network in training on one rank."""

    parameters: dict[str, Any]
    batch: int
    """Samples of a rank in a step."""

    def run_step(self, step: int, clock: Clock) -> float:
        """One batch of this rank's own; its loss."""

    def validate(self) -> tuple[float, float]:
        """Loss and percentage of right answers, over all ranks; collective."""

    def report(self) -> mpiquant.Report | None:
        """What the exchanges did."""

    def finish(self) -> None:
        """Apply what is under way."""


def finish(periodic: Periodic | None) -> None:
    """Make up for what was not sent, or has not come."""
    if isinstance(periodic, mpiquant.LocalSGD):
        periodic.average()
    elif periodic is not None:
        periodic.finish()


class ConvTraining:
    """The convolutional network of `networks`, with momentum."""

    batch = 32

    rate = 0.02

    def __init__(self, method: Method, seed: int, rate: float) -> None:
        self.data, self.seed = digits.load("mnist"), seed
        self.net = ConvNet(self.data.side, channels=(16, 32))
        self.parameters = self.net.init(np.random.default_rng(seed))
        sgd = mpiquant.SGD(self.parameters, rate, momentum=0.9)
        self.optimizer, self.periodic = None, method.periodic(sgd)
        if self.periodic is None:
            self.optimizer = mpiquant.DistributedOptimizer(sgd, **method.options)

    def run_step(self, step: int, clock: Clock) -> float:
        rng = np.random.default_rng([self.seed, step, comm.rank])
        rows = rng.integers(0, len(self.data.x_train), self.batch)
        optimizer, periodic = self.optimizer, self.periodic
        need = (lambda name: None) if optimizer is None else optimizer.wait
        with clock("forward"):
            activations = self.net.forward(self.parameters, self.data.x_train[rows], need)
        loss, d_logits = cross_entropy(activations[-1], self.data.y_train[rows], self.batch)
        gradients = {}
        with clock("backward"):
            for name, gradient in self.net.backward(self.parameters, activations, d_logits):
                if optimizer is None:
                    gradients[name] = gradient
                else:
                    optimizer.ready(name, gradient)
        if periodic is not None:
            with clock("update"):
                periodic.step(gradients)
        return loss

    def validate(self) -> tuple[float, float]:
        logits = self.net.forward(self.parameters, self.data.x_test)[-1]
        loss, _ = cross_entropy(logits, self.data.y_test, len(logits))
        right = np.mean(logits.argmax(axis=1) == self.data.y_test)
        return comm.allreduce(loss) / comm.size, 100 * comm.allreduce(float(right)) / comm.size

    def report(self) -> mpiquant.Report | None:
        return None if self.optimizer is None else self.optimizer.report()

    def finish(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
        else:
            finish(self.periodic)


class GptTraining:
    """The transformer of `gpt`, with Adam."""

    batch = 4
    held_out = 32
    rate = 2.5e-4
    """The best for exact training among 1e-3, 5e-4 and this one: behind 500 steps it ends with
    validation losses of 2.03, 1.79 and 1.75."""

    def __init__(self, method: Method, seed: int, rate: float) -> None:
        import gpt
        import torch

        import mpiquant.torch

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.torch, self.gpt, self.seed = torch, gpt, seed
        self.train, self.test, letters = gpt.text()
        self.model = gpt.GPT(letters)
        mpiquant.torch.broadcast_parameters(self.model)
        named = list(self.model.named_parameters())
        self.parameters = {name: mpiquant.torch.as_array(p) for name, p in named}
        adam = mpiquant.Adam(self.parameters, rate)
        self.optimizer, self.periodic = None, method.periodic(adam, state="keep")
        if self.periodic is None:
            self.optimizer = mpiquant.torch.DistributedOptimizer(
                torch.optim.Adam(self.model.parameters(), lr=rate), named, **method.options
            )

    def run_step(self, step: int, clock: Clock) -> float:
        rng = np.random.default_rng([self.seed, step, comm.rank])
        codes = self.gpt.windows(self.train, self.batch, self.model.context + 1, rng)
        self.model.zero_grad()
        with clock("forward"):
            loss = self.model.loss(codes)
        with clock("backward"):
            loss.backward()
        with clock("update"):
            if self.periodic is not None:
                self.periodic.step({n: p.grad.numpy() for n, p in self.model.named_parameters()})
            else:
                assert self.optimizer is not None
                self.optimizer.step()
        return float(loss.detach())

    def validate(self) -> tuple[float, float]:
        length, right, total = self.model.context, 0.0, 0.0
        starts = np.linspace(0, len(self.test) - length - 1, self.held_out * comm.size, dtype=int)
        mine = starts[comm.rank :: comm.size]
        codes = self.torch.stack([self.test[s : s + length + 1] for s in mine])
        with self.torch.no_grad():
            total = float(self.model.loss(codes))
            right = float((self.model(codes[:, :-1]).argmax(-1) == codes[:, 1:]).float().mean())
        return comm.allreduce(total) / comm.size, 100 * comm.allreduce(right) / comm.size

    def report(self) -> mpiquant.Report | None:
        return None if self.optimizer is None else self.optimizer.report()

    def finish(self) -> None:
        finish(self.periodic)


TRAININGS = {"conv": ConvTraining, "gpt": GptTraining}


def run(
    model: str, name: str, seed: int, steps: int, every: int, rate: float | None = None
) -> dict[str, Any]:
    """Train with one method; what was measured."""
    method, made = METHODS[name], TRAININGS[model]
    training: Training = made(method, seed, made.rate if rate is None else rate)
    clock, losses, validated, seconds = Clock(), [], [], []
    for step in range(steps):
        if every and step % every == 0:
            validated.append([step, *training.validate()])
        comm.Barrier()
        begin = time.perf_counter()
        losses.append(training.run_step(step, clock))
        seconds.append(time.perf_counter() - begin)
    training.finish()
    if every:
        validated.append([steps, *training.validate()])
    count = sum(p.size for p in training.parameters.values())
    means = np.array(comm.allgather((losses, seconds))).mean(axis=0)
    return {
        "model": model,
        "method": name,
        "seed": seed,
        "ranks": comm.size,
        "batch": training.batch,
        "parameters": count,
        "losses": [round(float(loss), 5) for loss in means[0]],
        "validation": validated,
        "seconds": float(np.sum(means[1])),
        "step_s": float(np.median(means[1][steps // 4 :])),
        "mean_step_s": float(np.mean(means[1][steps // 4 :])),
        "identical": not mpiquant.differing_parameters(training.parameters),
        **_costs(training, method, clock, count),
    }


def _costs(training: Training, method: Method, clock: Clock, count: int) -> dict[str, Any]:
    """Bytes that a rank sends in a step, and milliseconds of each phase."""
    phases, report = clock.mean_ms(), training.report()
    if report is None:  # a mean of all at once
        nbytes = by_name(method.options.get("codec", "exact")).nbytes(count, np.dtype(np.float32))
        sent = 2 * (comm.size - 1) / comm.size * nbytes / (method.every or 1)
        return {"sent": sent, "phases": phases}
    rows = report.buckets
    phases["wait"] = 1e3 * (report.wire_wait_s + report.peer_wait_s)
    # Waits are a part of the update (gpt) or of the forward pass (conv).
    whole = "update" if "update" in phases else "forward"
    phases[whole] = max(phases[whole] - phases["wait"], 0.0)
    phases["encode"] = 1e3 * sum(row.encode_s for row in rows)
    phases["decode"] = 1e3 * sum(row.decode_s for row in rows)
    return {"sent": sum(row.sent_nbytes for row in rows), "phases": phases}


def main() -> None:
    """Train with each method and seed in turn; rank 0 tells how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", choices=list(TRAININGS))
    parser.add_argument("--methods", default=",".join(METHODS), help="default: all")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--rate", type=float, help="of learning; default: that of the model")
    parser.add_argument("--seeds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--every", type=int, default=20, help="steps between validations; 0: none")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    args = parser.parse_args()
    names = [name.strip() for name in args.methods.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"unknown methods: {', '.join(unknown)}; known are {', '.join(METHODS)}")
    records = []
    for seed in range(args.seeds):
        for name in names:
            record = run(args.model, name, seed, args.steps, args.every, args.rate)
            records.append(record)
            if comm.rank == 0:
                show(record)
                if args.json:
                    args.json.write_text(json.dumps(records))


def show(record: dict[str, Any]) -> None:
    """One line about a run."""
    loss = f"loss {np.mean(record['losses'][-10:]):.3f}"
    if record["validation"]:
        _, held_out, right = record["validation"][-1]
        loss += f", validation {held_out:.3f}, {right:.1f} % right"
    print(
        f"{record['method']:<20} seed {record['seed']}: {loss}, {1e3 * record['step_s']:.1f} ms "
        f"and {record['sent'] / 1e6:.3f} MB per step"
        + ("" if record["identical"] else ", replicas differ"),
        flush=True,
    )


if __name__ == "__main__":
    main()
