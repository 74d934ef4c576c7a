"""PyTorch on CPU tensors: an optimizer whose gradients are means over all ranks, and a DDP hook.

    import mpiquant.torch

Needs PyTorch, and for bfloat16 gradients ml_dtypes: `pip install 'mpiquant[torch]'`.  Tensors are
seen as NumPy arrays in place; a gradient is copied once, into its bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed

import mpiquant
from mpiquant import config
from mpiquant.feedback import ErrorFeedback
from mpiquant.gradients import GradientSynchronizer, Report
from mpiquant.gradients import broadcast_parameters as _broadcast
from mpiquant.typing import Array, CodecLike, CommLike


def as_array(tensor: torch.Tensor) -> Array:
    """A CPU tensor's memory as an array; bfloat16 as ml_dtypes' type."""
    if not tensor.is_cpu:
        raise TypeError(f"a tensor is on {tensor.device}, expected the CPU")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is not torch.bfloat16:
        return np.asarray(tensor.numpy())
    import ml_dtypes

    return np.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))


def as_tensor(array: Array) -> torch.Tensor:
    """An array's memory as a tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# ---- replicas ----


def broadcast_parameters(
    module: torch.nn.Module | Mapping[str, torch.Tensor], root: int = 0, **options: Any
) -> None:
    """Give all ranks the parameters and buffers of one of them, in place; collective over comm.

    Parameters
    ----------
    module : Module, or mapping of str to tensor
    root : int
    **options
        comm and timeout, as for `mpiquant.broadcast_parameters`.
    """
    tensors = module.state_dict() if isinstance(module, torch.nn.Module) else module
    _broadcast({name: as_array(tensor) for name, tensor in tensors.items()}, root, **options)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: int = 0, *, comm: CommLike | None = None
) -> None:
    """Give all ranks the state and the hyperparameters of one of them; collective over comm."""
    from mpiquant._comm import checked_comm

    optimizer.load_state_dict(checked_comm(comm).bcast(optimizer.state_dict(), root))


# ---- training ----


class DistributedOptimizer:
    """A PyTorch optimizer that steps by the mean of all ranks' gradients.

    The backward pass hands in each gradient as soon as it is accumulated; a bucket that is full is
    sent while others are computed.  `step` waits for all of them.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Learning-rate schedulers take this one.
    named_parameters : iterable of (str, Parameter), optional
        As a module's, in the order of its forward pass; by default those of the optimizer, by
        number.
    **options
        Of `GradientSynchronizer`: comm, codec ("aqat" by default), algorithm, bucket_bytes,
        missing, feedback, timeout, progress ...

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    synchronizer : GradientSynchronizer

    Notes
    -----
    Parameters must be alike on all ranks in the beginning (`broadcast_parameters`); they stay so,
    bit for bit.  A parameter without gradient is an error on all ranks, or counts as zeros with
    missing="zeros".  Behind `synchronize` or `step`, a parameter's `grad` is the mean, in memory
    of its bucket; before that, from the backward pass on, it is None.

    Examples
    --------
    >>> mpiquant.torch.broadcast_parameters(model)
    >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = mpiquant.torch.DistributedOptimizer(sgd, model.named_parameters(), codec="q4")
    >>> for x, y in batches:
    ...     optimizer.zero_grad()
    ...     loss(model(x), y).backward()
    ...     optimizer.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        **options: Any,
    ) -> None:
        self.optimizer = optimizer
        self._parameters = _named(optimizer, named_parameters)
        arrays = {name: as_array(p) for name, p in self._parameters.items()}
        self.synchronizer = GradientSynchronizer(arrays, **options)
        self._quiet = False
        self._means: dict[str, tuple[Array, torch.Tensor]] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(name))
            for name, p in self._parameters.items()
        ]

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if self._quiet:
                return
            gradient = parameter.grad
            assert gradient is not None
            # Whoever zeroes gradients in place accumulates in the memory of the bucket.
            if gradient is self._mean(name):
                self.synchronizer.ready(name)
                return
            self.synchronizer.ready(name, as_array(gradient))
            # The next gradient is made where this one was, which is in the cache.
            parameter.grad = None

        return ready

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for all means and update the parameters; collective over comm.

        Raises
        ------
        ValueError
            If gradients are missing, naming them; on other ranks AgreementError, naming the rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        self.optimizer.step()
        return loss

    def synchronize(self) -> None:
        """Wait for all means, which then are the parameters' `grad`; collective over comm.

        For what comes between them and the step, as clipping; raises what `step` does.
        """
        for name, parameter in self._parameters.items():
            if self.synchronizer.wait(name) is not None:
                parameter.grad = self._mean(name)

    def _mean(self, name: str) -> torch.Tensor:
        """A parameter's part of its bucket, as a tensor."""
        array = self.synchronizer.gradients[name]
        known = self._means.get(name)
        if known is None or known[0] is not array:  # buckets may have been made anew
            known = self._means[name] = array, as_tensor(array)
        return known[1]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in this block, in the tensors themselves.

        The backward pass behind the block sends what has accumulated.
        """
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As the optimizer's: learning rates may be changed there."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer, and of the synchronizer on this rank: each rank keeps its own."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "synchronizer": self.synchronizer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.synchronizer.load_state_dict(state["synchronizer"])

    def report(self) -> Report:
        """As `GradientSynchronizer.report`."""
        return self.synchronizer.report()

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def _named(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters that get gradients, by name, each once."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if named is None:
        named = ((str(i), p) for i, p in enumerate(own))
    found = {name: p for name, p in named if p.requires_grad}
    known, given = {id(p) for p in own if p.requires_grad}, {id(p) for p in found.values()}
    if known != given:
        words = f"{len(known - given)} without a name, {len(given - known)} not of the optimizer"
        raise ValueError(f"named_parameters are not the optimizer's: {words}")
    return found


# ---- DistributedDataParallel ----


class DDPState:
    """What `ddp_hook` needs.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        With the ranks of the process group, in the same order; COMM_WORLD by default.
    codec, algorithm, timeout
        As for `mpiquant.allreduce`.
    feedback : bool
        Whether what a lossy codec loses is added at the next step.
    """

    def __init__(
        self,
        *,
        comm: CommLike | None = None,
        codec: CodecLike = "q8",
        algorithm: str = "auto",
        feedback: bool = True,
        timeout: float | None = None,
    ) -> None:
        given = {"comm": comm, "codec": codec, "algorithm": algorithm, "timeout": timeout}
        self.options: dict[str, Any] = given
        self.feedback = ErrorFeedback() if feedback else None


def ddp_hook(
    state: DDPState, bucket: torch.distributed.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for `DistributedDataParallel`: means by this package, over MPI.

    The process group, gloo as a rule, still makes replicas alike in the beginning, and agrees on
    buckets.  Gradients go over MPI, moved on by the progress thread while the backward pass runs.

    Examples
    --------
    >>> model = DistributedDataParallel(model)
    >>> model.register_comm_hook(mpiquant.torch.DDPState(codec="q4"), mpiquant.torch.ddp_hook)
    """
    tensor = bucket.buffer()
    array, future = as_array(tensor), torch.futures.Future[torch.Tensor]()
    # DDP makes other buckets behind the first step: their residuals have other names.
    name = f"bucket {bucket.index()} of {array.size}"
    token = config.Preset({"progress": "thread"}).apply()
    try:
        request = mpiquant.iallreduce(
            array, "mean", out=array, name=name, feedback=state.feedback, **state.options
        )
    finally:
        config.restore(token)

    def done() -> None:
        if request.error is None:
            future.set_result(tensor)
        else:
            future.set_exception(request.error)

    request.when_done(done)
    return future


# DistributedDataParallel wants to see the types themselves.
ddp_hook.__annotations__ |= {
    "bucket": torch.distributed.GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
