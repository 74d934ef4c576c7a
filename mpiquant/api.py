"""The functional face: allreduce, Allreduce, their nonblocking forms, reduce_scatter, allgather."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpiquant import _buffers, buckets, config, quick
from mpiquant._buffers import Entry
from mpiquant._call import Call, Steps
from mpiquant._comm import Channel, channel_of
from mpiquant.buckets import Item, Terms
from mpiquant.codecs import BoundedCodec
from mpiquant.collectives import CODED, canonical
from mpiquant.config import Options
from mpiquant.errors import LifecycleError
from mpiquant.feedback import ErrorFeedback
from mpiquant.progress import Waited, drain_at_finalize, engine
from mpiquant.request import Request
from mpiquant.typing import Array, BufSpec, CodecLike, CommLike, OpLike

StatsLike = Literal[True, "error"] | None
_ndarray = np.ndarray


# ---- from arguments to a request ----


def _start(
    prepare: Callable[[Terms], Callable[[], Any]],
    blocking: bool,
    comm: CommLike | None,
    op: OpLike,
    name: str | None,
    feedback: ErrorFeedback | None,
    stats: StatsLike,
    **given: Any,
) -> Any:
    """Check the arguments, launch the calls; the result, or the request of a nonblocking call.

    `prepare` launches the calls of some terms and returns what makes the result from them; `given`
    are options, None where they were not given.
    """
    channel = channel_of(comm, config.current(timeout=given["timeout"]).timeout)
    drain_at_finalize()
    with channel.entered():
        try:
            given["codec"] = _bounded(given["codec"], given.pop("error_bound", None))
            options = _options(**given)
            with_codec = given["codec"] is not None
            terms = _terms(channel, blocking, op, name, with_codec, options, feedback, stats)
            if not blocking and terms.options.progress == "thread":
                engine.start_thread()
            with engine.lock:
                build = prepare(terms)
        except LifecycleError:
            raise
        except Exception as error:
            request = refuse(channel, name, error)
        else:
            stall_s = terms.options.stall_seconds
            request = Request(terms.calls, _finish(terms, build, stats), stall_s)
        if blocking:
            return _wait_uninterrupted(channel, request)
        engine.begin()
        return request


def refuse(channel: Channel, name: str | None, error: Exception) -> Request:
    """A request that makes an exception, raised before any message, an error on every rank."""
    call = Call(channel, str(name or ""))
    call.launch(_raise(error))
    return Request([call], lambda waited: None, None)


def _bounded(codec: CodecLike, error_bound: float | None) -> CodecLike:
    """The codec of a call, which may be given by the error that it may have."""
    if error_bound is None:
        return codec
    if codec is not None:
        raise ValueError("error_bound chooses a codec: give it or a codec, not both")
    return BoundedCodec(absolute=error_bound)


def _options(
    algorithm: str, budget_s: float | None = None, deadline: float | None = None, **given: Any
) -> Options:
    """The options of a call; a budget begins now, for all its buckets."""
    if budget_s is not None and deadline is None:
        deadline = time.perf_counter() + budget_s
    options = config.current(
        algorithm=None if algorithm == "auto" else algorithm,
        budget_s=budget_s,
        deadline=deadline,
        **given,
    )
    if options.deadline is None and options.budget_s is not None:
        options = replace(options, deadline=time.perf_counter() + options.budget_s)
    return options


def _terms(
    channel: Channel,
    blocking: bool,
    op: OpLike,
    name: str | None,
    given: bool,
    options: Options,
    feedback: ErrorFeedback | None,
    stats: StatsLike,
) -> Terms:
    if stats not in (None, False, True, "error"):
        raise ValueError(f"stats is {stats!r}, expected None, True or 'error'")
    if feedback is not None and not isinstance(feedback, ErrorFeedback):
        raise TypeError(f"feedback is a {type(feedback).__name__}, expected ErrorFeedback")
    mpi_op, mean = _parse_op(op)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a {type(name).__name__}, expected a string")
    if feedback is not None and mpi_op != MPI.SUM:
        raise ValueError("feedback needs op 'sum' or 'mean': other results have no residual")
    if feedback is not None and canonical(options.algorithm) == CODED:
        raise ValueError("algorithm 'cerar' keeps no residuals: it takes no feedback")
    measure = stats == "error"
    return Terms(channel, name or "", options, mpi_op, mean, given, feedback, measure, blocking)


def _parse_op(op: OpLike) -> tuple[MPI.Op, bool]:
    if isinstance(op, MPI.Op):
        return op, False
    if op == "sum":
        return MPI.SUM, False
    if op == "mean":
        return MPI.SUM, True
    raise ValueError(f"op is {op!r}, expected 'sum', 'mean' or an MPI.Op")


def _raise(error: Exception) -> Steps[None]:
    raise error
    yield  # makes it a generator


def _finish(terms: Terms, build: Callable[[], Any], stats: StatsLike) -> Callable[[Waited], Any]:
    def finish(waited: Waited) -> Any:
        terms.stats.wait_s += waited.wall_s
        terms.stats.idle_s += waited.idle_s
        for compare in terms.comparisons:
            compare()
        result = build()
        if not stats:
            return result
        return terms.stats if result is None else (result, terms.stats)

    return finish


def _wait_uninterrupted(channel: Channel, request: Request) -> Any:
    """Wait; what ends the wait early, like Ctrl-C, leaves messages that nobody will wait for."""
    try:
        return request.wait()
    except BaseException as error:
        if not isinstance(error, Exception):
            channel.give_up(f"a call was interrupted by {error!r}")
        raise


# ---- allreduce ----


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
    budget_s: float | None = None,
    deadline: float | None = None,
    components: int | None = None,
    cond_max: float | None = None,
    error_max: float | None = None,
    error_bound: float | None = None,
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
        "exact", "fp16", "bf16", "q1" ... "q16", "sign", "ternary", "aqat", "auto", "bounded",
        "top_k", "threshold", "random_k", "block_random_k", one of these with parameters, as
        "top_k(ratio=0.001)", a codec object, or a policy `name, shape -> codec`.  Default: that of
        `options` or MPIQUANT_CODEC; without any, exact.
    algorithm : str
        "auto", "native", "ring", "halving_doubling" or "hd", "direct", "broadcast",
        "parameter_server", "hierarchical", "cerar"; for sparsifiers "sparse_allgather" or
        "sparse_reduce_scatter".
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
    budget_s, deadline : float, optional
        With the codec "aqat": when the call shall end, in seconds from now or on the clock of
        `time.perf_counter`.  It takes as many bits as fit; see `AqatCodec`.
    components, cond_max, error_max : optional
        With the algorithm "cerar": into how many components the array is cut, as many as ranks or
        more, best a multiple of them; and the largest condition number and relative error to be
        expected.  By default twice as many components as ranks, or as many as `error_max` allows.
    error_bound : float, optional
        Largest absolute error of any element of the result: the codec "bounded" with
        ``absolute=error_bound``.  `Stats.error_bound` says what was kept to.

    Returns
    -------
    array, or list, tuple or dict of arrays; or (result, Stats)
        Bit-identical on all ranks, except for what MPI itself reduces and for "cerar", an
        approximation that differs between ranks.

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
    plain = codec is None and feedback is None and timeout is None and not stats
    plain = plain and error_bound is None and algorithm == "auto" and type(x) is np.ndarray
    if plain and (out is None or (type(out) is np.ndarray and out.shape == x.shape)):
        result = quick.reduce(x, out, op, comm, name)
        if result is not None:
            return _wait_quick(result, comm) if isinstance(result, Call) else result
    return _start(
        lambda terms: _prepare_allreduce(terms, x, out),
        *(True, comm, op, name, feedback, stats),
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
        budget_s=budget_s,
        deadline=deadline,
        components=components,
        cond_max=cond_max,
        error_max=error_max,
        error_bound=error_bound,
    )


def iallreduce(
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
    budget_s: float | None = None,
    deadline: float | None = None,
    components: int | None = None,
    cond_max: float | None = None,
    error_max: float | None = None,
    error_bound: float | None = None,
) -> Request:
    """`allreduce` that does not wait; collective over comm.

    Returns
    -------
    Request
        Its `wait()` returns what `allreduce` would.

    Notes
    -----
    All ranks must start the calls on a communicator in the same order; they may wait for them in
    any order.  Errors come with the wait, on all ranks, also those of bad arguments on one.

    Until the call has ended, x is read-only (in so far as it was not copied, and is
    not itself the output), and `out` must not be touched.

    A call moves on in the waits and tests of any request, in other calls of this package, and with
    the option progress="thread" all the time.  Several threads may wait, but only one at a time
    may start calls on a communicator.

    See `allreduce` for the parameters; the timeout is that of the wait.
    """
    request: Request = _start(
        lambda terms: _prepare_allreduce(terms, x, out),
        *(False, comm, op, name, feedback, stats),
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
        budget_s=budget_s,
        deadline=deadline,
        components=components,
        cond_max=cond_max,
        error_max=error_max,
        error_bound=error_bound,
    )
    return request


def _prepare_allreduce(terms: Terms, x: Any, out: Any) -> Callable[[], Any]:
    entries, rebuild = _buffers.flatten(x, terms.name)
    outs = _buffers.flatten_like(out, x)
    items = buckets.make_items(terms, entries, outs, lambda e: e.array.shape)
    results: dict[str, Any] = {}
    for bucket in buckets.make_buckets(items, terms.options.bucket_bytes):
        _launch(terms, bucket, results)
    if len(entries) == len(items) == 1 and entries[0].array.size:
        quick.remember(terms, items[0])
    return lambda: rebuild([results[entry.name] for entry in entries])


def _launch(terms: Terms, bucket: list[Item], results: dict[str, Any]) -> None:
    def deliver(flat: Array) -> None:
        begin = 0
        for item in bucket:
            part = flat[begin : begin + item.count]
            results[item.entry.name] = buckets.deliver_item(item, part)
            begin += item.count

    buckets.launch_reduction(terms, bucket, "allreduce", deliver)
    if not terms.blocking:
        inputs = [i.entry.array for i in bucket if not _is_output(i)]
        terms.calls[-1].when_done.append(_buffers.lock(inputs))


def _is_output(item: Item) -> bool:
    return item.out is not None and np.may_share_memory(item.out, item.entry.array)


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
    components: int | None = None,
    cond_max: float | None = None,
    error_max: float | None = None,
    error_bound: float | None = None,
) -> Any:
    """Like `MPI.Comm.Allreduce`, with compression; collective over comm.

    Parameters
    ----------
    sendbuf, recvbuf : buffer or [buffer, count, datatype]
        As mpi4py takes them; sendbuf may be MPI.IN_PLACE.  What is not a plain contiguous run of
        numbers (derived datatypes, displacements) is reduced by MPI itself.
    op, comm, codec, algorithm, name, feedback, timeout, stats, components, cond_max, error_max,
    error_bound
        As for `allreduce`.

    Returns
    -------
    None, or Stats if asked for
    """
    if (
        codec is None
        and error_bound is None
        and feedback is None
        and timeout is None
        and not stats
        and algorithm == "auto"
        and type(sendbuf) is _ndarray
        and type(recvbuf) is _ndarray
    ):
        result = quick.reduce(sendbuf, recvbuf, op, comm, name)
        if result is not None:
            if isinstance(result, Call):
                _wait_quick(result, comm)
            return None
    return _start(
        lambda terms: _prepare_buffers(terms, sendbuf, recvbuf),
        *(True, comm, op, name, feedback, stats),
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
        components=components,
        cond_max=cond_max,
        error_max=error_max,
        error_bound=error_bound,
    )


def Iallreduce(
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
    components: int | None = None,
    cond_max: float | None = None,
    error_max: float | None = None,
    error_bound: float | None = None,
) -> Request:
    """Like `MPI.Comm.Iallreduce`, with compression; collective over comm.

    Returns
    -------
    Request
        See `iallreduce` for what holds until it has ended.

    See `Allreduce` for the parameters.
    """
    request: Request = _start(
        lambda terms: _prepare_buffers(terms, sendbuf, recvbuf),
        *(False, comm, op, name, feedback, stats),
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
        components=components,
        cond_max=cond_max,
        error_max=error_max,
        error_bound=error_bound,
    )
    return request


def _prepare_buffers(terms: Terms, sendbuf: BufSpec, recvbuf: BufSpec) -> Callable[[], None]:
    target = _buffers.from_spec(recvbuf, "recvbuf")
    in_place = sendbuf is MPI.IN_PLACE or sendbuf is None
    source = target if in_place else _buffers.from_spec(sendbuf, "sendbuf")
    if source is None or target is None or not _same_numbers(source, target):
        if terms.mean:
            raise ValueError("op 'mean' needs plain arrays of numbers")
        buckets.launch_buffers(terms, sendbuf, recvbuf)
        return lambda: None
    if source.size != target.size:
        raise ValueError(f"sendbuf has {source.size} elements, recvbuf has {target.size}")
    entry = Entry(terms.name, source, False)
    items = buckets.make_items(terms, [entry], [target], lambda e: e.array.shape)
    _launch(terms, items, {})
    if source.size:
        quick.remember(terms, items[0])
    return lambda: None


def _same_numbers(a: Array, b: Array) -> bool:
    """Whether both hold numbers of one dtype, in whatever byte order."""
    return a.dtype.kind in "iufc" and a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")


def _wait_quick(call: Call, comm: CommLike | None) -> Any:
    request = Request([call], lambda waited: call.result, config.current().stall_seconds)
    return _wait_uninterrupted(channel_of(comm), request)


# ---- the other collectives ----


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
    return _start(
        lambda terms: _prepare_scatter(terms, x, out),
        *(True, comm, op, name, feedback, stats),
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
    )


def _prepare_scatter(terms: Terms, x: Any, out: Array | None) -> Callable[[], Any]:
    entry = _buffers.make_entry(x, terms.name)
    own = terms.own_part(entry.array.size)
    (item,) = buckets.make_items(terms, [entry], [None], lambda e: e.array.shape)
    shape = (own.stop - own.start,)
    deliver, result = _into(out, entry, shape, item.result, lambda flat: flat[own])
    buckets.launch_reduction(terms, [item], "reduce_scatter", deliver)
    return result


def _into(
    out: Array | None,
    entry: Entry,
    shape: tuple[int, ...],
    dtype: np.dtype,
    select: Callable[[Array], Array],
) -> tuple[Callable[[Array], None], Callable[[], Any]]:
    """What takes the flat result of a call, and what returns it as the user wants it."""
    target = None if out is None else _buffers.check_out(out, entry.array, shape, dtype)
    results: list[Any] = []

    def deliver(flat: Array) -> None:
        values = buckets.cast(select(flat), dtype)
        if target is None:
            results.append(values)
        else:
            target[...] = values
            results.append(out)

    return deliver, lambda: results[0]


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
    return _start(
        lambda terms: _prepare_gather(terms, x, out),
        *(True, comm, "sum", name, feedback, stats),
        codec=codec,
        algorithm=algorithm,
        timeout=timeout,
    )


def _prepare_gather(terms: Terms, x: Any, out: Array | None) -> Callable[[], Any]:
    entry = _buffers.make_entry(x, terms.name)
    shape = (terms.channel.size, *entry.array.shape)
    (item,) = buckets.make_items(terms, [entry], [None], lambda e: shape, reduced=False)
    deliver, result = _into(out, entry, shape, item.result, lambda flat: flat.reshape(shape))
    buckets.launch_gathering(terms, item, deliver)
    return result
