"""One array to be reduced or gathered."""

from __future__ import annotations

from dataclasses import dataclass

from mpi4py import MPI

from mpiquant.codecs import Codec
from mpiquant.program import Kind
from mpiquant.typing import Array


@dataclass(frozen=True)
class Job:
    """One flat array to be reduced or gathered.

    Attributes
    ----------
    kind : {"allreduce", "reduce_scatter", "allgather"}
    name : str
        For messages to the user, and agreed on by the ranks.
    x : (n,) array
        Input, in the dtype of the sums.
    out : (m,) array
        Output of the whole call: n elements, or n times the ranks for an allgather.
    rest : array or None
        With error feedback: a buffer of m elements with x plus the old residual (at the place of
        this rank's part, for an allgather).
    op : MPI.Op
    mean : bool
        Whether the caller will divide the sum: the ranks must agree on that.
    codec : Codec
    from_call : bool
        Whether the codec was given with the call, rather than by the context or environment.
    measured : bool
        Whether the achieved error will be measured, which all ranks must do together.
    within : str
        The sparsifier whose values these are, or nothing.
    """

    kind: Kind
    name: str
    x: Array
    out: Array
    rest: Array | None
    op: MPI.Op
    mean: bool
    codec: Codec
    from_call: bool
    measured: bool
    within: str = ""


_OP_NAMES = (
    *((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min")),
    *((MPI.LAND, "land"), (MPI.LOR, "lor"), (MPI.LXOR, "lxor")),
    *((MPI.BAND, "band"), (MPI.BOR, "bor"), (MPI.BXOR, "bxor")),
    *((MPI.MAXLOC, "maxl"), (MPI.MINLOC, "minl"), (MPI.REPLACE, "repl"), (MPI.NO_OP, "noop")),
)


def op_name(op: MPI.Op) -> str:
    """At most four letters; "user" for all ops that users made."""
    return next((name for known, name in _OP_NAMES if op == known), "user")
