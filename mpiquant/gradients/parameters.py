"""Replicas: parameters that begin alike on all ranks, whether they still are, and their mean."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiquant import api
from mpiquant._comm import checked_comm
from mpiquant.errors import AgreementError
from mpiquant.gradients._meeting import meet
from mpiquant.typing import Array, CommLike

MAX_NBYTES = 1 << 30
"""Most bytes of one broadcast: counts are ints."""

SAMPLE = 1 << 16
"""Values of each parameter that `parameter_drift` looks at."""


def broadcast_parameters(
    parameters: Mapping[str, Array],
    root: int = 0,
    *,
    comm: CommLike | None = None,
    timeout: float | None = None,
) -> None:
    """Give all ranks the parameters of one of them, in place; collective over comm.

    Parameters
    ----------
    parameters : mapping of str to array
        Of the same names, shapes and dtypes on all ranks, in any order.  Any dtype, contiguous or
        not.
    root : int
    comm : MPI.Intracomm, optional
        COMM_WORLD by default.
    timeout : float, optional
        Seconds to wait for all ranks to come.

    Raises
    ------
    ValueError
        On all ranks, if one has other parameters, or some that cannot be written.
    """
    problem = _problem(parameters, root, checked_comm(comm).size)
    channel = meet(comm, "broadcast_parameters", problem, timeout)
    forms = [(n, parameters[n].shape, parameters[n].dtype.str) for n in sorted(parameters)]
    for rank, other in enumerate(channel.native.allgather(forms)):
        if other != forms:
            mine = set(forms).symmetric_difference(other)
            raise AgreementError(f"broadcast_parameters: rank {rank} differs in {sorted(mine)[0]}")
    for name in sorted(parameters):
        array = np.asarray(parameters[name])
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for begin in range(0, flat.size, MAX_NBYTES):
            channel.native.Bcast([flat[begin : begin + MAX_NBYTES], MPI.BYTE], root)
        if not np.shares_memory(flat, array):
            array[...] = flat.view(array.dtype).reshape(array.shape)


def _problem(parameters: Mapping[str, Any], root: int, size: int) -> Exception | None:
    if not 0 <= root < size:
        return ValueError(f"root is {root}, expected 0 to {size - 1}")
    for name, array in parameters.items():
        if not isinstance(array, np.ndarray):
            return TypeError(f"{name!r} is a {type(array).__name__}, expected an array")
        if not array.flags.writeable:
            return ValueError(f"{name!r} is read-only")
        if array.dtype.hasobject:
            return TypeError(f"{name!r} holds Python objects")
    return None


def differing_parameters(
    parameters: Mapping[str, Array], *, comm: CommLike | None = None, timeout: float | None = None
) -> list[str]:
    """Names of parameters that are not bit for bit the same on all ranks; collective over comm.

    Costs one pass over the parameters, and a few dozen bytes per parameter and rank.
    """
    channel = meet(comm, "differing_parameters", None, timeout)
    mine = {name: _digest(array) for name, array in parameters.items()}
    everybody = channel.native.allgather(mine)
    names = {name: None for digests in everybody for name in digests}  # in order
    return [n for n in names if len({digests.get(n) for digests in everybody}) > 1]


def average_parameters(
    parameters: Mapping[str, Array], *, comm: CommLike | None = None, timeout: float | None = None
) -> None:
    """Give all ranks the mean of their parameters, in place and bit for bit alike.

    For replicas that drifted apart, as with `algorithm="cerar"`.  Exact but for rounding; takes an
    uncompressed ring's time.  Collective over comm.

    Parameters
    ----------
    parameters : mapping of str to array
        Of floats; the same names, in the same order, and shapes on all ranks.
    comm, timeout
        As in `broadcast_parameters`.

    Raises
    ------
    AgreementError
        On all ranks, if one has other parameters.
    """
    for name, array in parameters.items():
        # A ring gives all ranks the same bits, which MPI's own reductions need not.
        array[...] = api.allreduce(
            array, "mean", comm=comm, algorithm="ring", codec="exact", name=name, timeout=timeout
        )


def parameter_drift(
    parameters: Mapping[str, Array], *, comm: CommLike | None = None, timeout: float | None = None
) -> dict[str, float]:
    """How far the ranks' parameters are from their mean; collective over comm.

    Cheap: it looks at up to 65,536 values of each parameter, evenly spread.

    Parameters
    ----------
    parameters, comm, timeout
        As in `average_parameters`.

    Returns
    -------
    dict of str to float
        Alike on all ranks: the 2-norm of the difference to the mean over all ranks, over the norm
        of the mean, on the rank where it is largest.
    """
    channel = meet(comm, "parameter_drift", None, timeout)
    drifts = {}
    for name, array in parameters.items():
        flat = np.asarray(array).reshape(-1)
        own = flat[:: max(1, -(-flat.size // SAMPLE))].astype(np.float64)
        mean = channel.native.allreduce(own) / channel.size
        away = channel.native.allreduce(float(np.linalg.norm(own - mean)), MPI.MAX)
        norm = float(np.linalg.norm(mean))
        drifts[name] = away / norm if norm else away
    return drifts


def _digest(array: Array) -> bytes:
    form = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(form + np.ascontiguousarray(array).tobytes()).digest()
