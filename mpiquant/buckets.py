"""From the arrays of a call to its jobs, and back: fusing, residuals, means, delivery."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiquant import _buffers, calls, codecs
from mpiquant._agreement import plan_of
from mpiquant._buffers import Entry
from mpiquant._call import Call, Steps
from mpiquant._comm import Channel
from mpiquant.codecs import Codec, Sparsifier
from mpiquant.collectives import own_part
from mpiquant.config import Options
from mpiquant.feedback import ErrorFeedback, is_nothing, nothing
from mpiquant.job import Job, op_name
from mpiquant.program import Kind
from mpiquant.stats import Stats
from mpiquant.typing import Array, BufSpec


@dataclass
class Terms:
    """What was asked for, checked: the same for all buckets of a call."""

    channel: Channel
    name: str
    options: Options
    op: MPI.Op
    mean: bool
    codec_from_call: bool
    feedback: ErrorFeedback | None
    measure: bool
    """Whether the achieved error is wanted."""
    blocking: bool
    stats: Stats = field(default_factory=Stats)
    calls: list[Call] = field(default_factory=list)
    comparisons: list[Callable[[], None]] = field(default_factory=list)

    def own_part(self, count: int) -> slice:
        """This rank's part of an array that is scattered or gathered."""
        return own_part(count, self.channel.rank, self.channel.size)

    def new_call(self, name: str) -> Call:
        given = self.options.deadline
        deadline = math.inf if given is None or math.isnan(given) else given
        call = Call(self.channel, name, self.options.timeout, deadline=deadline)
        self.calls.append(call)
        return call


@dataclass
class Item:
    """One entry on its way: its codec, dtypes and place for the result."""

    entry: Entry
    codec: Codec
    work: np.dtype
    result: np.dtype
    out: Array | None
    given: Any
    """What the user passed as out: perhaps a subclass of an array."""

    @property
    def count(self) -> int:
        return self.entry.array.size


def make_items(
    terms: Terms,
    entries: list[Entry],
    outs: list[Any],
    shape: Callable[[Entry], Any],
    reduced: bool = True,
) -> list[Item]:
    items: list[Item] = []
    for entry, given in zip(entries, outs, strict=True):
        dtype, out = entry.array.dtype, None
        if reduced and dtype.kind == "b" and terms.op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN):
            raise TypeError(f"dtype {dtype} cannot be reduced by {op_name(terms.op)}")
        whole = terms.mean and dtype.kind in "iu"
        work = np.dtype(np.float64) if whole else entry.work_dtype
        result = work if whole else dtype.newbyteorder("=")
        codec: Codec = codecs.EXACT
        if work.kind == "f" and not whole:
            codec = codecs.resolve(terms.options.codec, entry.name, entry.array.shape)
        if given is not None:
            out = _buffers.check_out(given, entry.array, shape(entry), result)
        if terms.feedback is not None and work.kind == "f":
            terms.feedback.take(entry.name, entry.array.shape, work)
        items.append(Item(entry, codec, work, result, out, given))
    _buffers.check_disjoint([i.entry.array for i in items], [i.out for i in items])
    return items


def make_buckets(items: list[Item], limit: int) -> list[list[Item]]:
    """Neighbours of one dtype and codec together, up to the limit in bytes."""
    groups: dict[tuple[np.dtype, Codec], list[list[Item]]] = {}
    room: dict[tuple[np.dtype, Codec], float] = {}
    for item in items:
        key = (item.work, item.codec)
        nbytes = item.count * item.work.itemsize
        if nbytes > room.get(key, -1):
            groups.setdefault(key, []).append([])
            room[key] = math.inf if item.codec.undivided else limit
        groups[key][-1].append(item)
        room[key] -= nbytes
    return [bucket for buckets in groups.values() for bucket in buckets]


def _bucket_name(bucket: list[Item]) -> str:
    if len(bucket) == 1:
        return bucket[0].entry.name
    return "|".join(f"{i.entry.name}{list(i.entry.array.shape)}" for i in bucket)


# ---- reductions ----


def launch_reduction(
    terms: Terms, bucket: list[Item], kind: Kind, deliver: Callable[[Array], None]
) -> None:
    """Queue the call of a bucket; `deliver` gets its flat sum or mean, in its work dtype."""
    call = terms.new_call(_bucket_name(bucket))
    made: list[Job] = []

    def body() -> Steps[bool]:
        # Buffers are made when the call is opened, so that few exist at a time.
        made.append(_reduction(terms, bucket, kind, call.name))
        return (yield from _carry_out(terms, call, made[0]))

    def after(nonfinite: bool) -> None:
        (job,) = made
        if job.rest is not None:
            _keep_residuals(terms, bucket, job.rest, nonfinite)
        if terms.mean and terms.channel.size > 1:
            # The rest of a scattered buffer was perhaps never written.
            part = terms.own_part(job.out.size) if kind == "reduce_scatter" else slice(None)
            mean = job.out[part]
            np.divide(mean, mean.dtype.type(terms.channel.size), out=mean)
        deliver(job.out)

    call.launch(body(), after)


def _reduction(terms: Terms, bucket: list[Item], kind: Kind, name: str) -> Job:
    x, out = _bucket_buffers(bucket)
    rest = _with_residuals(terms, bucket, x)
    codec, given = bucket[0].codec, terms.codec_from_call
    if isinstance(codec, Sparsifier):
        codec = codec.of_parts(tuple(item.count for item in bucket))
    return Job(kind, name, x, out, rest, terms.op, terms.mean, codec, given, terms.measure)


def _carry_out(terms: Terms, call: Call, job: Job) -> Steps[bool]:
    original = job.x.copy() if terms.measure else job.x
    nonfinite = yield from calls.collective(
        job, call, terms.options, terms.stats, blocking=terms.blocking
    )
    if terms.measure:
        exact = yield from calls.exact_result(job, original, call, terms.options)
        _note_comparison(terms, job, exact)
    return nonfinite


def _bucket_buffers(bucket: list[Item]) -> tuple[Array, Array]:
    """Flat input and output; the user's own memory for a single array where possible."""
    work = bucket[0].work
    if len(bucket) > 1:
        x = np.concatenate([i.entry.array.reshape(-1) for i in bucket], dtype=work)
        return x, x
    (item,) = bucket
    x = _buffers.flat_input(item.entry.array, work)
    if item.out is not None and item.out.dtype == work:
        return x, item.out.reshape(-1)
    return x, np.empty_like(x)


def _with_residuals(terms: Terms, bucket: list[Item], x: Array) -> Array | None:
    """A copy of x with the residuals added; None if there are none and will be none."""
    feedback = terms.feedback
    if feedback is None or x.dtype.kind != "f":
        return None
    known = [feedback.residual(i.entry.name) for i in bucket]
    lossy, alone = bucket[0].codec.lossy, terms.channel.size == 1
    if (alone or not lossy) and all(map(is_nothing, known)):
        if lossy and any(k is None for k in known):
            _keep_nothing(feedback, bucket)
        return None
    rest = np.empty_like(x)
    begin = 0
    for item, residual in zip(bucket, known, strict=True):
        part = slice(begin, begin + item.count)
        if residual is None:
            np.copyto(rest[part], x[part])
        else:
            np.add(x[part], residual.reshape(-1), out=rest[part])
        begin += item.count
    return rest


def _keep_residuals(terms: Terms, bucket: list[Item], rest: Array, nonfinite: bool) -> None:
    assert terms.feedback is not None
    if nonfinite:
        return
    if terms.channel.size == 1:
        _keep_nothing(terms.feedback, bucket)
        return
    begin = 0
    for item in bucket:
        part = rest[begin : begin + item.count]
        whole = part if len(bucket) == 1 else part.copy()
        terms.feedback.put(item.entry.name, whole.reshape(item.entry.array.shape))
        begin += item.count


def _keep_nothing(feedback: ErrorFeedback, bucket: list[Item]) -> None:
    """A lone rank loses nothing."""
    for item in bucket:
        feedback.put(item.entry.name, nothing(item.entry.array.shape, item.work))


def _note_comparison(terms: Terms, job: Job, exact: Array) -> None:
    """Compare a result with the exact one, once it is a mean if it has to be."""
    part = terms.own_part(job.out.size) if job.kind == "reduce_scatter" else slice(None)

    def compare() -> None:
        right = exact[part] / terms.channel.size if terms.mean else exact[part]
        terms.stats.compare(job.out[part], right)

    terms.comparisons.append(compare)


def launch_buffers(terms: Terms, sendbuf: BufSpec, recvbuf: BufSpec) -> None:
    """Queue a reduction of what only MPI understands: derived datatypes, displacements."""
    call = terms.new_call(terms.name)
    terms.stats.chose("native", "exact", "the buffers are not plain arrays of numbers")

    def body() -> Steps[None]:
        plan = plan_of(
            kind="allreduce",
            count=1,
            dtype="buffers",
            op=op_name(terms.op),
            codec=codecs.EXACT.spec,
            algorithm="native",
            segment=0,
            feedback=False,
            measured=False,
            blocking=False,
            check=terms.options.check,
            name=terms.name,
        )
        yield from call.open(plan)
        request = call.channel.native.Iallreduce(sendbuf, recvbuf, terms.op)
        call.opened = True
        yield from call.until_native(request, sendbuf, recvbuf)

    call.launch(body())


# ---- gathering ----


def launch_gathering(terms: Terms, item: Item, deliver: Callable[[Array], None]) -> None:
    """Queue the call of an allgather; `deliver` gets all ranks' values, flat."""
    call = terms.new_call(item.entry.name)
    made: list[Job] = []

    def body() -> Steps[bool]:
        made.append(_gathering(terms, item))
        return (yield from _carry_out(terms, call, made[0]))

    def after(nonfinite: bool) -> None:
        (job,) = made
        if job.rest is not None:
            own = job.rest[terms.own_part(job.out.size)].copy()
            _keep_residuals(terms, [item], own, nonfinite)
        deliver(job.out)

    call.launch(body(), after)


def _gathering(terms: Terms, item: Item) -> Job:
    x = _buffers.flat_input(item.entry.array, item.work)
    full = np.empty(x.size * terms.channel.size, item.work)
    own = _with_residuals(terms, [item], x)
    rest = None
    if own is not None:
        rest = np.empty_like(full)
        rest[terms.own_part(full.size)] = own
    name, given = item.entry.name, terms.codec_from_call
    return Job("allgather", name, x, full, rest, MPI.SUM, False, item.codec, given, terms.measure)


# ---- delivery ----


def deliver_item(item: Item, flat: Array) -> Any:
    """One entry's result, in the user's memory, dtype and shape."""
    values = flat.reshape(item.entry.array.shape)
    if item.out is not None:
        if not np.may_share_memory(item.out, values):
            item.out[...] = cast(values, item.result)
        return item.given
    values = cast(values, item.result)
    return values[()] if item.entry.is_scalar else values


def cast(values: Array, dtype: np.dtype) -> Array:
    with np.errstate(over="ignore"):  # a float16 sum above 65504 is inf, as IEEE says
        return values.astype(dtype, copy=False)
