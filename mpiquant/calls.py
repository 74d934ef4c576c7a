"""One collective on one flat array: from the decision to the result.

The faces in `mpiquant.api` turn what the user passes into `Job`s; here a job becomes a plan, is
agreed on with the other ranks and runs, on the schedules or natively.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from mpi4py import MPI

from mpiquant import _kernels, trace
from mpiquant._agreement import Plan, plan_of
from mpiquant._call import Call, Steps
from mpiquant._comm import Channel
from mpiquant.adaptive import AdaptiveExecution
from mpiquant.auto import expected, tuner_of
from mpiquant.codecs import EXACT, AqatCodec, AutoCodec, BoundedCodec, Codec, Sparsifier
from mpiquant.codecs._block import mix_key
from mpiquant.codecs.bounded import INTEGERS, largest_magnitude, rounding
from mpiquant.coded import CodedExecution
from mpiquant.collectives import BROADCAST, CODED, GATHER, HIERARCHICAL, SPLIT, canonical, own_part
from mpiquant.collectives.coding import Code, Design, Perturbed, RootsOfUnity, design
from mpiquant.config import Options
from mpiquant.execute import Execution
from mpiquant.hierarchical import place_of, run_hierarchical, runs
from mpiquant.job import Job, op_name
from mpiquant.plan import Choice, choose, choose_across, choose_sparse, segment_length
from mpiquant.program import Kind, Program, compile_program
from mpiquant.sparse import SparseExchange
from mpiquant.stats import Stats
from mpiquant.swap import run_swap, swap_of
from mpiquant.typing import Array

MAX_COUNT = 2**31 - 1
"""Most elements of one native MPI call."""

BLOCKING_NBYTES = 256 << 10
"""From this size on, a blocking native call is agreed on by all ranks each time and is MPI's own
blocking one, which is faster than its nonblocking one in some MPIs; below, the nonblocking one,
during which we can see to other things."""


def decide(job: Job, options: Options, size: int) -> Choice:
    """Algorithm and codec of a job; the same on all ranks."""
    dtype = job.x.dtype
    native_because = exact_because = None
    if job.op != MPI.SUM:
        native_because = f"op {op_name(job.op)} is MPI's"
    elif dtype.kind == "b":
        native_because = "booleans are MPI's"
    algorithm = canonical(options.algorithm)
    if algorithm in (BROADCAST, HIERARCHICAL, CODED) and job.kind != "allreduce":
        raise ValueError(f"a {job.kind} has no algorithm {algorithm!r}")
    if algorithm == CODED and dtype in (np.float32, np.float64) and native_because is None:
        return _coded(job)
    if dtype not in (np.float32, np.float64):
        exact_because = f"{dtype} is never compressed"
    elif not job.codec.lossy:
        exact_because = "no codec was given"
    elif not job.from_call and job.x.size < options.min_size:
        exact_because = f"fewer than min_size={options.min_size} elements"
    if isinstance(job.codec, Sparsifier) and not (exact_because or native_because):
        return _sparse(job, job.codec, algorithm, size)
    return choose(
        "ring" if algorithm in (CODED, GATHER, SPLIT) else algorithm,  # for what it cannot do
        size=size,
        wire_nbytes=0 if exact_because else job.codec.nbytes(job.out.size, dtype),
        exact_because=exact_because,
        native_because=native_because,
    )


def _coded(job: Job) -> Choice:
    if job.from_call and job.codec.lossy:
        raise ValueError("algorithm 'cerar' sends plain numbers: it takes no codec")
    return Choice(CODED, False, "cerar was asked for")


def _sparse(job: Job, codec: Sparsifier, algorithm: str, size: int) -> Choice:
    if job.kind != "allreduce":
        raise ValueError(f"a {job.kind} has no codec {codec.spec!r}")
    if codec.shared:  # what carries its values is chosen with them
        return Choice(algorithm, True, "all ranks send values at the same positions")
    return choose_sparse(algorithm, size=size, drawn=codec.drawn)


@lru_cache
def _designed(
    size: int,
    components: int | None,
    dtype: np.dtype,
    cond_max: float | None,
    error_max: float | None,
) -> Design:
    return design(size, components, dtype, cond_max=cond_max, error_max=error_max)


def coded_ring(options: Options, size: int, dtype: np.dtype) -> Design:
    """The code that the options ask for; the same on all ranks."""
    return _designed(size, options.components, dtype, options.cond_max, options.error_max)


@lru_cache
def _code_of_turn(found: Design, flipped: bool) -> Code:
    """The code of every other call is flipped, so that errors of a lasting sign cancel."""
    assert isinstance(found.code, Perturbed | RootsOfUnity)
    return replace(found.code, flipped=flipped)


def plan_for(
    job: Job,
    choice: Choice,
    options: Options,
    codec: Codec,
    channel: Channel,
    *,
    blocking: bool,
    timed: bool = False,
) -> Plan:
    """What the ranks agree on for a job; a timed native one begins when all ranks are there."""
    native, nbytes = choice.algorithm == "native", job.out.nbytes
    swap = native and swap_of(job.kind, job.op, nbytes, channel) is not None
    length = job.out.size // channel.size
    args = (options.segment, choice.algorithm, codec, job.x.dtype, channel.vendor, length)
    segment = 0 if codec.sparse else segment_length(*args)
    return plan_of(
        kind=job.kind,
        count=job.out.size,
        dtype=job.x.dtype.str,
        op="mean" if job.mean else op_name(job.op),
        codec=job.within or codec.spec,
        algorithm=choice.algorithm,
        segment=segment,
        feedback=job.rest is not None,
        measured=job.measured,
        blocking=native and blocking and not swap and (timed or nbytes >= BLOCKING_NBYTES),
        check=options.check,
        name=job.name,
    )


def collective(
    job: Job, call: Call, options: Options, stats: Stats, *, blocking: bool
) -> Steps[bool]:
    """Carry out a job; True if the result has non-finite values (only told with feedback).

    Collective over the channel's communicator.
    """
    channel = call.channel
    if channel.size == 1:
        return _run_alone(job, stats)
    choice = decide(job, options, channel.size)
    codec = job.codec if choice.compress else EXACT
    if isinstance(codec, AutoCodec):
        return (yield from _run_auto(job, call, codec, options, stats, blocking=blocking))
    if isinstance(codec, Sparsifier) and codec.shared:
        return (yield from _run_shared(job, call, codec, options, stats, blocking=blocking))
    return (yield from _run_choice(job, call, codec, choice, options, stats, blocking=blocking))


def _run_choice(
    job: Job,
    call: Call,
    codec: Codec,
    choice: Choice,
    options: Options,
    stats: Stats,
    *,
    blocking: bool,
    timed: bool = False,
) -> Steps[bool]:
    channel, found = call.channel, None
    if choice.algorithm == CODED:
        found = coded_ring(options, channel.size, job.x.dtype)
        choice = replace(choice, reason=f"{choice.reason}: {_expected(found)}")
    stats.chose(choice.algorithm, job.within or codec.spec, choice.reason)
    if found is not None:
        choice = replace(choice, algorithm=str(found.code))  # all of it is agreed on
    plan = plan_for(job, choice, options, codec, channel, blocking=blocking, timed=timed)
    yield from call.open(plan)
    if choice.algorithm == "native":
        return (yield from _run_native(job, call, stats))
    if found is not None:
        return (yield from _run_coded(job, call, found, stats, plan.segment))
    if isinstance(codec, Sparsifier):
        return (yield from _run_sparse(job, call, codec, choice.algorithm, stats))
    if isinstance(codec, BoundedCodec):
        return (yield from _run_bounded(job, call, codec, choice.algorithm, options, stats))
    return (yield from _run_dense(job, call, codec, choice.algorithm, options, stats))


def _run_auto(
    job: Job, call: Call, codec: AutoCodec, options: Options, stats: Stats, *, blocking: bool
) -> Steps[bool]:
    """Run a job the way that its tuner says, and tell the tuner what that took."""
    tuner = tuner_of(job, codec, options, call.channel, blocking=blocking)
    turn = tuner.turn()
    # What the ranks then agree on is to be known where the next call is opened.
    call.alone = turn.closes
    algorithm, chosen = turn.way.algorithm, turn.way.codec
    # A settled native call goes the short way (`mpiquant.quick`): what is around it here is not its
    # time.  That of other calls begins with their launch, if nothing but the caller waited since.
    timed = algorithm == "native" and blocking and turn.round >= 0
    begin = call.launched if blocking else time.perf_counter()
    native_s = stats.native_s
    choice = Choice(algorithm, chosen.lossy, turn.reason)
    nonfinite = yield from _run_choice(
        job, call, chosen, choice, options, stats, blocking=blocking, timed=timed
    )
    tuner.note(turn, stats.native_s - native_s if timed else time.perf_counter() - begin)
    if turn.closes:
        told = tuner.times
        if turn.asks:
            told = expected(tuner.ways, job.out.nbytes, call.channel)
        least = -(yield from call.largest([-seconds for seconds in told]))
        (tuner.expect if turn.asks else tuner.agree)([float(seconds) for seconds in least])
    return nonfinite


def _run_dense(
    job: Job, call: Call, codec: Codec, algorithm: str, options: Options, stats: Stats
) -> Steps[bool]:
    if algorithm == BROADCAST:
        return (yield from _run_broadcast(job, call, codec, options, stats))
    if algorithm == HIERARCHICAL:
        return (yield from _run_hierarchical(job, call, codec, options, stats))
    assert call.plan is not None
    place = call.channel.rank, call.channel.size
    shape = job.out.size, codec, job.x.dtype
    program = compile_program(job.kind, algorithm, *place, *shape, call.plan.segment)
    nonfinite = yield from _run_schedule(job, call, program, codec, options, stats)
    if job.kind == "reduce_scatter" and job.rest is not None:
        nonfinite = yield from call.any(nonfinite)  # here no rank sees the others' parts
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


def _run_schedule(
    job: Job, call: Call, program: Program, codec: Codec, options: Options, stats: Stats
) -> Steps[bool]:
    x, own = job.x, own_part(job.out.size, call.channel.rank, call.channel.size)
    if job.kind == "allgather":
        job.out[own] = job.x
        x = job.out
    stream = mix_key(call.channel.rank, call.seq)
    args = (program, call, x, job.out, job.rest, stream, stats)
    execution: Execution | AdaptiveExecution
    if isinstance(codec, AqatCodec):
        if options.deadline is None:
            raise ValueError("codec 'aqat' needs budget_s= or deadline= to choose its bits by")
        links, deadline = call.channel.links, options.deadline
        execution = AdaptiveExecution(*args, codec=codec, links=links, deadline=deadline)
        call.when_done.append(execution.abandon)
    else:
        execution = Execution(*args)
        if not codec.ragged:
            trace.active.count("bits", job.x.itemsize * 8 if program.exact else codec.bits)
    call.opened = True
    if program.gate:
        yield from call.finish_agreement()
    execution.start()
    yield from call.finish_agreement()
    call.waits_for = execution.waits_for
    while not execution.advance():
        yield execution.has_moved()
    stats.raw_bytes += program.raw_nbytes
    stats.header_bytes += call.header_bytes
    if job.rest is None:
        return False
    for begin, end in program.never_encoded:
        job.rest[begin:end] = 0
    if job.kind == "reduce_scatter":
        return not np.all(np.isfinite(job.out[own]))
    return execution.nonfinite or (program.exact and not np.all(np.isfinite(job.out)))


def _expected(found: Design) -> str:
    return f"{found.code.components} components, error {found.error:.1e} on normal data"


def _run_coded(job: Job, call: Call, found: Design, stats: Stats, segment: int) -> Steps[bool]:
    size, rank = call.channel.size, call.channel.rank
    code = _code_of_turn(found, call.seq % 2 == 1)
    execution = CodedExecution(code, rank, call, job.x, job.out, segment, stats)
    call.opened = True
    execution.start()
    yield from call.finish_agreement()
    call.waits_for = execution.waits_for
    while not execution.advance():
        yield execution.has_moved()
    stats.raw_bytes += round(2 * (size - 1) / size * job.out.nbytes)
    stats.header_bytes += call.header_bytes
    return False


def _run_sparse(
    job: Job, call: Call, codec: Sparsifier, algorithm: str, stats: Stats
) -> Steps[bool]:
    exchange = SparseExchange(job, call, codec, stats)
    call.opened = True
    yield from call.finish_agreement()
    return (yield from exchange.run(algorithm))


def _run_shared(
    job: Job, call: Call, codec: Sparsifier, options: Options, stats: Stats, *, blocking: bool
) -> Steps[bool]:
    """Add up the values at positions that all ranks choose alike, as an array of their own."""
    begin = time.perf_counter()
    source = job.x if job.rest is None else job.rest
    at = codec.positions(source, mix_key(call.seq))
    x = source[at]
    lossy = job.rest is not None and codec.values.lossy
    values = replace(
        job,
        x=x,
        out=np.empty_like(x),
        rest=x.copy() if lossy else None,
        codec=codec.values,
        from_call=True,
        within=codec.spec,
    )
    stats.encode_s += time.perf_counter() - begin
    nonfinite = yield from collective(values, call, options, stats, blocking=blocking)
    begin = time.perf_counter()
    job.out[...] = 0
    job.out[at] = values.out
    if job.rest is not None:
        job.rest[at] = 0 if values.rest is None else values.rest
        nonfinite = nonfinite or not np.all(np.isfinite(values.out))
    stats.decode_s += time.perf_counter() - begin
    return nonfinite


def _run_bounded(
    job: Job, call: Call, codec: BoundedCodec, algorithm: str, options: Options, stats: Stats
) -> Steps[bool]:
    """Sum up integers of one step, without loss; they lie where the result will be."""
    yield from call.finish_agreement()
    call.opened = True
    rank, size, dtype = call.channel.rank, call.channel.size, job.x.dtype
    own = own_part(job.out.size, rank, size)
    mine, made = slice(None), slice(None)
    if job.kind == "allgather":
        mine, size = own, 1
    elif job.kind == "reduce_scatter":
        made = own
    rest = None if job.rest is None else job.rest[mine]
    source = job.x if rest is None else rest
    (magnitude,) = yield from call.largest([largest_magnitude(source)])
    largest = float(magnitude)
    step = codec.step(largest, size, dtype, mean=job.mean)
    if step is None:
        return (yield from _run_dense(job, call, EXACT, algorithm, options, stats))
    begin = time.perf_counter()
    integers = job.out.view(np.dtype(f"i{dtype.itemsize}"))
    lost = _kernels.to_integers(source, step, integers[mine], rest)
    stats.encode_s += time.perf_counter() - begin
    sums = replace(job, x=integers[mine], out=integers, rest=None, codec=INTEGERS)
    yield from _run_dense(sums, call, INTEGERS, algorithm, options, stats)
    begin = time.perf_counter()
    _kernels.from_integers(integers[made], step, job.out[made])
    stats.decode_s += time.perf_counter() - begin
    (loss,) = yield from call.largest([lost])
    bound = size * float(loss) + rounding(largest, size, dtype)
    stats.error_bound = max(stats.error_bound or 0.0, bound / size if job.mean else bound)
    return False


def _run_broadcast(
    job: Job, call: Call, codec: Codec, options: Options, stats: Stats
) -> Steps[bool]:
    """Whole arrays from each rank to all others; each adds them up, in the order of the ranks."""
    assert call.plan is not None
    rank, size, count = call.channel.rank, call.channel.size, job.x.size
    rows = np.empty((size, count), job.x.dtype)
    rest = None
    if job.rest is not None:
        rest = np.empty(rows.size, job.x.dtype)
        rest[own_part(rows.size, rank, size)] = job.rest
    gathering = replace(job, kind="allgather", out=rows.reshape(-1), rest=rest)
    program = compile_program(
        "allgather", "direct", rank, size, rows.size, codec, job.x.dtype, call.plan.segment
    )
    nonfinite = yield from _run_schedule(gathering, call, program, codec, options, stats)
    np.copyto(job.out, rows[0])
    for row in rows[1:]:
        np.add(job.out, row, out=job.out)
    if job.rest is not None and rest is not None:
        job.rest[...] = rest[own_part(rows.size, rank, size)]
    return nonfinite


def _run_hierarchical(
    job: Job, call: Call, codec: Codec, options: Options, stats: Stats
) -> Steps[bool]:
    """Exactly within nodes, with the codec across them."""
    assert call.plan is not None
    yield from call.finish_agreement()
    call.opened = True
    length, nodes = options.ranks_per_node, call.channel.nodes
    place = place_of(call.channel.rank, runs(call.channel.size, length) if length else nodes)
    rest, segment = job.rest, call.plan.segment
    lost: list[tuple[slice, Array]] = []

    def across(total: Array, lane: slice) -> Steps[None]:
        part = replace(job, x=total, out=job.out[lane], rest=None if rest is None else total.copy())
        if part.rest is not None:
            lost.append((lane, part.rest))
        if len(place.across) == 1:
            np.copyto(part.out, total)
            _settle_exact(part)
            return
        args = (place.across.index(call.channel.rank), len(place.across), total.size, codec)
        way = choose_across(len(place.across), codec.nbytes(total.size, total.dtype))
        program = compile_program("allreduce", way, *args, total.dtype, segment, place.across)
        yield from _run_schedule(part, call, program, codec, options, stats)

    yield from run_hierarchical(
        call, place, job.x if rest is None else rest, job.out, stats, across
    )
    if rest is None:
        return False
    rest[...] = 0
    for lane, residual in lost:
        rest[lane] = residual
    return not np.all(np.isfinite(job.out))


def _run_native(job: Job, call: Call, stats: Stats) -> Steps[bool]:
    size = call.channel.size
    begin = time.perf_counter()
    steps: Steps[float | None]
    if job.kind == "allgather":
        own = own_part(job.out.size, call.channel.rank, size)
        steps = _gather_native(call, job.x if job.rest is None else job.rest[own], job.out)
    else:
        steps = _reduce_native(call, job.x if job.rest is None else job.rest, job.out, job.op)
    taken = yield from steps
    end = time.perf_counter()
    stats.native_s += end - begin if taken is None else taken
    trace.active.overlapping("wire", f"native {job.kind}", begin, end, nbytes=job.out.nbytes)
    moved = (1 if job.kind == "allgather" else 2) * (size - 1) * job.out.nbytes // size
    stats.wire_bytes += moved
    stats.raw_bytes += moved
    stats.header_bytes += call.header_bytes
    return _settle_exact(job)


def _reduce_native(call: Call, x: Array, out: Array, op: MPI.Op) -> Steps[float | None]:
    """MPI's Allreduce, in pieces that its int counts can hold; seconds in it, if it is blocking."""
    assert call.plan is not None
    comm = call.channel.native
    in_place = x.__array_interface__["data"] == out.__array_interface__["data"]
    swap = swap_of(call.plan.kind, op, out.nbytes, call.channel)
    if swap is not None:
        yield from run_swap(call, swap, x, out, op, in_place=in_place)
        return None
    taken = 0.0
    for begin in range(0, x.size, MAX_COUNT):
        part = slice(begin, begin + MAX_COUNT)
        send = MPI.IN_PLACE if in_place else x[part]
        if call.plan.blocking:
            blocking = partial(comm.Allreduce, send, out[part], op)
            taken += yield from call.until_called(blocking)
        else:
            request = comm.Iallreduce(send, out[part], op)
            call.opened = begin + MAX_COUNT >= x.size
            yield from call.until_native(request, send, out)
    return taken if call.plan.blocking else None


def _gather_native(call: Call, x: Array, out: Array) -> Steps[None]:
    comm, size = call.channel.native, call.channel.size
    rows = out.reshape(size, -1)
    if x.size <= MAX_COUNT // size:
        request = comm.Iallgather(x, rows)
        call.opened = True
        yield from call.until_native(request, x, rows)
        return
    for rank in range(size):
        if rank == call.channel.rank:
            rows[rank] = x
        for begin in range(0, x.size, MAX_COUNT):
            request = comm.Ibcast(rows[rank, begin : begin + MAX_COUNT], rank)
            yield from call.until_native(request, rows)


def exact_result(job: Job, x: Array, call: Call, options: Options) -> Steps[Array]:
    """The exact result of a job for the same input, in float64, with messages of its call."""
    channel = call.channel
    dtype = job.x.dtype
    if job.op != MPI.SUM or dtype.kind == "b":
        return job.out.copy()  # MPI's own, which loses nothing that float64 would keep
    wide = np.result_type(dtype, np.float64) if dtype.kind in "fc" else dtype
    kind: Kind = "allgather" if job.kind == "allgather" else "allreduce"
    out = np.empty(job.out.size, wide)
    source = x.astype(wide)
    if kind == "allgather":
        out[own_part(out.size, channel.rank, channel.size)] = source
        source = out
    elif channel.size == 1:
        return source
    chunk = out.size // channel.size
    segment = segment_length(options.segment, "ring", EXACT, wide, channel.vendor, chunk)
    args = (channel.rank, channel.size, out.size, EXACT, wide, segment)
    program = compile_program(kind, "ring", *args)
    execution = Execution(program, call, source, out, None, 0, Stats())
    execution.start()
    while not execution.advance():
        yield execution.has_moved()
    return out
