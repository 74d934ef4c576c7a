"""Train a convolutional network whose gradients are sent while others are computed.

    mpiexec -n 4 python -m mpi4py docs/examples/train_overlap.py

The backward pass hands in each gradient as it makes it, and the next forward pass waits for each
parameter just before it uses it. With the codec "aqat" the gradients take as many bits as the
network moves in the time between. Every few steps a checkpoint is written: run the same command
again to go on from it.

Under `mpiexec --with-ft ulfm --mca async_mpi_finalize 1` of Open MPI 5 the training also goes on
when a rank dies, with those that are left. Elsewhere the launcher ends the job, and the checkpoint
is the way to go on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pickle
import sys
import time
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # read when NumPy is imported, so before that

import digits
import numpy as np
from mpi4py import MPI
from networks import ConvNet, cross_entropy

import mpiquant

BATCH = 32
CHECKPOINT_EVERY = 20


class Training:
    """A network, its data and its optimizer on one rank."""

    def __init__(self, data: digits.Digits, args: argparse.Namespace, comm: MPI.Intracomm) -> None:
        self.data, self.args, self.comm = data, args, comm
        self.net = ConvNet(data.side, channels=(args.width, 2 * args.width))
        self.params = self.net.init(np.random.default_rng(comm.rank))
        mpiquant.broadcast_parameters(self.params, comm=comm)  # all begin as rank 0
        sgd = mpiquant.SGD(self.params, args.rate, momentum=0.9)
        self.optimizer = mpiquant.DistributedOptimizer(
            sgd, codec=args.codec, algorithm="ring", comm=comm, timeout=60
        )
        self.step = 0

    def run_step(self) -> float:
        """One batch of this rank's own; its loss."""
        rng = np.random.default_rng([self.step, self.comm.rank])
        batch = rng.integers(0, len(self.data.x_train), BATCH)
        with mpiquant.mark("forward"):
            activations = self.net.forward(
                self.params, self.data.x_train[batch], self.optimizer.wait
            )
        loss, d_logits = cross_entropy(activations[-1], self.data.y_train[batch], BATCH)
        with mpiquant.mark("backward"):
            for name, gradient in self.net.backward(self.params, activations, d_logits):
                self.optimizer.ready(name, gradient)
        self.step += 1
        return loss

    def run(self) -> list[float]:
        """All steps, with the ranks that there are."""
        losses = []
        while self.step < self.args.steps:
            try:
                losses.append(self.run_step())
                if self.step % CHECKPOINT_EVERY == 0:
                    self.optimizer.step()  # a checkpoint holds no half step
                    self.save()
            except mpiquant.RankLostError as error:
                begin = time.perf_counter()
                self.comm = self.optimizer.shrink()
                self.step = self.comm.allreduce(self.step, MPI.MAX)
                lost_s = time.perf_counter() - begin
                if self.comm.rank == 0:
                    print(f"{error}; going on with {self.comm.size} ranks after {lost_s:.2f} s")
        self.optimizer.step()
        return losses

    # ---- checkpoints ----

    def file(self) -> Path:
        """Each rank has residuals of its own, and so a file of its own."""
        return Path(f"{self.args.checkpoint}.rank{self.comm.rank}")

    def save(self) -> None:
        """Write a checkpoint; a broken one never takes the place of a whole one."""
        if self.args.checkpoint:
            state = {
                "step": self.step,
                "params": self.params,
                "optimizer": self.optimizer.state_dict(),
            }
            partial = self.file().with_suffix(".tmp")
            partial.write_bytes(pickle.dumps(state))
            partial.rename(self.file())

    def load(self) -> None:
        """Go on from the checkpoint, if all ranks have one of the same step."""
        state = None
        if self.args.checkpoint and self.file().exists():
            state = pickle.loads(self.file().read_bytes())
        steps = set(self.comm.allgather(None if state is None else state["step"]))
        if state is None or len(steps) > 1:
            return
        self.step = state["step"]
        for name, parameter in self.params.items():
            parameter[...] = state["params"][name]
        self.optimizer.load_state_dict(state["optimizer"])


def main() -> int:
    """Train and report; 1 if the ranks have drifted apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--codec", default="aqat", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate")
    parser.add_argument("--data", choices=list(digits.SOURCES), default="mnist")
    parser.add_argument("--checkpoint", default="", metavar="FILE", help="default: none")
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    with contextlib.redirect_stdout(io.StringIO() if comm.rank else sys.stdout):
        try:
            data = digits.load(args.data)
        except FileNotFoundError as error:
            parser.error(str(error))
        training = Training(data, args, comm)
        training.load()
        begin, first = time.perf_counter(), training.step
        losses = training.run()
        step_ms = 1e3 * (time.perf_counter() - begin) / max(1, args.steps - first)
        report = training.optimizer.report()
        different = mpiquant.differing_parameters(training.params, comm=training.comm)
        guesses = training.net.predict(training.params, training.data.x_test)
        correct = float(np.mean(100.0 * (guesses == training.data.y_test)))
        if losses:
            print(f"loss {losses[0]:.3f} to {np.mean(losses[-10:]):.3f}, {step_ms:.1f} ms per step")
        print(f"{correct:.1f} % of the test images are right")
        print(f"parameters are {'NOT ' if different else ''}the same on all ranks")
        print(report)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
