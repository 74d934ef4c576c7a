"""A parameter server with bounded staleness: ranks that do not wait for each other, up to a limit.

A baseline to compare with, not a way to train faster: the traffic of all workers is on the server's
link, and what they add to is older than what they think.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

import numpy as np
from mpi4py import MPI

from mpiquant._comm import checked_comm
from mpiquant.codecs import WithoutFormat, resolve
from mpiquant.errors import CallTimeoutError
from mpiquant.gradients._meeting import meet
from mpiquant.gradients.optimizer import Optimizer
from mpiquant.typing import Array, Bytes, CodecLike, CommLike

GRADIENT, PARAMETERS, DONE = 1, 2, 3
"""Tags."""

NAP_S = 50e-6
"""How long to rest between looks at an empty mailbox: workers need the cores."""


class ParameterServer:
    """Rank 0 keeps the parameters, all others send gradients and get parameters back.

    Parameters
    ----------
    optimizer : Optimizer
        With the parameters, alike on all ranks and of one floating-point dtype.  Rank 0 updates
        them, once for each gradient that comes, with the state that it gathers.
    staleness : int
        How many steps a worker may be ahead of the slowest one; 0: all wait for each other.
    comm : MPI.Intracomm, optional
        COMM_WORLD by default; of two ranks or more.
    codec : str or Codec, optional
        Of the gradients; exact by default.  What it loses is added to the worker's next gradient.
        Parameters come back as they are.
    timeout : float, optional
        Seconds that a rank waits for another one.

    Notes
    -----
    A worker adds its gradient to parameters that other workers have changed meanwhile, at most
    `staleness` steps of each.  Each gradient is divided by the number of workers, so that one of
    each makes a mean.  Source: Ho et al. 2013 (stale synchronous parallel).

    Examples
    --------
    >>> server = ParameterServer(SGD(params, rate=0.1), staleness=2)
    >>> if comm.rank == 0:
    ...     server.serve()
    ... else:
    ...     for batch in batches:
    ...         server.step(gradients(params, batch))
    >>> server.finish()  # all ranks: now they have the same parameters
    """

    def __init__(
        self,
        optimizer: Optimizer,
        staleness: int = 0,
        *,
        comm: CommLike | None = None,
        codec: CodecLike = "exact",
        timeout: float | None = None,
    ) -> None:
        problem: Exception | None = None
        parameters = optimizer.parameters
        dtypes = {p.dtype for p in parameters.values()}
        if staleness < 0:
            problem = ValueError(f"staleness is {staleness}, expected 0 or more")
        elif checked_comm(comm).size < 2:
            problem = ValueError("a parameter server needs two ranks or more")
        elif len(dtypes) != 1 or next(iter(dtypes)) not in (np.float32, np.float64):
            problem = TypeError("parameters are of one dtype, float32 or float64")
        self._channel = meet(comm, "parameter server", problem, timeout)
        self._comm = self._channel.native
        self.optimizer, self.staleness, self._timeout = optimizer, staleness, timeout
        (self._dtype,) = dtypes
        self._count = sum(p.size for p in parameters.values())
        self._codec = resolve(codec, "parameters", (self._count,))
        if isinstance(self._codec, WithoutFormat):
            raise ValueError(f"a parameter server takes no {self._codec.spec!r}")
        self._rest = np.zeros(self._count, self._dtype)
        self._steps = 0

    # ---- workers ----

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Send this rank's gradients; the parameters are those of the server behind that."""
        self._rest += np.concatenate(
            [gradients[name].reshape(-1) for name in self.optimizer.parameters]
        )
        wire = self._wire()
        self._codec.encode(self._rest, wire, residual=self._rest, stream=self._steps)
        self._steps += 1
        self._wait(self._comm.Isend(wire, 0, GRADIENT), 0)
        self._receive_parameters()

    def _receive_parameters(self) -> None:
        flat = np.empty(self._count, self._dtype)
        self._wait(self._comm.Irecv(flat, 0, PARAMETERS), 0)
        for name, part in self._parts(flat):
            self.optimizer.parameters[name][...] = part

    # ---- the server ----

    def serve(self) -> list[int]:
        """Serve until all workers have called `finish`; the steps of each rank."""
        workers = self._comm.size - 1
        steps, open_ = [0] * self._comm.size, set(range(1, workers + 1))
        waiting: set[int] = set()  # workers that are too far ahead
        status = MPI.Status()
        while open_:
            self._wait_for_any(status)
            peer = status.Get_source()
            if status.Get_tag() == DONE:
                self._comm.Recv(bytearray(1), peer, DONE)
                open_.remove(peer)
            else:
                self._take_gradient(peer, workers)
                steps[peer] += 1
                waiting.add(peer)
            furthest = min((steps[p] for p in open_), default=math.inf) + self.staleness
            for ready in [p for p in waiting if steps[p] <= furthest]:
                waiting.remove(ready)
                self._wait(self._comm.Isend(self._flat(), ready, PARAMETERS), ready)
        return steps

    def _take_gradient(self, peer: int, workers: int) -> None:
        wire, gradient = self._wire(), np.empty(self._count, self._dtype)
        self._comm.Recv(wire, peer, GRADIENT)
        self._codec.decode(wire, gradient)
        gradient /= workers
        for name, part in self._parts(gradient):
            self.optimizer.update(name, part)

    # ---- both ----

    def finish(self) -> None:
        """Tell the server that no more gradients come; all ranks then have its parameters."""
        if self._comm.rank:
            self._wait(self._comm.Isend(bytearray(1), 0, DONE), 0)
            self._receive_parameters()
            return
        for peer in range(1, self._comm.size):
            self._wait(self._comm.Isend(self._flat(), peer, PARAMETERS), peer)

    def _parts(self, flat: Array) -> Iterator[tuple[str, Array]]:
        """Each parameter's part of a flat array, by name."""
        begin = 0
        for name, parameter in self.optimizer.parameters.items():
            yield name, flat[begin : begin + parameter.size].reshape(parameter.shape)
            begin += parameter.size

    def _flat(self) -> Array:
        return np.concatenate([p.reshape(-1) for p in self.optimizer.parameters.values()])

    def _wire(self) -> Bytes:
        return np.empty(self._codec.nbytes(self._count, self._dtype), np.uint8)

    def _wait(self, request: MPI.Request, peer: int) -> None:
        deadline = self._deadline()
        while not request.Test():
            self._rest_until(deadline, f"rank {peer}")

    def _wait_for_any(self, status: MPI.Status) -> None:
        deadline = self._deadline()
        while not self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            self._rest_until(deadline, "any worker")

    def _deadline(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _rest_until(self, deadline: float | None, whom: str) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise CallTimeoutError(
                f"parameter server, rank {self._comm.rank}: waited {self._timeout} s for {whom}"
            )
        time.sleep(NAP_S)
