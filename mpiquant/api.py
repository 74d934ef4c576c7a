"""The functional face: allreduce, Allreduce, reduce_scatter, allgather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpiquant import _buffers, calls, codecs, config
from mpiquant._buffers import Entry
from mpiquant._comm import Channel, channel_of
from mpiquant.codecs import Codec
from mpiquant.collectives import own_part
from mpiquant.config import Options
from mpiquant.feedback import ErrorFeedback
from mpiquant.program import Kind
from mpiquant.stats import Stats
from mpiquant.typing import Array, BufSpec, CodecLike, CommLike, OpLike

StatsLike = Literal[True, "error"] | None


@dataclass
class _Request:
    """A checked call: what is the same for all its buckets."""

    channel: Channel
    name: str
    options: Options
    op: MPI.Op
    mean: bool
    codec_from_call: bool
    feedback: ErrorFeedback | None
    want: StatsLike
    stats: Stats

    def refusing(self) -> AbstractContextManager[None]:
        """A context in which refused arguments become an error on every rank."""
        return self.channel.refusing(self.name)

    def own_part(self, count: int) -> slice:
        """This rank's part of an array that is scattered or gathered."""
        return own_part(count, self.channel.rank, self.channel.size)


@contextmanager
def _checked(
    comm: CommLike | None,
    op: OpLike,
    name: str | None,
    codec: CodecLike,
    algorithm: str,
    feedback: ErrorFeedback | None,
    timeout: float | None,
    stats: StatsLike,
) -> Iterator[_Request]:
    """A request, made of checked arguments; one thread at a time on the communicator."""
    channel = channel_of(comm)
    with channel.entered():
        with channel.refusing(name or ""):
            options = config.current(
                codec=codec, algorithm=None if algorithm == "auto" else algorithm, timeout=timeout
            )
            if stats not in (None, False, True, "error"):
                raise ValueError(f"stats is {stats!r}, expected None, True or 'error'")
            if feedback is not None and not isinstance(feedback, ErrorFeedback):
                raise TypeError(f"feedback is a {type(feedback).__name__}, expected ErrorFeedback")
            mpi_op, mean = _parse_op(op)
            if name is not None and not isinstance(name, str):
                raise TypeError(f"name is a {type(name).__name__}, expected a string")
            if feedback is not None and mpi_op != MPI.SUM:
                raise ValueError(
                    "feedback needs op 'sum' or 'mean': other results have no residual"
                )
        yield _Request(
            channel,
            name or "",
            options,
            mpi_op,
            mean,
            codec is not None,
            feedback,
            stats or None,
            Stats(),
        )


def _parse_op(op: OpLike) -> tuple[MPI.Op, bool]:
    if isinstance(op, MPI.Op):
        return op, False
    if op == "sum":
        return MPI.SUM, False
    if op == "mean":
        return MPI.SUM, True
    raise ValueError(f"op is {op!r}, expected 'sum', 'mean' or an MPI.Op")


# ---- buckets ----


@dataclass
class _Item:
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


def _make_items(
    request: _Request,
    entries: list[Entry],
    outs: list[Any],
    shape: Callable[[Entry], Any],
    reduced: bool = True,
) -> list[_Item]:
    items: list[_Item] = []
    for entry, given in zip(entries, outs, strict=True):
        dtype, out = entry.array.dtype, None
        if reduced and dtype.kind == "b" and request.op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN):
            raise TypeError(f"dtype {dtype} cannot be reduced by {calls.op_name(request.op)}")
        whole = request.mean and dtype.kind in "iu"
        work = np.dtype(np.float64) if whole else entry.work_dtype
        result = work if whole else dtype.newbyteorder("=")
        codec: Codec = codecs.EXACT
        if work.kind == "f" and not whole:
            codec = codecs.resolve(request.options.codec, entry.name, entry.array.shape)
        if given is not None:
            out = _buffers.check_out(given, entry.array, shape(entry), result)
        if request.feedback is not None and work.kind == "f":
            request.feedback.take(entry.name, entry.array.shape, work)
        items.append(_Item(entry, codec, work, result, out, given))
    _buffers.check_disjoint([i.entry.array for i in items], [i.out for i in items])
    return items


def _make_buckets(items: list[_Item], limit: int) -> list[list[_Item]]:
    """Neighbours of one dtype and codec together, up to the limit in bytes."""
    groups: dict[tuple[np.dtype, Codec], list[list[_Item]]] = {}
    room: dict[tuple[np.dtype, Codec], int] = {}
    for item in items:
        key = (item.work, item.codec)
        nbytes = item.count * item.work.itemsize
        if nbytes > room.get(key, -1):
            groups.setdefault(key, []).append([])
            room[key] = limit
        groups[key][-1].append(item)
        room[key] -= nbytes
    return [bucket for buckets in groups.values() for bucket in buckets]


def _fused_name(bucket: list[_Item]) -> str:
    return "|".join(f"{i.entry.name}{list(i.entry.array.shape)}" for i in bucket)


def _reduce_bucket(request: _Request, bucket: list[_Item], kind: Kind) -> Array:
    """The summed (or averaged) flat values of a bucket, in its work dtype."""
    x, out = _bucket_buffers(bucket)
    rest = _with_residuals(request, bucket, x)
    exact_input = x.copy() if request.want == "error" else x
    name = _fused_name(bucket) if len(bucket) > 1 else bucket[0].entry.name
    job = calls.Job(
        kind,
        name,
        x,
        out,
        rest,
        request.op,
        request.mean,
        bucket[0].codec,
        request.codec_from_call,
        request.want == "error",
    )
    nonfinite = calls.run(job, request.channel, request.options, request.stats)
    if request.want == "error":
        calls.achieved_error(job, exact_input, request.channel, request.stats)
    if rest is not None:
        _keep_residuals(request, bucket, rest, nonfinite)
    if request.mean:
        # The rest of a scattered buffer was perhaps never written.
        part = out[request.own_part(out.size)] if kind == "reduce_scatter" else out
        np.divide(part, out.dtype.type(request.channel.size), out=part)
    return out


def _bucket_buffers(bucket: list[_Item]) -> tuple[Array, Array]:
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


def _with_residuals(request: _Request, bucket: list[_Item], x: Array) -> Array | None:
    """A copy of x with the residuals added; None without error feedback."""
    feedback = request.feedback
    if feedback is None or x.dtype.kind != "f":
        return None
    known = [feedback.residual(i.entry.name) for i in bucket]
    if not bucket[0].codec.lossy and all(k is None for k in known):
        return None
    rest = x.copy()
    begin = 0
    for item, residual in zip(bucket, known, strict=True):
        if residual is not None:
            rest[begin : begin + item.count] += residual.reshape(-1)
        begin += item.count
    return rest


def _keep_residuals(request: _Request, bucket: list[_Item], rest: Array, nonfinite: bool) -> None:
    assert request.feedback is not None
    if nonfinite:
        return
    begin = 0
    for item in bucket:
        part = rest[begin : begin + item.count]
        whole = part if len(bucket) == 1 else part.copy()
        request.feedback.put(item.entry.name, whole.reshape(item.entry.array.shape))
        begin += item.count


def _deliver(item: _Item, flat: Array) -> Any:
    """One entry's result, in the user's memory, dtype and shape."""
    values = flat.reshape(item.entry.array.shape)
    if item.out is not None:
        if not np.may_share_memory(item.out, values):
            item.out[...] = _cast(values, item.result)
        return item.given
    values = _cast(values, item.result)
    return values[()] if item.entry.is_scalar else values


def _cast(values: Array, dtype: np.dtype) -> Array:
    with np.errstate(over="ignore"):  # a float16 sum above 65504 is inf, as IEEE says
        return values.astype(dtype, copy=False)


# ---- the calls ----


def allreduce(
    x: Any,
    op: OpLike = "sum",
    *,
    comm: CommLike | None = None,
    codec: CodecLike = None,
    algorithm: str = "auto",
    out: Any = None,
    name: str | None = None,
    feedback: ErrorFeedback | None = None,
    timeout: float | None = None,
    stats: StatsLike = None,
) -> Any:
    """Sum (or another reduction) of an array over all ranks; collective over comm.

    Parameters
    ----------
    x : array_like, or list, tuple or dict of arrays
        Any shape, equal on all ranks; float32 and float64 can be compressed, float16 and bfloat16
        are summed in float32, all other numeric dtypes are reduced exactly.  Several arrays are
        fused into few messages; those of a dict are matched by key.
    op : {"sum", "mean"} or MPI.Op
        A mean divides last, in float32 or wider; of integers it is float64.  Other reductions
        than the sum are MPI's own.
    comm : MPI.Intracomm, optional
        COMM_WORLD by default.
    codec : str, Codec or callable, optional
        "exact", "fp16", "bf16", "q1" ... "q16", "sign", "ternary", a codec object, or a policy
        `name, shape -> codec`.  Default: that of `options` or MPIQUANT_CODEC; without any, exact.
    algorithm : {"auto", "native", "ring", "halving_doubling", "hd", "direct"}
    out : array (or list or dict of them), optional
        Gets the result; may be x itself.
    name : str, optional
        Key of the residual, and what errors call the array.
    feedback : ErrorFeedback, optional
        Residuals of this rank: what was lost is added at the next call of the same name.
    timeout : float, optional
        Seconds from the start of the call (of each bucket, if there are several) until it raises
        instead of waiting on.
    stats : {None, True, "error"}
        True: return (result, Stats).  "error": measure the achieved error too, by an exact
        reduction on the side.

    Returns
    -------
    array, or list, tuple or dict of arrays; or (result, Stats)
        Bit-identical on all ranks, except for what MPI itself reduces.

    Raises
    ------
    ValueError, TypeError
        On every rank if the arguments are bad on one, or differ between ranks (AgreementError).
    CallTimeoutError
        Naming the rank waited for.

    Notes
    -----
    Error of one call with nearest rounding and 3 or more bits, A the largest absolute value in a
    block over all N ranks and L = 2^(bits-1)-1: at most A N (N+1) / (4 L).
    """
    args = (comm, op, name, codec, algorithm, feedback, timeout, stats)
    with _checked(*args) as request:
        with request.refusing():
            entries, rebuild = _buffers.flatten(x, name or "")
            outs = _buffers.flatten_like(out, x)
            items = _make_items(request, entries, outs, lambda e: e.array.shape)
            buckets = _make_buckets(items, request.options.bucket_bytes)
        results: dict[str, Any] = {}
        for bucket in buckets:
            flat = _reduce_bucket(request, bucket, "allreduce")
            begin = 0
            for item in bucket:
                results[item.entry.name] = _deliver(item, flat[begin : begin + item.count])
                begin += item.count
        result = rebuild([results[entry.name] for entry in entries])
        return (result, request.stats) if stats else result


def Allreduce(
    sendbuf: BufSpec,
    recvbuf: BufSpec,
    op: OpLike = MPI.SUM,
    *,
    comm: CommLike | None = None,
    codec: CodecLike = None,
    algorithm: str = "auto",
    name: str | None = None,
    feedback: ErrorFeedback | None = None,
    timeout: float | None = None,
    stats: StatsLike = None,
) -> Stats | None:
    """Like `MPI.Comm.Allreduce`, with compression; collective over comm.

    Parameters
    ----------
    sendbuf, recvbuf : buffer or [buffer, count, datatype]
        As mpi4py takes them; sendbuf may be MPI.IN_PLACE.  What is not a plain contiguous run of
        numbers (derived datatypes, displacements) is reduced by MPI itself.
    op, comm, codec, algorithm, name, feedback, timeout, stats
        As for `allreduce`.

    Returns
    -------
    None, or Stats if asked for
    """
    args = (comm, op, name, codec, algorithm, feedback, timeout, stats)
    with _checked(*args) as request:
        with request.refusing():
            target = _buffers.from_spec(recvbuf, "recvbuf")
            in_place = sendbuf is MPI.IN_PLACE or sendbuf is None
            source = target if in_place else _buffers.from_spec(sendbuf, "sendbuf")
            items = _plain_items(request, source, target, name or "")
            if not items and request.mean:
                raise ValueError("op 'mean' needs plain arrays of numbers")
        if not items:
            request.channel.comm.Allreduce(sendbuf, recvbuf, request.op)
            request.stats.chose("native", "exact", "the buffers are not plain arrays of numbers")
        for item in items:
            _deliver(item, _reduce_bucket(request, [item], "allreduce"))
        return request.stats if stats else None


def _plain_items(
    request: _Request, source: Array | None, target: Array | None, name: str
) -> list[_Item]:
    """The item of two plain buffers of one dtype; none if only MPI can reduce them."""
    if source is None or target is None or not _same_numbers(source, target):
        return []
    if source.size != target.size:
        raise ValueError(f"sendbuf has {source.size} elements, recvbuf has {target.size}")
    return _make_items(request, [Entry(name, source, False)], [target], lambda e: e.array.shape)


def _same_numbers(a: Array, b: Array) -> bool:
    """Whether both hold numbers of one dtype, in whatever byte order."""
    return a.dtype.kind in "iufc" and a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")


def reduce_scatter(
    x: Any,
    op: OpLike = "sum",
    *,
    comm: CommLike | None = None,
    codec: CodecLike = None,
    algorithm: str = "auto",
    out: Array | None = None,
    name: str | None = None,
    feedback: ErrorFeedback | None = None,
    timeout: float | None = None,
    stats: StatsLike = None,
) -> Any:
    """This rank's part of the sum of an array over all ranks; collective over comm.

    Parameters
    ----------
    x : array_like
        Of n elements on every rank; the flattened array is cut into parts whose lengths differ by
        at most one, the longer ones first.
    out : 1-d array, optional
        Gets the part.
    op, comm, codec, algorithm, name, feedback, timeout, stats
        As for `allreduce`.

    Returns
    -------
    1-d array, or (array, Stats)
        This rank's part of the sum; its last addition is not quantized, except where halving and
        doubling over a number of ranks that is no power of two sends it on once more.
    """
    args = (comm, op, name, codec, algorithm, feedback, timeout, stats)
    with _checked(*args) as request:
        with request.refusing():
            entry = _buffers.make_entry(x, name or "")
            own = request.own_part(entry.array.size)
            (item,) = _make_items(request, [entry], [None], lambda e: e.array.shape)
            if out is not None:
                target = _buffers.check_out(out, entry.array, (own.stop - own.start,), item.result)
        flat = _reduce_bucket(request, [item], "reduce_scatter")[own]
        part = _cast(flat, item.result)
        if out is not None:
            target[...] = part
            part = out
        return (part, request.stats) if stats else part


def allgather(
    x: Any,
    *,
    comm: CommLike | None = None,
    codec: CodecLike = None,
    algorithm: str = "auto",
    out: Array | None = None,
    name: str | None = None,
    feedback: ErrorFeedback | None = None,
    timeout: float | None = None,
    stats: StatsLike = None,
) -> Any:
    """All ranks' arrays on every rank; collective over comm.

    Parameters
    ----------
    x : array_like
        The same shape and dtype on every rank.
    out : (N,) + x.shape array, optional
        Gets the result.
    comm, codec, algorithm, name, feedback, timeout, stats
        As for `allreduce`.

    Returns
    -------
    (N,) + x.shape array, or (array, Stats)
        Row r is rank r's array, quantized once if a codec is used; the own row too, so that all
        ranks have the same bits.
    """
    args = (comm, "sum", name, codec, algorithm, feedback, timeout, stats)
    with _checked(*args) as request:
        size = request.channel.size
        with request.refusing():
            entry = _buffers.make_entry(x, name or "")
            shape = (size, *entry.array.shape)
            (item,) = _make_items(request, [entry], [None], lambda e: shape, reduced=False)
            if out is not None:
                target = _buffers.check_out(out, entry.array, shape, item.result)
        result = _cast(_gather(request, item).reshape(shape), item.result)
        if out is not None:
            target[...] = result
            result = out
        return (result, request.stats) if stats else result


def _gather(request: _Request, item: _Item) -> Array:
    channel = request.channel
    x = _buffers.flat_input(item.entry.array, item.work)
    full = np.empty(x.size * channel.size, item.work)
    part = request.own_part(full.size)
    own = _with_residuals(request, [item], x)
    rest = None
    if own is not None:
        rest = np.empty_like(full)
        rest[part] = own
    job = calls.Job(
        "allgather",
        item.entry.name,
        x,
        full,
        rest,
        MPI.SUM,
        False,
        item.codec,
        request.codec_from_call,
        request.want == "error",
    )
    nonfinite = calls.run(job, channel, request.options, request.stats)
    if request.want == "error":
        calls.achieved_error(job, x, channel, request.stats)
    if rest is not None:
        _keep_residuals(request, [item], rest[part].copy(), nonfinite)
    return full
