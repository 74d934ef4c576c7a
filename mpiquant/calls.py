"""One collective on one flat array: from the decision to the result.

The faces in `mpiquant.api` turn what the user passes into `Job`s; here a job becomes a plan, is
agreed on with the other ranks and runs, on the schedules or natively.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpiquant._comm import Call, Channel, plan_of
from mpiquant.codecs import EXACT, Codec
from mpiquant.codecs._block import mix_key
from mpiquant.collectives import canonical, own_part
from mpiquant.config import Options
from mpiquant.execute import Execution
from mpiquant.plan import Choice, choose
from mpiquant.program import Kind, Program, compile_program
from mpiquant.stats import Stats
from mpiquant.typing import Array

MAX_COUNT = 2**31 - 1
"""Most elements of one native MPI call."""


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


_OP_NAMES = (
    *((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min")),
    *((MPI.LAND, "land"), (MPI.LOR, "lor"), (MPI.LXOR, "lxor")),
    *((MPI.BAND, "band"), (MPI.BOR, "bor"), (MPI.BXOR, "bxor")),
    *((MPI.MAXLOC, "maxl"), (MPI.MINLOC, "minl"), (MPI.REPLACE, "repl"), (MPI.NO_OP, "noop")),
)


def op_name(op: MPI.Op) -> str:
    """At most four letters; "user" for all ops that users made."""
    return next((name for known, name in _OP_NAMES if op == known), "user")


def decide(job: Job, options: Options, size: int) -> Choice:
    """Algorithm and codec of a job; the same on all ranks."""
    dtype = job.x.dtype
    native_because = exact_because = None
    if job.op != MPI.SUM:
        native_because = f"op {op_name(job.op)} is MPI's"
    elif dtype.kind == "b":
        native_because = "booleans are MPI's"
    if dtype not in (np.float32, np.float64):
        exact_because = f"{dtype} is never compressed"
    elif not job.codec.lossy:
        exact_because = "no codec was given"
    elif not job.from_call and job.x.size < options.min_size:
        exact_because = f"fewer than min_size={options.min_size} elements"
    return choose(
        canonical(options.algorithm),
        size=size,
        wire_nbytes=0 if exact_because else job.codec.nbytes(job.out.size, dtype),
        exact_because=exact_because,
        native_because=native_because,
    )


def run(job: Job, channel: Channel, options: Options, stats: Stats) -> bool:
    """Carry out a job; True if the result has non-finite values (only told with feedback).

    Collective over the channel's communicator.
    """
    if channel.size == 1:
        return _run_alone(job, stats)
    choice = decide(job, options, channel.size)
    codec = job.codec if choice.compress else EXACT
    stats.chose(choice.algorithm, codec.spec, choice.reason)
    plan = plan_of(
        kind=job.kind,
        count=job.out.size,
        dtype=job.x.dtype.str,
        op="mean" if job.mean else op_name(job.op),
        codec=codec.spec,
        algorithm=choice.algorithm,
        segment=options.segment,
        feedback=job.rest is not None,
        measured=job.measured,
        name=job.name,
    )
    call = Call(channel, plan, job.name, options.timeout)
    with call.failing_together():
        call.open()
        if choice.algorithm == "native":
            nonfinite = _run_native(job, call, stats)
            call.close()
            return nonfinite
        program = compile_program(
            job.kind,
            choice.algorithm,
            channel.rank,
            channel.size,
            job.out.size,
            codec,
            job.x.dtype,
            options.segment,
        )
        nonfinite = _run_schedule(job, call, program, stats)
        if job.kind == "reduce_scatter" and job.rest is not None:
            nonfinite = call.any(nonfinite)  # here no rank sees the others' parts
        call.close()
        return nonfinite


def _run_alone(job: Job, stats: Stats) -> bool:
    stats.chose("native", EXACT.spec, "one rank")
    source = job.x if job.rest is None else job.rest
    if job.out is not source:
        np.copyto(job.out, source)
    return _settle_exact(job)


def _settle_exact(job: Job) -> bool:
    """After an exact result: nothing was lost, so nothing is kept."""
    if job.rest is None:
        return False
    job.rest[...] = 0
    return not np.all(np.isfinite(job.out))


def _run_schedule(job: Job, call: Call, program: Program, stats: Stats) -> bool:
    x, own = job.x, own_part(job.out.size, call.channel.rank, call.channel.size)
    if job.kind == "allgather":
        job.out[own] = job.x
        x = job.out
    stream = mix_key(call.channel.rank, call.seq)
    execution = Execution(program, call, x, job.out, job.rest, stream, stats)
    if program.gate:
        call.finish_agreement()
    execution.start()
    call.finish_agreement()
    call.waits_for = execution.waits_for
    execution.run(call.wait)
    stats.raw_bytes += program.raw_nbytes
    stats.header_bytes += call.header_bytes
    if job.rest is None:
        return False
    for begin, end in program.never_encoded:
        job.rest[begin:end] = 0
    if job.kind == "reduce_scatter":
        return not np.all(np.isfinite(job.out[own]))
    return execution.nonfinite or (program.exact and not np.all(np.isfinite(job.out)))


def _run_native(job: Job, call: Call, stats: Stats) -> bool:
    size = call.channel.size
    with stats.timed("native_s"):
        if job.kind == "allgather":
            own = own_part(job.out.size, call.channel.rank, size)
            _gather_native(call, job.x if job.rest is None else job.rest[own], job.out)
        else:
            _reduce_native(call, job.x if job.rest is None else job.rest, job.out, job.op)
    moved = (1 if job.kind == "allgather" else 2) * (size - 1) * job.out.nbytes // size
    stats.wire_bytes += moved
    stats.raw_bytes += moved
    stats.header_bytes += call.header_bytes
    return _settle_exact(job)


def _reduce_native(call: Call, x: Array, out: Array, op: MPI.Op) -> None:
    """MPI's Allreduce, in pieces that its int counts can hold."""
    comm = call.channel.comm
    in_place = x.__array_interface__["data"] == out.__array_interface__["data"]
    for begin in range(0, x.size, MAX_COUNT):
        part = slice(begin, begin + MAX_COUNT)
        send = MPI.IN_PLACE if in_place else x[part]
        if call.timeout is None:
            comm.Allreduce(send, out[part], op)
        else:
            call.wait_for_all(comm.Iallreduce(send, out[part], op))


def _gather_native(call: Call, x: Array, out: Array) -> None:
    comm, size = call.channel.comm, call.channel.size
    rows = out.reshape(size, -1)
    if x.size <= MAX_COUNT // size:
        call.wait_for_all(comm.Iallgather(x, rows))
        return
    for rank in range(size):
        if rank == call.channel.rank:
            rows[rank] = x
        for begin in range(0, x.size, MAX_COUNT):
            call.wait_for_all(comm.Ibcast(rows[rank, begin : begin + MAX_COUNT], rank))


def achieved_error(job: Job, exact_input: Array, channel: Channel, stats: Stats) -> None:
    """Compare the result with that of the same inputs in float64; collective."""
    wide = np.result_type(job.x.dtype, np.float64) if job.x.dtype.kind in "fc" else job.x.dtype
    x, exact = exact_input.astype(wide), np.empty(job.out.size, wide)
    if job.kind == "allgather":
        channel.comm.Allgather(x, exact)
    else:
        channel.comm.Allreduce(x, exact, job.op)
    part = slice(None)
    if job.kind == "reduce_scatter":
        part = own_part(job.out.size, channel.rank, channel.size)
    exact = exact[part].astype(np.result_type(wide, np.float64), copy=False)
    difference = np.abs(job.out[part] - exact)
    largest = float(difference.max(initial=0)) / (channel.size if job.mean else 1)
    stats.compare(float(np.sum(difference**2)), float(np.sum(np.abs(exact) ** 2)), largest)
