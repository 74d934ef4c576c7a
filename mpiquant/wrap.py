"""A communicator that is a drop-in for mpi4py's, with compressed reductions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiquant import api, config
from mpiquant._buffers import is_half
from mpiquant._comm import checked_comm
from mpiquant.codecs import by_name
from mpiquant.request import Request
from mpiquant.typing import Array, BufSpec, CodecLike, CommLike, OpLike


class Wrapped:
    """What a wrapped communicator adds to its class; see `wrap`."""

    mpiquant_preset: config.Preset
    mpiquant_plain: Any
    """The same communicator in mpi4py's own class."""

    def Allreduce(
        self, sendbuf: BufSpec, recvbuf: BufSpec, op: OpLike = MPI.SUM, **changes: Any
    ) -> Any:
        """`mpiquant.Allreduce` on this communicator."""
        token = self.mpiquant_preset.apply()
        try:
            return api.Allreduce(sendbuf, recvbuf, op, comm=self.mpiquant_plain, **changes)
        finally:
            config.restore(token)

    def Iallreduce(
        self, sendbuf: BufSpec, recvbuf: BufSpec, op: OpLike = MPI.SUM, **changes: Any
    ) -> Request:
        """`mpiquant.Iallreduce` on this communicator."""
        token = self.mpiquant_preset.apply()
        try:
            return api.Iallreduce(sendbuf, recvbuf, op, comm=self.mpiquant_plain, **changes)
        finally:
            config.restore(token)

    def allreduce(self, sendobj: Any, op: OpLike = MPI.SUM, **changes: Any) -> Any:
        """`mpiquant.allreduce` for arrays of numbers, mpi4py's for any other object."""
        if not isinstance(sendobj, np.ndarray) or not _is_numeric(sendobj):
            return self.mpiquant_plain.allreduce(sendobj, op)
        token = self.mpiquant_preset.apply()
        try:
            return api.allreduce(sendobj, op, comm=self.mpiquant_plain, **changes)
        finally:
            config.restore(token)


_MAKERS = (
    *("Clone", "Dup", "Dup_with_info", "Idup", "Idup_with_info", "Split", "Split_type", "Sub"),
    *("Create", "Create_group", "Create_cart", "Create_graph"),
    *("Create_dist_graph", "Create_dist_graph_adjacent"),
)
"""Methods that make a communicator."""


def _is_numeric(array: Array) -> bool:
    return array.dtype.kind in "iufc" or is_half(array.dtype)


def _maker(name: str) -> Any:
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.mpiquant_plain, name)(*args, **kwargs)

    make.__name__ = name
    make.__doc__ = f"mpi4py's {name}: the new communicator is not wrapped."
    return make


@cache
def _wrapped_class(base: type) -> type:
    makers = {name: _maker(name) for name in _MAKERS if hasattr(base, name)}
    return type(f"Wrapped{base.__name__}", (Wrapped, base), makers)


def wrap(
    comm: CommLike,
    *,
    codec: CodecLike = None,
    algorithm: str | None = None,
    timeout: float | None = None,
) -> Any:
    """A communicator whose `Allreduce`, `Iallreduce` and `allreduce` of arrays are mpiquant's.

    All else is the original's: the result is the same communicator (the same handle) in a
    subclass of its class, so that it can be passed wherever mpi4py takes one.  Communicators made
    from it are not wrapped.

    Parameters
    ----------
    comm : MPI.Intracomm
    codec, algorithm, timeout
        For all calls on it, as by `options`: arrays of fewer than `min_size` elements stay exact,
        and a call may override them.  Default: those in force at the call.

    Examples
    --------
    >>> comm = mpiquant.wrap(MPI.COMM_WORLD, codec="q8")
    >>> comm.Allreduce(MPI.IN_PLACE, gradient)
    """
    comm = checked_comm(comm)
    given = {"codec": codec, "algorithm": algorithm, "timeout": timeout}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    config.Options(**changes)
    if isinstance(codec, str):
        by_name(codec)
    base = type(comm)
    if issubclass(base, Wrapped):
        changes = {**comm.mpiquant_preset.changes, **changes}
        base = base.__bases__[1]
    wrapped = _wrapped_class(base)(comm)  # type: ignore[arg-type]
    wrapped.mpiquant_preset = config.Preset(changes)
    plain = next(c for c in base.__mro__ if c.__module__.startswith("mpi4py"))
    wrapped.mpiquant_plain = plain(comm)
    return wrapped
