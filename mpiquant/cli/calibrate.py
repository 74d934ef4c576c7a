"""`mpiquant plan --calibrate`: measure the cluster that this job runs on, and keep what was found.

All ranks measure at the same time, as they work at the same time in a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpiquant
from mpiquant._comm import channel_of
from mpiquant.cli import bench_calls, job
from mpiquant.cli.bench_kernels import kernels_of
from mpiquant.cli.bench_measure import world
from mpiquant.codecs import by_name
from mpiquant.coded import mix
from mpiquant.collectives import CODED
from mpiquant.collectives.coding import design
from mpiquant.plan import shown
from mpiquant.plan.segment import LENGTHS
from mpiquant.planner.fit import Sample, fitted
from mpiquant.planner.profile import Profile, Wire, default_file
from mpiquant.sim import KernelCost
from mpiquant.sim.fast import EXCHANGES

CODECS = ("exact", "fp16", "bf16", *(f"q{bits}" for bits in (16, *range(8, 0, -1))), "ternary")
VALUES = 4 << 20
"""Length of the array that kernels are measured on: more than caches hold."""

STREAM_S = 0.3
"""Seconds that a wire is measured for: longer than what buffers and token buckets hold lasts."""

FLIGHT = 4
"""Messages that are posted together."""

NATIVE_NBYTES = (*(8**k for k in range(1, 9)), 64 << 20)
NATIVE_S = 1.0
"""Seconds for each of these, and the longest call that is made again."""

EAGER_NBYTES = tuple(1 << k for k in range(10, 23))
SETTLED_S = 30e-3
"""After so long without a receive, a message that has not gone waits for one."""

SMALL_NBYTES, SMALL_CODECS = (8 << 10, 64 << 10, 512 << 10), ("exact", "q4")
"""Arrays whose times tell what messages and calls cost beside their bytes."""

BURSTS_S, PAUSE_S = (0.5e-3, 1e-3, 2e-3, 4e-3), 20e-3
"""Messages, by the time that they need, that tell what a wire saves up while it is not used; and
how long before each it is not."""

TAG = 77


def run(file: Path | None) -> int:
    comm = world()
    if comm.size == 1:
        raise job.UsageError("--calibrate measures the wires of a job: run it by mpiexec")
    channel = channel_of(comm)
    hosts, mpi = channel.hosts, channel.vendor
    file = file or default_file(mpi, hosts)
    if comm.rank == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
    job.check_writable(comm, file.with_name(file.name + ".part"))
    profile = measure(comm, hosts, mpi)
    if comm.rank == 0:
        profile.save(file)
        print("\n".join(_lines(profile)))
        print(f"# stored in {file}")
    return 0


def measure(comm: MPI.Intracomm, hosts: tuple[int, ...], mpi: str) -> Profile:
    """The profile of a job; collective."""
    network, memory = _wires(comm, hosts)
    found = Profile(
        hosts,
        network,
        memory,
        kernels=_kernels(comm),
        eager_nbytes=_eager_nbytes(comm),
        native=tuple(_native(comm)),
        mpi=mpi,
    )
    calls = list(_small_calls(comm))
    whole: Profile = comm.bcast(fitted(found, calls) if comm.rank == 0 else None)
    return whole


# ---- processors ----


def _kernels(comm: MPI.Intracomm) -> dict[str, KernelCost]:
    """Seconds per value of all codecs' kernels, on the slowest rank."""
    x = np.random.default_rng(comm.rank).standard_normal(VALUES, np.float32)
    y = np.zeros_like(x)
    found = {}
    for name in CODECS:
        work = kernels_of(by_name(name), x, y, LENGTHS[0], 1)
        if name == "exact":
            work |= _exact(x, y)
        costs = [
            _seconds(comm, work[k]) / VALUES for k in ("encode", "decode", "decode_add", "hop")
        ]
        found[name] = KernelCost(*costs)
    found[CODED] = _coded(comm, x, y)
    return found


def _exact(x: np.ndarray, y: np.ndarray) -> dict[str, Callable[[], object]]:
    """Exact values are sent from where they are, and sums are all that is done."""

    def nothing() -> None:
        pass

    def add() -> None:
        np.add(x, y, out=y)

    return {"encode": nothing, "decode": nothing, "decode_add": add, "hop": add}


def _coded(comm: MPI.Intracomm, x: np.ndarray, y: np.ndarray) -> KernelCost:
    """Of the coded ring with two components for each rank."""
    code = design(comm.size, None, np.dtype(np.float32)).code
    encoding, decoding = code.encoding(0), code.decoding(0)
    rows, columns = encoding.shape
    part = VALUES // rows  # each block of the output is as long as one of the input
    parts = [x[i * part : (i + 1) * part] for i in range(columns)]
    outs = [y[i * part : (i + 1) * part] for i in range(rows)]
    values = columns * part
    encode = _seconds(comm, lambda: mix(encoding, parts, outs)) / values
    decode = _seconds(comm, lambda: mix(decoding, parts, outs[:columns])) / values
    add = _seconds(comm, lambda: np.add(x, y, out=y)) / VALUES
    return KernelCost(encode, decode, add, add)


def _seconds(comm: MPI.Intracomm, work: Callable[[], object]) -> float:
    return float(np.median(bench_calls.times(comm, [work], 3, 1)))


# ---- wires ----


def _wires(comm: MPI.Intracomm, hosts: tuple[int, ...]) -> tuple[Wire, Wire]:
    """Between hosts and within one.  On a single host there is but memory; where no two ranks share
    one, it is not measured."""
    most = max(hosts.count(host) for host in set(hosts))
    several = len(set(hosts)) > 1
    network = _wire(comm, most, most, bursts=True) if several else None
    memory = _wire(comm, 1, 1) if most > 1 else Profile.memory
    return network or memory, memory


def _wire(comm: MPI.Intracomm, distance: int, sharing: int, *, bursts: bool = False) -> Wire:
    """What a rank has to the one at some distance, times those that share it.  Memory has no token
    bucket: its bursts are not asked for."""
    right, left = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
    latency, nbytes = _latency_s(comm), 64 << 10
    while True:
        seconds = _stream_s(comm, right, left, nbytes)
        if seconds > STREAM_S or nbytes >= 1 << 30:
            break
        nbytes *= 2 if seconds > STREAM_S / 4 else 4
    again = [_stream_s(comm, right, left, nbytes) for _ in range(2)]
    seconds = float(np.median([seconds, *again]))
    bandwidth = nbytes / seconds
    burst_s = _burst_s(comm, right, left, bandwidth) if bursts else 0.0
    return Wire(sharing * bandwidth, latency, burst_s)


def _burst_s(comm: MPI.Intracomm, right: int, left: int, bandwidth: float) -> float:
    """How much sooner than the wire moves it a message is there, if nothing was sent before."""
    sizes = [8, *(int(bandwidth * seconds) for seconds in BURSTS_S)]
    source, target = np.ones(sizes[-1], np.uint8), np.ones(sizes[-1], np.uint8)
    taken = []
    for nbytes in sizes:
        found = []
        for _ in range(9):
            time.sleep(PAUSE_S)
            comm.Barrier()
            begin = time.perf_counter()
            comm.Sendrecv(source[:nbytes], right, TAG, target[:nbytes], left, TAG)
            found.append(comm.allreduce(time.perf_counter() - begin, MPI.MAX))
        taken.append(float(np.median(found)))
    early = [n / bandwidth + taken[0] - s for n, s in zip(sizes, taken, strict=True)]
    return max(early)  # short messages are all saved up, long ones cost time beside the wire's


def _stream_s(comm: MPI.Intracomm, right: int, left: int, nbytes: int) -> float:
    """Seconds of the slowest rank to send so many bytes to the right, and get them from the left,
    in messages of at most 1 MiB."""
    piece = min(nbytes // FLIGHT, 1 << 20)
    source, target = np.zeros(piece, np.uint8), np.zeros(piece, np.uint8)

    def exchange() -> None:
        ahead: list[MPI.Request] = []
        for _ in range(0, nbytes, FLIGHT * piece):
            requests = [comm.Irecv(target, left, TAG) for _ in range(FLIGHT)]
            requests += [comm.Isend(source, right, TAG) for _ in range(FLIGHT)]
            MPI.Request.Waitall(ahead)  # while the next ones are on their way
            ahead = requests
        MPI.Request.Waitall(ahead)

    return float(bench_calls.times(comm, [exchange], 1, 0)[0, 0])


def _latency_s(comm: MPI.Intracomm) -> float:
    """Half of a small message's way there and back, between the first and the last rank."""
    buffer, peer = np.zeros(8, np.uint8), comm.size - 1
    taken = []
    for _ in range(50):
        comm.Barrier()
        begin = time.perf_counter()
        if comm.rank == 0:
            comm.Send(buffer, peer, TAG)
            comm.Recv(buffer, peer, TAG)
        elif comm.rank == peer:
            comm.Recv(buffer, 0, TAG)
            comm.Send(buffer, 0, TAG)
        taken.append((time.perf_counter() - begin) / 2)
    return float(comm.bcast(np.median(taken)))


def _eager_nbytes(comm: MPI.Intracomm) -> int:
    """Longest message from the first to the last rank that goes without a receive."""
    peer, found = comm.size - 1, 0
    for nbytes in EAGER_NBYTES:
        buffer = np.zeros(nbytes, np.uint8)
        gone = True
        if comm.rank == 0:
            request = comm.Isend(buffer, peer, TAG)
            begin = time.perf_counter()
            while not (gone := request.Test()) and time.perf_counter() - begin < SETTLED_S:
                time.sleep(1e-4)
        comm.Barrier()
        if comm.rank == peer:
            comm.Recv(buffer, 0, TAG)
        if comm.rank == 0:
            request.Wait()
        if not comm.bcast(gone):
            break
        found = nbytes
    return found


# ---- calls ----


def _native(comm: MPI.Intracomm) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of MPI's allreduce."""
    for nbytes in NATIVE_NBYTES:
        x = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)

        def call(x: np.ndarray = x, out: np.ndarray = out) -> None:
            comm.Allreduce(x, out)

        first = float(bench_calls.times(comm, [call], 1, 0)[0, 0])
        repeats = max(1, min(30, int(NATIVE_S / first)))
        seconds = float(np.median(bench_calls.times(comm, [call], repeats, 0)))
        yield nbytes, seconds
        if seconds > NATIVE_S:
            return


def _small_calls(comm: MPI.Intracomm) -> Iterator[Sample]:
    """Our own calls of short arrays."""
    for algorithm, codec, nbytes in product(EXCHANGES, SMALL_CODECS, SMALL_NBYTES):
        x = np.random.default_rng(comm.rank).standard_normal(nbytes // 4, np.float32)
        out = np.empty_like(x)
        work = partial(mpiquant.Allreduce, x, out, codec=codec, algorithm=algorithm)
        seconds = float(np.median(bench_calls.times(comm, [work], 15, 3)))
        yield Sample(algorithm, by_name(codec), nbytes, seconds)


# ---- output ----


def _lines(profile: Profile) -> Iterator[str]:
    hosts = len(set(profile.hosts))
    yield f"# {profile.mpi}, {profile.size} ranks on {hosts} nodes"
    for name, wire in (("network", profile.network), ("memory", profile.memory)):
        rate = 8e-9 * wire.bandwidth
        saved = f", saves up {shown(wire.burst_s)}" if wire.burst_s else ""
        yield f"{name:12}{rate:9.3g} Gbit/s, latency {shown(wire.latency_s)}{saved}"
    yield f"{'message':12}{shown(profile.message_s)} at each end; call {shown(profile.call_s)}"
    yield f"{'eager':12}up to {profile.eager_nbytes} bytes"
    yield f"{'kernels':12}{'encode':>9}{'decode':>9}{'add':>9}{'hop':>9}  ns per value"
    for name, cost in profile.kernels.items():
        values = (cost.encode, cost.decode, cost.decode_add, cost.hop)
        yield f"  {name:10}" + "".join(f"{1e9 * value:9.3f}" for value in values)
    yield f"{'native':12}" + ", ".join(f"{n}: {shown(s)}" for n, s in profile.native)
