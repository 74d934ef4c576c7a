"""Rows of a benchmark: time, bytes and error of one variant at one size."""

from __future__ import annotations

import argparse
import math
import os
import platform
from dataclasses import dataclass
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

import mpiquant
from mpiquant import _kernels
from mpiquant.cli import bench_calls
from mpiquant.cli.bench_figures import bus_factor, overlap_percent
from mpiquant.cli.bench_print import NATIVE, OverlapRow, Row, Variant
from mpiquant.cli.bench_verify import Reference, make_data
from mpiquant.codecs import EXACT, Codec, Sparsifier
from mpiquant.collectives import ALGORITHMS, own_part
from mpiquant.config import current
from mpiquant.plan import segment_length
from mpiquant.program import compile_program
from mpiquant.stats import Stats
from mpiquant.typing import Array


def world() -> MPI.Intracomm:
    return MPI.COMM_WORLD


def environment(comm: MPI.Intracomm) -> dict[str, Any]:
    """What runs, and where; collective."""
    return {
        "hosts": comm.allgather(MPI.Get_processor_name()),
        "mpi": " ".join(MPI.Get_library_version().splitlines()[0].strip(" \0").split()),
        "mpi4py": mpi4py.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "isa": _kernels.isa(),
        "cores": os.cpu_count(),
    }


@dataclass(frozen=True)
class Traffic:
    """Of one call."""

    codec: Codec | None
    """None if nothing was compressed."""
    bits: float
    algorithm: str
    sent: float
    """Bytes of the rank that sends most."""
    moved: float
    """Bytes that the busiest rank must send or receive, whichever is more."""
    ratio: float | None


class Bench:
    """Measures one collective; all methods are collective."""

    def __init__(self, comm: MPI.Intracomm, arguments: argparse.Namespace) -> None:
        self.comm = comm
        self.arguments = arguments
        self.count = 0
        """Elements of the whole array, over all ranks for an allgather."""

    def measure(self, count: int, variant: Variant) -> Row:
        """Time and check one variant on an array of count elements."""
        if count != self.count:
            self._make_arrays(count)
        with mpiquant.options(**_options(self.arguments, variant)):
            seconds = self._seconds(variant)
            phases = self._phases(variant) if self.arguments.phases else None
            self.out.fill(0)
            traffic = self._checked_call(variant)
        wrong, error = self._verdict(traffic)
        return self._row(variant, traffic, seconds, wrong, error, phases)

    def _make_arrays(self, count: int) -> None:
        a, ranks = self.arguments, self.comm.size
        self.count = count
        mine = count // ranks if a.kind == "allgather" else count
        x = make_data(a.op, np.dtype(a.datatype), mine, a.seed, self.comm.rank, ranks)
        own = own_part(count, self.comm.rank, ranks)
        length = own.stop - own.start if a.kind == "reduce_scatter" else count
        whole = a.op == "mean" and x.dtype.kind in "iu"
        self.x, self.out = x, np.zeros(length, np.float64 if whole else x.dtype)
        self.reference = Reference(self.comm, a.kind, a.op, x, a.seed) if a.check else None

    def _seconds(self, variant: Variant) -> Array:
        """A row for each iteration: the call alone, or as `overlap_times`."""
        a = self.arguments
        if variant == NATIVE:
            start = bench_calls.native(self.comm, a, self.x, self.out)
        else:
            start = bench_calls.ours(a, self.x, self.out)
        if a.nonblocking:
            return bench_calls.overlap_times(self.comm, start, a.iters, a.warmup_iters)
        return bench_calls.times(self.comm, [lambda: start()()], a.iters, a.warmup_iters)

    def _phases(self, variant: Variant) -> dict[str, float] | None:
        """Microseconds of a call by what they are spent on, mean over ranks and iterations."""
        if variant == NATIVE or self.arguments.nonblocking:
            return None
        start = bench_calls.ours(self.arguments, self.x, self.out, stats=True)
        taken = [bench_calls.phases(self.comm, start) for _ in range(self.arguments.iters)]
        mean = np.mean(self.comm.allgather(np.mean(taken, axis=0)), axis=0)
        return dict(zip(bench_calls.PHASES, map(_us, mean), strict=True))

    def _checked_call(self, variant: Variant) -> Traffic:
        """Make the call whose result is checked; what it sent."""
        x, out = self.x, self.out
        if variant == NATIVE:
            bench_calls.native(self.comm, self.arguments, x, out)()()
            sent = bus_factor(self.arguments.kind, self.comm.size) * self.count * x.itemsize
            return Traffic(None, 8 * x.itemsize, "native", sent, sent, 1.0)
        result = bench_calls.ours(self.arguments, x, out, stats=True)()()
        stats = result[1] if isinstance(result, tuple) else result
        # Half precision travels as float32, a mean of integers as float64.
        work = np.result_type(out, np.float32) if x.dtype.kind == "f" else out.dtype
        return _traffic(self.comm, self.arguments.kind, self.count, work, variant, stats)

    def _verdict(self, traffic: Traffic) -> tuple[int | None, float | None]:
        """Number of wrong values, and the relative error; None if not asked for."""
        if self.reference is None:
            return None, None
        wrong, error = self.reference.check(self.out, traffic.codec)
        if traffic.algorithm in ALGORITHMS and self.reference.differs(self.out):
            wrong = self.out.size
        return wrong, error if math.isfinite(error) else None

    def _row(
        self,
        variant: Variant,
        traffic: Traffic,
        seconds: Array,
        wrong: int | None,
        error: float | None,
        phases: dict[str, float] | None,
    ) -> Row:
        a, size = self.arguments, self.count * self.x.itemsize
        typical = float(np.median(seconds[:, 0]))
        limit = 8 * traffic.moved / (a.bandwidth or math.inf)
        row = Row(
            size=size,
            count=self.count,
            dtype=a.datatype,
            op=a.op,
            codec=variant.name,
            bits=traffic.bits,
            algo=traffic.algorithm,
            time_us=_us(typical),
            p95_us=_us(np.percentile(seconds[:, 0], 95)),
            algbw=_gbps(size / typical),
            busbw=_gbps(size / typical * bus_factor(a.kind, self.comm.size)),
            wirebw=_gbps(traffic.sent / typical),
            ratio=traffic.ratio,
            err=error,
            wrong=wrong,
            limit_ratio=typical / limit if limit else None,
            phases=phases,
        )
        return _with_overlap(row, seconds) if a.nonblocking else row


def _with_overlap(row: Row, seconds: Array) -> OverlapRow:
    pure, compute, overall = seconds.T
    return OverlapRow(
        **vars(row),
        overall_us=_us(np.median(overall)),
        compute_us=_us(np.median(compute)),
        pure_us=_us(np.median(pure)),
        overlap=round(float(np.median(overlap_percent(pure, compute, overall))), 2),
    )


def _options(arguments: argparse.Namespace, variant: Variant) -> dict[str, Any]:
    """Options of mpiquant's calls, which win over the environment."""
    changes: dict[str, Any] = {"codec": variant.codec, "algorithm": variant.algorithm}
    changes["min_size"] = 0
    if arguments.segment:
        changes["segment"] = arguments.segment
    if arguments.nonblocking:
        changes["progress"] = arguments.progress
    return changes


def _traffic(
    comm: MPI.Intracomm, kind: Any, count: int, work: np.dtype, variant: Variant, stats: Stats
) -> Traffic:
    codec = None if stats.codec == EXACT.spec else variant.codec
    sent = received = stats.wire_bytes + stats.header_bytes
    if stats.algorithm in ALGORITHMS:
        used = codec or EXACT
        if isinstance(codec, Sparsifier):  # its values are an array of their own
            used, count = codec.values, codec.most(count)
        place = (comm.rank, comm.size, count)
        vendor, chunk = MPI.get_vendor()[0], count // comm.size
        segment = segment_length(current().segment, stats.algorithm, used, work, vendor, chunk)
        args = (kind, stats.algorithm, *place, used, work, segment)
        received = stats.header_bytes + sum(m.nbytes for m in compile_program(*args).recvs)
    every = np.array(comm.allgather((stats.raw_bytes, sent, max(sent, received))))
    raw, total, _ = every.sum(axis=0)
    bits = 8 * work.itemsize if codec is None else codec.bits
    most = every.max(axis=0)
    return Traffic(
        codec, bits, stats.algorithm, most[1], most[2], float(raw / total) if total else None
    )


def _us(seconds: float | np.floating[Any]) -> float:
    return round(float(seconds) * 1e6, 3)


def _gbps(rate: float) -> float:
    return float(f"{rate / 1e9:.6g}")
