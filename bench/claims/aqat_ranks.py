"""The points of `make claims-aqat` that are measured on ranks; run on hosts of the lab.

    aqat_ranks.py train '{"codec": "aqat", ...}'

trains a quadratic model of some layers, whose computation is a sleep: four ranks that really
computed would share two cores here, and their jitter would drown what is measured.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _on_ranks import comm, point
from mpi4py import MPI

import mpiquant
from mpiquant import adaptive, links

WATCHED = 4
"""The layer whose loss and errors are followed."""

WORLD = range(comm.size)
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class Task:
    """What to train, and how.

    Attributes
    ----------
    codec, algorithm : str
    layers : tuple of int
        Values of each, in the order of the forward pass.
    step_s : float
        Computation of a step; a third of it is the forward pass.
    run_s : float
        When to end.
    late_s : float
        Steps that began before are left out of the figures.
    check : bool
        Compare all results of all ranks.
    batch : int
        Samples of real dense layers; 0: their computation is a sleep.
    """

    codec: str = "aqat"
    algorithm: str = "auto"
    layers: tuple[int, ...] = (16 << 10, *[512 << 10] * 7)
    step_s: float = 0.2
    run_s: float = 20.0
    late_s: float = 2.0
    check: bool = False
    batch: int = 0


class Model:
    """One layer with half of h (w - t)^2 for each value, and another target t on each rank.

    Its gradients have noise, as all of the other layers' have nothing else: whatever the stand-in
    computed would take the cores from the ranks.
    """

    def __init__(self, task: Task) -> None:
        self.layers = task.layers
        self.noise = [noises(i, n)[comm.rank] for i, n in enumerate(task.layers)]
        n = task.layers[WATCHED]
        self.weights = [np.zeros(n, np.float32) for n in task.layers]
        self.w = self.weights[WATCHED]
        self.h = np.geomspace(1, 0.01, n, dtype=np.float32)
        self.mean_target = np.mean([target(rank) for rank in WORLD], dtype=np.float32)
        self.mean_noise = np.mean(noises(WATCHED, n), axis=0, dtype=np.float32)
        self.errors: list[float] = []

    def gradient(self, layer: int, step: int) -> Any:
        noise = self.noise[layer][step % 2]
        return self.h * (self.w - target(comm.rank)) + noise if layer == WATCHED else noise

    def forward(self, layer: int) -> None:
        """The stand-in has nothing to do."""

    def update(self, layer: int, mean: Any, step: int) -> None:
        if layer == WATCHED:
            exact = self.h * (self.w - self.mean_target) + self.mean_noise[step % 2]
            self.errors.append(float(np.linalg.norm(mean - exact) / np.linalg.norm(exact)))
            self.w -= np.float32(LEARNING_RATE) * mean

    def loss(self) -> float:
        away = self.w - self.mean_target
        return float(0.5 * np.dot(self.h * away, away) / away.size)


def target(rank: int) -> np.float32:
    return np.float32(1.0 + 0.5 * rank)


def noises(layer: int, n: int) -> list[Any]:
    """For each rank, a layer's noise in even and in odd steps: over both it is none."""
    found = []
    for rank in WORLD:
        noise = np.random.default_rng([layer, rank]).standard_normal(n, np.float32)
        found.append(np.float32(0.1) * np.stack([noise, -noise]))
    return found


def sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class Dense(Model):
    """The same with the real work of dense layers beside it."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        rng = np.random.default_rng(0)
        forms = [(max(1, n // 1024), min(n, 1024)) for n in task.layers]
        self.matrices = [w.reshape(form) for w, form in zip(self.weights, forms, strict=True)]
        self.x = [rng.standard_normal((task.batch, form[0]), np.float32) for form in forms]
        self.dy = [rng.standard_normal((task.batch, form[1]), np.float32) for form in forms]

    def forward(self, layer: int) -> None:
        self.x[layer] @ self.matrices[layer]

    def gradient(self, layer: int, step: int) -> Any:
        self.dy[layer] @ self.matrices[layer].T
        return (self.x[layer].T @ self.dy[layer]).reshape(-1)

    def update(self, layer: int, mean: Any, step: int) -> None:
        self.weights[layer] -= np.float32(LEARNING_RATE) * mean


def train(task: Task) -> None:
    model = Dense(task) if task.batch else Model(task)
    names = [f"layer{i}" for i in range(len(task.layers))]
    sync = mpiquant.GradientSynchronizer(
        dict(zip(names, model.weights, strict=True)),
        codec=task.codec,
        algorithm=task.algorithm,
        bucket_bytes=4 * max(task.layers),
        timeout=60,
    )
    layer_s = task.step_s / 3 / len(names)
    losses, sums, step = [], [], 0
    comm.Barrier()
    began = time.perf_counter()
    while True:
        now = time.perf_counter() - began
        if step % 8 == 0 and comm.bcast(now > task.run_s):
            break
        if now <= task.late_s:
            for bucket in sync.buckets:
                bucket.turns = bucket.turns[-1:]
        for i, name in enumerate(names):
            mean = sync.wait(name)
            begin = time.perf_counter()
            if mean is not None:
                if task.check:
                    sums.append(zlib.crc32(mean))
                model.update(i, mean, step - 1)
            model.forward(i)
            sleep_until(begin + layer_s)
        losses.append((now, model.loss()))
        for i, name in reversed(list(enumerate(names))):
            begin = time.perf_counter()
            gradient = model.gradient(i, step)
            sleep_until(begin + 2 * layer_s)
            sync.ready(name, gradient)
        step += 1
    sync.wait_all()
    ended = time.perf_counter()
    report = sync.report()
    same = len(set(comm.allgather(tuple(sums)))) == 1
    turns = [
        [
            (t.ready, t.need, t.done, t.wait_s, t.stats.partial_bits, t.stats.final_bits)
            for t in bucket.turns
        ]
        for bucket in sync.buckets
    ]
    everybody = comm.gather(turns)
    if comm.rank == 0:
        print(report, file=sys.stderr)
    point(
        steps=step,
        step_ms=1e3 * (ended - began) / step,
        median_step_ms=1e3 * report.step_s,
        wire_wait_ms=1e3 * report.wire_wait_s,
        peer_wait_ms=1e3 * report.peer_wait_s,
        rows=[asdict(row) for row in report.buckets],
        errors=model.errors[-100:],
        losses=losses,
        identical=same,
        turns=everybody,
    )


# ---- calls with a budget ----


@dataclass(frozen=True)
class Calls:
    """Allreduces, one after the other, each with a budget.

    Attributes
    ----------
    count : int
        Values.
    budget_s : float
    calls : int
    marker : str
        A file that rank 0 makes when the call of number `mark_at` begins.
    mark_at : int
    in_parts : bool
        Whether messages are sent in parts.
    """

    count: int
    budget_s: float
    calls: int
    marker: str = ""
    mark_at: int = -1
    in_parts: bool = True
    codec: str = "aqat"


def calls(task: Calls) -> None:
    if not task.in_parts:
        links.Links.part_nbytes = lambda self, bandwidth: math.inf  # type: ignore[method-assign]
    log = PartLog()
    every = (np.random.default_rng(r).standard_normal(task.count, np.float32) for r in WORLD)
    inputs = list(every)
    x = inputs[comm.rank]
    right = np.sum(inputs, axis=0, dtype=np.float64)  # no sum of the measured wire
    out = np.empty_like(x)
    feedback = mpiquant.ErrorFeedback()
    total = np.zeros(task.count)
    found = []
    cpu_s = 0.0
    for k in range(task.calls):
        comm.Barrier()
        if k == task.mark_at and comm.rank == 0:
            Path(task.marker).touch()
        log.clear()
        begin, cpu = time.perf_counter(), time.process_time()
        _, stats = mpiquant.allreduce(
            x,
            out=out,
            algorithm="ring",
            codec=task.codec,
            budget_s=task.budget_s,
            feedback=feedback,
            name="x",
            timeout=60,
            stats=True,
        )
        taken = comm.allreduce(time.perf_counter() - begin, MPI.MAX)
        cpu_s += time.process_time() - cpu
        bits = comm.allreduce(np.array([stats.partial_bits or 32, stats.final_bits or 32]))
        total += out
        found.append(
            {
                "taken_s": taken,
                "bits": list(bits / comm.size),
                "cut": comm.allreduce(stats.cut_messages),
                "late_parts": comm.allreduce(log.late_parts(), MPI.MAX),
                "controller_s": comm.allreduce(log.seconds) / comm.size,
                "header_bytes": stats.header_bytes,
                "wire_bytes": stats.wire_bytes,
            }
        )
    rest = feedback.residual("x")
    part = slice(None, None, 97)  # of a slow wire
    kept = comm.allreduce(np.zeros_like(right[part]) if rest is None else rest[part].astype(float))
    lost = float(np.abs(total[part] + kept - task.calls * right[part]).max())
    same = len(set(comm.allgather(zlib.crc32(out)))) == 1
    cpu_s = comm.allreduce(cpu_s) / comm.size / task.calls
    point(calls=found, identical=same, lost=lost, cpu_s=cpu_s)


class PartLog:
    """Notes parts of partial sums that came after their message's time, and the controller's time.

    It wraps methods of the runner, for measuring only.
    """

    def __init__(self) -> None:
        self.under_way: dict[Any, list[tuple[int, float]]] = {}
        self.late: dict[tuple[int, int], int] = {}  # by peer and number of the message
        self.seconds = self.watch_s = 0.0
        self.timing = False
        self._calibrate()
        self._wrap_parts()
        for owner, names in (
            (adaptive.AdaptiveExecution, ("choose", "account", "_verdict")),
            (adaptive._Outgoing, ("_is_late",)),
            (links.Links, ("arrived", "finish")),
        ):
            for name in names:
                self._time(owner, name)

    def clear(self) -> None:
        self.late.clear()
        self.seconds = 0.0

    def late_parts(self) -> int:
        """Most parts of one message that came after its time."""
        return max(self.late.values(), default=0)

    def _wrap_parts(self) -> None:
        isend, acknowledged = adaptive._Outgoing._isend, links.Links.acknowledged

        def noting_isend(message: Any, payload: Any, flags: int) -> None:
            counts = not message.message.final and payload.nbytes > 0
            until = message.until if counts else math.inf
            link = message.key, message.message.peer
            self.under_way.setdefault(link, []).append((message.number, until))
            isend(message, payload, flags)

        def noting(self_: Any, peer: int, key: Any, now: float, *measured: Any) -> None:
            number, until = self.under_way[key, peer].pop(0)
            if now > until:
                self.late[peer, number] = self.late.get((peer, number), 0) + 1
            acknowledged(self_, peer, key, now, *measured)

        adaptive._Outgoing._isend = noting_isend  # type: ignore[method-assign]
        links.Links.acknowledged = noting  # type: ignore[method-assign]

    def _time(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        setattr(owner, name, self._timed(method))

    def _timed(self, method: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self.timing:  # a part of what is timed already
                return method(*arguments, **options)
            self.timing, begin = True, time.thread_time()
            result = method(*arguments, **options)
            self.seconds += time.thread_time() - begin - self.watch_s
            self.timing = False
            return result

        return timed

    def _calibrate(self) -> None:
        """Find out what it takes to look at the clock, which is no part of control."""
        nothing = self._timed(lambda: None)
        nothing()
        self.seconds = 0.0
        for _ in range(1000):
            nothing()
        self.watch_s, self.seconds = self.seconds / 1000, 0.0


# ---- a rank that dies ----


def survive(steps: int, lost: int, lost_at: int) -> None:
    """Train; one rank dies in the middle of a step, and the others go on."""
    rank, ranks = comm.rank, comm
    params = {f"layer{i}": np.zeros(200_000, np.float32) for i in range(6)}
    sgd = mpiquant.SGD(params, 0.1)
    optimizer = mpiquant.DistributedOptimizer(sgd, timeout=30, bucket_bytes=1)
    rng, step, begins, lost_s = np.random.default_rng(rank), 0, [], 0.0
    while step < steps:
        begins.append(time.perf_counter())
        try:
            for name in params:
                optimizer.wait(name)
                time.sleep(0.002)
            for i, name in enumerate(reversed(params)):
                time.sleep(0.004)
                if (rank, step, i) == (lost, lost_at, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                noise = rng.standard_normal(200_000, np.float32)
                optimizer.ready(name, params[name] - 1 + np.float32(0.01) * noise)
            step += 1
        except mpiquant.RankLostError:
            ranks = optimizer.shrink()
            step = ranks.allreduce(step, MPI.MAX)
            lost_s = time.perf_counter() - begins.pop()
    optimizer.step()
    alike = not mpiquant.differing_parameters(params, comm=ranks)
    right = all(abs(float(p.mean()) - 1) < 0.01 for p in params.values())
    lost_s = ranks.allreduce(lost_s, MPI.MAX)
    if ranks.rank == 0:
        step_s = float(np.median(np.diff(begins)))
        figures = {"ranks": ranks.size, "alike": alike, "right": right, "steps": step}
        print(json.dumps({**figures, "lost_s": lost_s, "step_s": step_s}), flush=True)


if __name__ == "__main__":
    what, options = sys.argv[1], json.loads(sys.argv[2])
    if what == "train":
        train(Task(**options))
    elif what == "calls":
        calls(Calls(**options))
    else:
        survive(**options)
