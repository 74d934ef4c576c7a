"""Native reductions in few Python lines.

Losses, counters and metrics are reduced in every step of a loop, always alike.  The way through
checks, plans and calls would cost several times the reduction itself.  So what such a call was
found to need is remembered; when nothing else is going on, the next one starts MPI's nonblocking
reduction at once, and becomes a full call only if that does not end soon.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpiquant import calls, trace
from mpiquant._agreement import HEADER_NBYTES, Plan
from mpiquant._call import Call, HeaderExchange, Steps, agreement_offsets
from mpiquant._comm import HEADER_TAG, ROUNDS, Channel, data_tag, find_channel, in_flight
from mpiquant.auto import tuner_of
from mpiquant.buckets import Item, Terms
from mpiquant.codecs import EXACT, AutoCodec
from mpiquant.config import Options, context, current, defaults
from mpiquant.job import Job
from mpiquant.plan import Choice, Tuner
from mpiquant.swap import Swap, finish_first, finish_halves, halves, swap_of
from mpiquant.typing import Array, CommLike

WHOLE, HALVES = Swap.WHOLE, Swap.HALVES  # looked up once

TESTS, LIMIT_S = 3, 1e-3
"""How often a reduction is tested before others get the core, if there are any, and how long before
it becomes a full call.  Where ranks share cores, each needless test keeps another rank waiting."""


Kind = tuple[int, np.dtype, Any, str | None, Options]
"""Size and dtype of an array, and the op, name and options of a call."""


class Known(NamedTuple):
    """A kind of call, and what it needs.  The options are kept, so that no others get their id."""

    comm: CommLike | None
    kind: Kind
    channel: Channel
    plan: Plan
    first_tag: int
    """That of a call with number 0."""
    swap: Swap | None
    """How the two ranks exchange their arrays, if they do."""
    mpi_type: MPI.Datatype
    mpi_op: MPI.Op
    mean: bool
    tuner: Tuner | None
    """What chose MPI's own reduction, if it was not the only one, and may choose another."""


_NOTHING = (None, None, *[None] * 8)
_last: list[Any] = [_NOTHING]
"""The kind of the last quick call, to be compared without hashing: a loop often makes but one."""


def _forget() -> None:
    _last[0] = _NOTHING


os.register_at_fork(after_in_child=_forget)  # a child must be refused, by the full way


def reduce(
    x: Array, out: Array | None, op: Any, comm: CommLike | None, name: str | None
) -> Array | Call | None:
    """The result of a small native reduction of a known kind; None if it must go the full way.

    A reduction that does not end soon is adopted by a call, which is returned.
    """
    if in_flight or not x.flags.c_contiguous:
        return None
    frame = context.get()
    options = defaults() if frame is None else frame.options
    size, dtype = x.size, x.dtype
    kind = size, dtype, op, name, options
    l_comm, l_kind, channel, plan, first_tag, swap, mpi_type, mpi_op, mean, tuner = _last[0]
    if comm is not l_comm or kind != l_kind:
        known = _look_up(comm, kind)
        if known is None:
            return None
        _, _, channel, plan, first_tag, swap, mpi_type, mpi_op, mean, tuner = known
    if channel.broken or channel.faults:
        return None
    if out is None:
        out = np.empty_like(x)
    elif (
        out.size != size
        or out.dtype is not dtype
        or not out.flags.carray
        or out is x
        or ((out.base is not None or x.base is not None) and np.may_share_memory(x, out))
    ):
        return None
    if not channel.lock.acquire(False):
        return None
    try:
        if tuner is not None:
            if tuner.settled is not tuner.ways[0]:
                return None
            tuner.skip()
        if plan.blocking:
            return _block(channel, plan, options.timeout, x, out, mpi_op, mean)
        seq = channel.seq
        channel.seq = seq + 1
        if swap is HALVES:
            return _swap_halves(channel, plan, options.timeout, seq, x, out, mpi_op, mean)
        send, receive = [x, size, mpi_type], [out, size, mpi_type]
        if swap is WHOLE:
            peer, tag = 1 - channel.rank, first_tag + seq % ROUNDS
            plain = channel.comm
            request, sending = plain.Irecv(receive, peer, tag), plain.Isend(send, peer, tag)
        else:
            sending = None
            request = channel.native.Iallreduce(send, receive, mpi_op)
        if not _comes_soon(request, sending):
            parts = (request, sending, x, out, mpi_op, mean)
            return _go_on(channel, plan, options.timeout, seq, *parts)
        if sending is not None:
            mpi_op.Reduce_local(send, receive)
        return _finish(channel, out, mean)
    finally:
        channel.lock.release()


def _look_up(comm: CommLike | None, kind: Kind) -> Known | None:
    channel = find_channel(comm)
    if channel is None:
        return None
    found: Known | None = channel.quick.get(_key(kind))
    if found is None or found.plan.hash not in channel.agreed:
        return None
    first_tag = data_tag(channel.agreed[found.plan.hash], 0)
    known = found._replace(comm=comm, kind=kind, first_tag=first_tag)
    _last[0] = tuple(known)
    return known


def _key(kind: Kind) -> tuple[Any, ...]:
    """What can be hashed, of a kind."""
    size, dtype, op, name, options = kind
    return size, dtype, op if isinstance(op, str) else op.handle, name, id(options)


def _comes_soon(request: MPI.Request, sending: MPI.Request | None) -> bool:
    """Test for a while, giving the core away now and then."""
    begin = None
    while True:
        for _ in range(TESTS):
            if request.Test() and (sending is None or sending.Test()):
                return True
        now = time.monotonic()
        if begin is None:
            begin = now
        elif now > begin + LIMIT_S:
            return False
        os.sched_yield()


def _go_on(
    channel: Channel,
    plan: Plan,
    timeout: float | None,
    seq: int,
    request: MPI.Request,
    sending: MPI.Request | None,
    x: Array,
    out: Array,
    op: MPI.Op,
    mean: bool,
) -> Call:
    """Make what takes long a call."""

    def rest(call: Call) -> Steps[None]:
        if sending is None:
            yield from call.until_native(request, x, out)
        else:
            yield from finish_first(call, request, x, out, op)

    exchange = ([], []) if sending is None else ([request], [sending])
    return _become(channel, plan, timeout, seq, exchange, rest, out, mean)


def _become(
    channel: Channel,
    plan: Plan,
    timeout: float | None,
    seq: int,
    exchange: tuple[list[MPI.Request], list[MPI.Request]],
    rest: Callable[[Call], Steps[None]],
    out: Array,
    mean: bool,
) -> Call:
    call = Call(channel, plan.name, timeout, seq)

    def body() -> Steps[Array]:
        call.opened = True
        yield from rest(call)
        return _finish(channel, out, mean)

    call.adopt(plan, *exchange)
    call.launch(body())
    return call


def _swap_halves(
    channel: Channel,
    plan: Plan,
    timeout: float | None,
    seq: int,
    x: Array,
    out: Array,
    op: MPI.Op,
    mean: bool,
) -> Array | Call:
    """Reduce our half, and exchange the halves; a call if that takes long."""
    ours, theirs = halves(x.size, channel.rank)
    peer, tag = 1 - channel.rank, data_tag(channel.agreed[plan.hash], seq)
    request = channel.comm.Irecv(out[ours], peer, tag)
    sending = channel.comm.Isend(x[theirs], peer, tag)
    become = partial(_become, channel, plan, timeout, seq)

    def from_first(call: Call) -> Steps[None]:
        yield from finish_first(call, request, x[ours], out[ours], op)
        yield from finish_halves(call, out)

    if not _comes_soon(request, sending):
        return become(([request], [sending]), from_first, out, mean)
    op.Reduce_local(x[ours], out[ours])
    back = channel.comm.Irecv(out[theirs], peer, tag)
    forth = channel.comm.Isend(out[ours], peer, tag)

    def from_second(call: Call) -> Steps[None]:
        yield from call.until_from(back, peer)
        yield from call.until(forth)

    if not _comes_soon(back, forth):
        # With the first exchange, which counts where a fault ends the call.
        return become(([request, back], [sending, forth]), from_second, out, mean)
    return _finish(channel, out, mean)


def _block(
    channel: Channel,
    plan: Plan,
    timeout: float | None,
    x: Array,
    out: Array,
    op: MPI.Op,
    mean: bool,
) -> Array | Call:
    """MPI's blocking reduction, once all ranks are there and agree; a call if that takes long."""
    comm, rank, size, seq = channel.comm, channel.rank, channel.size, channel.seq
    channel.seq = seq + 1
    reduce = partial(channel.native.Allreduce, x, out, op)
    header, tag = plan.header(seq), HEADER_TAG + seq % ROUNDS
    exchanges: list[HeaderExchange] = []
    for offset in agreement_offsets(size):
        buffer = bytearray(HEADER_NBYTES)
        request = comm.Irecv([buffer, MPI.BYTE], (rank - offset) % size, tag)
        sending = comm.Isend([header, MPI.BYTE], (rank + offset) % size, tag)
        exchanges.append(HeaderExchange(request, buffer, sending))
        if not _comes_soon(request, sending) or buffer != header:
            break
    else:
        reduce()
        return _finish(channel, out, mean)
    call = Call(channel, plan.name, timeout, seq)

    def body() -> Steps[Array]:
        yield from call.reopen(plan, exchanges)
        yield from call.until_called(reduce)
        return _finish(channel, out, mean)

    call.launch(body())
    return call


def _finish(channel: Channel, out: Array, mean: bool) -> Array:
    return np.divide(out, channel.size, out=out) if mean else out


def remember(terms: Terms, item: Item) -> None:
    """Note that calls like this one are plain native reductions, if they are."""
    x, options, channel = item.entry.array, terms.options, terms.channel
    if (
        not terms.op.is_predefined
        or options is not current()  # something was given with the call
        or options.check != "first"
        or channel.size == 1
        or terms.feedback is not None
        or terms.measure
        or trace.active.on
        or x.size > calls.MAX_COUNT
        or not (x.dtype == item.work == item.result and x.dtype.isnative)
    ):
        return
    job = Job("allreduce", terms.name, x, x, None, terms.op, terms.mean, item.codec, False, False)
    choice, tuner = calls.decide(job, options, channel.size), None
    if choice.compress and isinstance(job.codec, AutoCodec):
        tuner = tuner_of(job, job.codec, options, channel, blocking=True)
        if tuner.settled is not None and tuner.settled.algorithm == "native":
            choice = Choice("native", False, tuner.reason)
    swap = swap_of(job.kind, job.op, x.nbytes, channel)
    if choice.algorithm != "native" or swap is Swap.PIECES:
        return
    plan = calls.plan_for(job, choice, options, EXACT, channel, blocking=True)
    spellings: list[str | MPI.Op] = ["mean"] if terms.mean else [terms.op]
    if terms.op == MPI.SUM and not terms.mean:
        spellings.append("sum")
    if len(channel.quick) > 1000:
        channel.quick.clear()
    name, mpi_type = terms.name or None, MPI.Datatype.fromcode(x.dtype.char)
    for op in spellings:
        kind = x.size, x.dtype, op, name, options
        channel.quick[_key(kind)] = Known(
            None, kind, channel, plan, 0, swap, mpi_type, terms.op, terms.mean, tuner
        )
