"""Communication less often, or later: local steps with periodic averages, and delayed averages."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from mpiquant import api, config
from mpiquant.feedback import ErrorFeedback
from mpiquant.gradients.optimizer import Optimizer
from mpiquant.gradients.parameters import average_parameters
from mpiquant.request import Request
from mpiquant.typing import Array, CodecLike, CommLike


class LocalSGD:
    """Each rank trains by itself; after every few steps parameters become their mean.

    Parameters
    ----------
    optimizer : Optimizer
        Its parameters must be alike on all ranks in the beginning.
    every : int
        Steps from one mean to the next.
    comm : MPI.Intracomm, optional
        COMM_WORLD by default.
    codec, algorithm
        As for `allreduce`, for what the parameters have changed by since the last mean; exact by
        default.  What a codec loses is added to the next mean (see `ErrorFeedback`).
    state : {"average", "keep"}
        Whether what the optimizer has gathered (velocities, moments) becomes its exact mean, too,
        or stays each rank's own.  The mean doubles the traffic of SGD with momentum, and makes
        replicas alike in all that the next step depends on.
    timeout : float, optional
        Seconds that a mean may take.

    Notes
    -----
    With every=1, SGD with or without momentum and no codec, this is training with the mean of all
    gradients, up to rounding.  Source: Stich 2019; the mean of momenta: Yu, Jin and Yang 2019.

    Examples
    --------
    >>> local = LocalSGD(SGD(params, rate=0.1, momentum=0.9), every=8)
    >>> for batch in batches:
    ...     local.step(gradients(params, batch))
    >>> local.average()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int,
        *,
        comm: CommLike | None = None,
        codec: CodecLike = "exact",
        algorithm: str = "auto",
        state: Literal["average", "keep"] = "average",
        timeout: float | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}, expected 1 or more")
        if state not in ("average", "keep"):
            raise ValueError(f"state is {state!r}, expected 'average' or 'keep'")
        self.optimizer, self.every, self.state = optimizer, every, state
        self._comm, self._timeout = comm, timeout
        self._options: dict[str, Any] = {"codec": codec, "algorithm": algorithm}
        self._feedback = ErrorFeedback()
        self._steps = 0  # since the last mean
        self._anchor = _copies(optimizer.parameters)

    def step(self, gradients: Mapping[str, Array]) -> bool:
        """Update by this rank's gradients; True if all ranks averaged then."""
        for name in self.optimizer.parameters:
            self.optimizer.update(name, gradients[name])
        self._steps += 1
        if self._steps < self.every:
            return False
        self.average()
        return True

    def average(self) -> None:
        """Make parameters their mean now; collective over comm."""
        self._steps = 0
        parameters = self.optimizer.parameters
        changes = {name: p - self._anchor[name] for name, p in parameters.items()}
        means = api.allreduce(
            changes,
            "mean",
            comm=self._comm,
            feedback=self._feedback,
            timeout=self._timeout,
            **self._options,
        )
        for name, parameter in parameters.items():
            self._anchor[name] += means[name]
            parameter[...] = self._anchor[name]
        if self.state == "average":
            self._average_state()

    def _average_state(self) -> None:
        state = self.optimizer.state_dict()
        arrays = dict(_float_arrays(state))
        if arrays:
            average_parameters(arrays, comm=self._comm, timeout=self._timeout)
            self.optimizer.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of this rank that the next steps depend on, but for the parameters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "anchor": _copies(self._anchor),
            "residuals": self._feedback.state_dict(),
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._anchor = _copies(state["anchor"])
        self._feedback.load_state_dict(state["residuals"])
        self._steps = state["steps"]


class DelayedAverage:
    """Trains with means of gradients that are some steps old, which had that long to come.

    Parameters
    ----------
    optimizer : Optimizer
        Its parameters must be alike on all ranks in the beginning, and stay so.
    staleness : int
        How many steps old; all of them the same, so that staleness is bounded, and replicas are
        alike bit for bit.
    comm : MPI.Intracomm, optional
        COMM_WORLD by default.
    codec, algorithm
        As for `allreduce`; exact by default.  What a codec loses is added to the gradients of the
        first step behind the arrival (see `ErrorFeedback`).
    timeout : float, optional
        Seconds that a wait may take.
    progress : {"thread", "manual"}
        Who moves means on while gradients are computed; with "manual" they come in `step` only.

    Notes
    -----
    The optimizer sees each mean once, in order, so momentum is that of the undelayed training; but
    delay acts like more of it, and large rates with much momentum may need less of either
    (Mitliagkas et al. 2016).  The first `staleness` steps change nothing, and `finish` makes up for
    them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        staleness: int = 1,
        *,
        comm: CommLike | None = None,
        codec: CodecLike = "exact",
        algorithm: str = "auto",
        timeout: float | None = None,
        progress: Literal["thread", "manual"] = "thread",
    ) -> None:
        if staleness < 0:
            raise ValueError(f"staleness is {staleness}, expected 0 or more")
        self.optimizer, self.staleness = optimizer, staleness
        given = {"comm": comm, "codec": codec, "algorithm": algorithm, "timeout": timeout}
        self._options: dict[str, Any] = given
        self._progress = progress
        # Calls that are under way at once must not share residuals.
        self._feedbacks = deque(ErrorFeedback() for _ in range(staleness + 1))
        self._under_way: deque[Request] = deque()

    def step(self, gradients: Mapping[str, Array]) -> bool:
        """Send this step's gradients, and update by older ones; False if there are none yet.

        The gradients are copied: they may be changed at once.
        """
        sent = {name: np.array(gradients[name]) for name in self.optimizer.parameters}
        with config.options(progress=self._progress):
            request = api.iallreduce(sent, "mean", feedback=self._feedbacks[0], **self._options)
        self._feedbacks.rotate(-1)
        self._under_way.append(request)
        if len(self._under_way) <= self.staleness:
            return False
        self._update()
        return True

    def _update(self) -> None:
        for name, mean in self._under_way.popleft().wait().items():
            self.optimizer.update(name, mean)

    def finish(self) -> None:
        """Update by all gradients that are still under way."""
        while self._under_way:
            self._update()

    def state_dict(self) -> dict[str, Any]:
        """Copies of all of this rank that the next steps depend on, but for the parameters.

        Raises
        ------
        ValueError
            While gradients are under way: call `finish` first.
        """
        if self._under_way:
            raise ValueError(f"{len(self._under_way)} steps are under way: finish() first")
        return {
            "optimizer": self.optimizer.state_dict(),
            "residuals": [feedback.state_dict() for feedback in self._feedbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        for feedback, residuals in zip(self._feedbacks, state["residuals"], strict=True):
            feedback.load_state_dict(residuals)


def _copies(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in arrays.items()}


def _float_arrays(state: Any, name: str = "") -> Any:
    """Arrays of floats in nested dicts, with the keys that lead to them; in one order."""
    if isinstance(state, Mapping):
        for key in sorted(state):
            yield from _float_arrays(state[key], f"{name}/{key}")
    elif isinstance(state, np.ndarray) and state.dtype.kind == "f":
        yield name, state
