"""Optimizers for NumPy parameters, and one that trains with the mean over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpiquant.gradients.parameters import average_parameters, broadcast_parameters
from mpiquant.gradients.report import Report
from mpiquant.gradients.synchronizer import GradientSynchronizer
from mpiquant.typing import Array


class Optimizer(Protocol):
    """Updates parameters in place, one at a time."""

    parameters: dict[str, Array]

    def update(self, name: str, gradient: Array) -> None:
        """Update one parameter; once in each step."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""


class SGD:
    """Stochastic gradient descent.

    Parameters
    ----------
    parameters : mapping of str to array
        Updated in place.
    rate : float
        Learning rate; an attribute that may be changed between steps.
    momentum : float
    nesterov : bool
        Nesterov's momentum.
    weight_decay : float
        This share of a parameter is added to its gradient.

    Notes
    -----
    With momentum m the velocity is v = m v + g, and a parameter loses rate * v, or
    rate * (g + m v) with Nesterov's.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        rate: float,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum")
        self.parameters = dict(parameters)
        self.rate, self.momentum = rate, momentum
        self.nesterov, self.weight_decay = nesterov, weight_decay
        self._velocity: dict[str, Array] = {}

    def update(self, name: str, gradient: Array) -> None:
        """Update one parameter by its gradient."""
        parameter = self.parameters[name]
        if self.weight_decay:
            gradient = gradient + self.weight_decay * parameter
        if self.momentum:
            velocity = self._velocity.setdefault(name, np.zeros_like(parameter))
            velocity *= self.momentum
            velocity += gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        parameter -= self.rate * gradient

    def state_dict(self) -> dict[str, Any]:
        """Velocities by name."""
        return {"velocity": {name: v.copy() for name, v in self._velocity.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self._velocity = {name: np.array(v) for name, v in state["velocity"].items()}


class Adam:
    """Adam (Kingma and Ba, 2015), with decoupled weight decay (Loshchilov and Hutter, 2019).

    Parameters
    ----------
    parameters : mapping of str to array
        Updated in place.
    rate : float
        Learning rate; an attribute that may be changed between steps.
    betas : tuple of float
        Decay of the means of gradients and of their squares.
    epsilon : float
    weight_decay : float
        Each step takes rate * weight_decay of a parameter away.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        rate: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = dict(parameters)
        self.rate, self.betas = rate, betas
        self.epsilon, self.weight_decay = epsilon, weight_decay
        self._mean: dict[str, Array] = {}
        self._square: dict[str, Array] = {}
        self._steps: dict[str, int] = {}

    def update(self, name: str, gradient: Array) -> None:
        """Update one parameter by its gradient."""
        parameter = self.parameters[name]
        mean = self._mean.setdefault(name, np.zeros_like(parameter))
        square = self._square.setdefault(name, np.zeros_like(parameter))
        step = self._steps[name] = self._steps.get(name, 0) + 1
        first, second = self.betas
        mean += (1 - first) * (gradient - mean)
        square += (1 - second) * (gradient * gradient - square)
        if self.weight_decay:
            parameter *= 1 - self.rate * self.weight_decay
        scale = self.rate / (1 - first**step)
        parameter -= scale * mean / (np.sqrt(square / (1 - second**step)) + self.epsilon)

    def state_dict(self) -> dict[str, Any]:
        """Means, squares and numbers of steps by name."""
        return {
            "mean": {name: m.copy() for name, m in self._mean.items()},
            "square": {name: s.copy() for name, s in self._square.items()},
            "steps": dict(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self._mean = {name: np.array(m) for name, m in state["mean"].items()}
        self._square = {name: np.array(s) for name, s in state["square"].items()}
        self._steps = dict(state["steps"])


class DistributedOptimizer:
    """An optimizer that updates each parameter when it is needed, by the mean over all ranks.

    Parameters
    ----------
    optimizer : Optimizer
        With the parameters in the order of the forward pass.
    resync_every : int, optional
        After so many updates a parameter becomes the exact mean over all ranks, which otherwise
        drift apart with an algorithm whose results are not alike, "cerar".  Updates must then come
        in the same order on all ranks.
    **options
        Of `GradientSynchronizer`.

    Attributes
    ----------
    optimizer : Optimizer
    synchronizer : GradientSynchronizer

    Examples
    --------
    >>> optimizer = DistributedOptimizer(SGD(params, rate=0.1, momentum=0.9))
    >>> for batch in batches:
    ...     for layer in layers:
    ...         optimizer.wait(layer.name)  # updates it
    ...         layer.forward()
    ...     for layer in reversed(layers):
    ...         optimizer.ready(layer.name, layer.backward())
    >>> optimizer.step()  # what the last backward pass left
    """

    def __init__(
        self, optimizer: Optimizer, *, resync_every: int | None = None, **options: Any
    ) -> None:
        self.optimizer = optimizer
        self.synchronizer = GradientSynchronizer(optimizer.parameters, **options)
        if resync_every is not None and resync_every < 1:
            raise ValueError(f"resync_every is {resync_every}, expected 1 or more")
        self.resync_every = resync_every
        self._due: set[str] = set()
        self._updates = dict.fromkeys(optimizer.parameters, 0)  # since the last exact mean

    def ready(self, name: str, gradient: Array | None = None) -> None:
        """Hand in a gradient, as `GradientSynchronizer.ready`."""
        self.synchronizer.ready(name, gradient)
        self._due.update(self.synchronizer.gradients)

    def wait(self, name: str) -> None:
        """Update a parameter by the sum of its gradients, if that was not done yet."""
        gradient = self.synchronizer.wait(name)
        if name in self._due and gradient is not None:
            self._due.remove(name)
            self.optimizer.update(name, gradient)
            self._resync(name)

    def _resync(self, name: str) -> None:
        self._updates[name] += 1
        if self._updates[name] == self.resync_every:
            self._updates[name] = 0
            average_parameters({name: self.optimizer.parameters[name]}, comm=self.synchronizer.comm)

    def step(self) -> None:
        """Update all parameters that were not updated yet."""
        for name in self.synchronizer.gradients:
            self.wait(name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate, as `GradientSynchronizer.no_sync`."""
        due = set(self._due)
        with self.synchronizer.no_sync():
            yield
        self._due = due

    def shrink(self) -> MPI.Intracomm:
        """Go on with the ranks that are left, after a `RankLostError`, from the state of one.

        Collective over those ranks; see `GradientSynchronizer.shrink`.  The step that was
        interrupted is lost: all ranks get the parameters and the state of the first one.
        """
        comm = self.synchronizer.shrink()
        broadcast_parameters(self.optimizer.parameters, comm=comm)
        self.optimizer.load_state_dict(comm.bcast(self.optimizer.state_dict()))
        self._updates = comm.bcast(self._updates)
        self._due.clear()
        return comm

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, and of the synchronizer on this rank."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "synchronizer": self.synchronizer.state_dict(),
            "updates": dict(self._updates),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.synchronizer.load_state_dict(state["synchronizer"])
        self._updates.update(state.get("updates", {}))

    def report(self) -> Report:
        """As `GradientSynchronizer.report`."""
        return self.synchronizer.report()
