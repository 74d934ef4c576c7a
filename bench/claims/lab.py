"""`make claims-lab`: speed at the limit of an emulated wire, against every MPI.

Exit code 1 if a point falls short.  Run it on an otherwise idle machine, as root on Linux, with
.venv/mpich, .venv/openmpi and .venv/intel (which `make claims-lab` makes).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from _report import ROOT, Claims, rows_on_ranks, run_parts

sys.path.insert(0, str(ROOT / "bench" / "lab"))
import measure

Row = dict[str, Any]

SPEEDUPS = {"q8": 3.7, "q4": 7.2, "q2": 13.0}
"""Times as fast as the best native allreduce, by codec."""

LIMITS = {
    ("mpich", "1gbit"): {"q8": 1.08, "q4": 1.08, "q2": 1.12},
    ("mpich", "200mbit"): {"q8": 1.08, "q4": 1.08, "q2": 1.08, "q1": 1.08},
    ("mpich", "2.5gbit"): {"q8": 1.15, "q4": 1.30},
    ("openmpi", "1gbit"): {"q8": 1.12, "q4": 1.12, "q2": 1.25},
}
"""Times the bits-adjusted limit of the link, 4 hosts, 64 MiB."""

ITERS = {"200mbit": 5, "1gbit": 20, "2.5gbit": 20}


def iters(rate: str, warmup: int = 2) -> list[str]:
    return ["-n", str(ITERS[rate]), "-w", str(warmup)]


def sizes(first: str, last: str, factor: int = 4) -> list[str]:
    return ["-b", first, "-e", last, "-f", str(factor)]


def large_ring(codecs: str, rate: str) -> list[str]:
    return ["--codec", codecs, "--algo", "ring", *sizes("64M", "64M"), *iters(rate)]


def row_of(rows: Iterable[Row], codec: str, algo: str | None = None, size: int = 0) -> Row:
    return next(
        row
        for row in rows
        if row["codec"] == codec and algo in (None, row["algo"]) and size in (0, row["size"])
    )


# ---- speed at the limit ----


def limits(claims: Claims) -> None:
    """Ring at 64 MiB on 4 hosts: against the limit, and against native of every MPI."""
    for rate in ITERS:
        rows: dict[str, list[Row]] = {}
        for mpi in ("mpich", "openmpi"):
            if (mpi, rate) in LIMITS or rate == "200mbit":
                options = large_ring("q8,q4,q2,q1", rate)
                with measure.wire(4, rate):
                    rows[mpi] = measure.bench(mpi, 4, rate, *options)["results"]
                _against_limit(claims, mpi, rate, rows[mpi])
        natives = {f"{mpi} tuned": row_of(found, "native") for mpi, found in rows.items()}
        natives |= _other_natives(rate)
        _against_native(claims, rate, natives, rows)


def _against_limit(claims: Claims, mpi: str, rate: str, rows: list[Row]) -> None:
    bounds = LIMITS.get((mpi, rate), {})
    for row in rows:
        point = f"4 hosts, {mpi}, {rate}, {row['codec']} {row['algo']}: times the limit"
        bound = bounds.get(row["codec"])
        if bound is None:
            claims.report(point, row["limit_ratio"])
        else:
            claims.at_most(point, row["limit_ratio"], bound)


def _other_natives(rate: str) -> dict[str, Row]:
    """MPI's own allreduce: Intel's, and that of each as it comes."""
    found = {}
    cases = [("intel", False)]
    if rate == "1gbit":
        cases += [(mpi, True) for mpi in ("mpich", "openmpi", "intel")]
    for mpi, default in cases:
        options = ["--codec", "exact", "--algo", "native", *sizes("64M", "64M"), *iters(rate)]
        with measure.wire(4, rate):
            report = measure.bench(mpi, 4, rate, *options, default=default)
        name = f"{mpi} {'default' if default else 'tuned'}"
        found[name] = row_of(report["results"], "native")
    return found


def _against_native(
    claims: Claims, rate: str, natives: dict[str, Row], rows: dict[str, list[Row]]
) -> None:
    for name, native in natives.items():
        point = f"4 hosts, native {name}, {rate}: times the limit"
        claims.report(point, native["limit_ratio"])
    best = min(row["time_us"] for row in natives.values())
    for mpi, found in rows.items():
        for codec, bound in SPEEDUPS.items():
            ours = row_of(found, codec)["time_us"]
            point = f"4 hosts, {mpi}, {rate}, {codec}: times as fast as the best native"
            if mpi == "mpich" and rate in ("1gbit", "200mbit"):
                claims.at_least(point, best / ours, bound)
            else:
                claims.report(point, best / ours)
            for name, native in natives.items():
                if name.endswith("default"):
                    point = f"4 hosts, {mpi}, {rate}, {codec}: times as fast as {name}"
                    claims.report(point, native["time_us"] / ours)


def eight_hosts(claims: Claims) -> None:
    """The same on 8 hosts, and which algorithm is best for small messages."""
    for rate in ("200mbit", "1gbit"):
        codecs = ["q8", "q4", "q2", *(["q1"] if rate == "200mbit" else [])]
        options = large_ring(",".join(codecs), rate)
        with measure.wire(8, rate):
            rows = measure.bench("mpich", 8, rate, *options)["results"]
        for row in rows:
            point = f"8 hosts, mpich, {rate}, {row['codec']}: times the limit"
            bound = 1.08 * 1.15
            if rate == "200mbit" and row["codec"] in codecs:
                claims.at_most(point, row["limit_ratio"], bound)
            else:
                claims.report(point, row["limit_ratio"])
    _crossover(claims)


def _crossover(claims: Claims) -> None:
    rate = "1gbit"
    options = ["--codec", "q8", "--algo", "ring,halving_doubling,direct", *sizes("4K", "4M")]
    with measure.wire(8, rate):
        rows = measure.bench("mpich", 8, rate, *options, "-n", "60", "-w", "5")["results"]
    for size in sorted({row["size"] for row in rows}):
        times = {
            algo: row_of(rows, "q8", algo, size)["time_us"]
            for algo in ("ring", "halving_doubling", "direct")
        }
        for algo in ("halving_doubling", "direct"):
            point = f"8 hosts, {rate}, q8, {size >> 10} KiB: {algo} / ring"
            figure = times[algo] / times["ring"]
            if size < 256 << 10:
                claims.check(point, figure, "< 1", figure < 1)
            else:
                claims.report(point, figure)


def uncompressed(claims: Claims) -> None:
    """Our ring without compression against native, 4 hosts."""
    for mpi in ("mpich", "openmpi", "intel"):
        options = ["--codec", "exact", "--algo", "ring", *sizes("64K", "64M"), *iters("1gbit")]
        with measure.wire(4, "1gbit"):
            rows = measure.bench(mpi, 4, "1gbit", *options)["results"]
        for size in sorted({row["size"] for row in rows}):
            ring, native = row_of(rows, "exact", size=size), row_of(rows, "native", size=size)
            point = f"4 hosts, {mpi}, float32 ring / native, {size >> 10} KiB"
            figure = ring["time_us"] / native["time_us"]
            if size >= 4 << 20:
                claims.at_most(point, figure, 1.03)
            else:
                claims.report(point, figure)


# ---- one host ----


def shared_memory(claims: Claims) -> None:
    """2 ranks on one host: where compression does not pay, and what the defaults cost."""
    for mpi in ("mpich", "openmpi"):
        for row in rows_on_ranks(2, "lab_ranks.py", "shared", mpi=mpi):
            point = f"{mpi}, 2 ranks, shared memory, {row['nbytes']} bytes: defaults, us"
            bound = 1.05 * row["native"] + 5
            shown = f"{row['default']:.1f} (native {row['native']:.1f})"
            claims.check(point, shown, f"<= {bound:.1f}", row["default"] <= bound)
            for codec, ratio in row["ratios"].items():
                point = f"{mpi}, 2 ranks, shared memory, {row['nbytes']} bytes: {codec} / native"
                claims.report(point, ratio)


def memory(claims: Claims) -> None:
    for mpi in ("mpich", "openmpi"):
        for row in rows_on_ranks(4, "lab_ranks.py", "memory", mpi=mpi):
            point = f"{mpi}, 4 ranks, {row['codec']}: extra memory, times the array"
            claims.at_most(point, row["extra"], 0.6)
            point = f"{mpi}, 4 ranks, {row['codec']}: memory grown over 10,000 calls, KiB"
            claims.at_most(point, row["grown_kib"], 512)


def phases(claims: Claims) -> None:
    """Where the time of one call at 4 bits goes."""
    options = large_ring("q4", "1gbit")
    with measure.wire(4, "1gbit"):
        rows = measure.bench("mpich", 4, "1gbit", *options, "--phases")["results"]
    row = row_of(rows, "q4")
    parts = dict(row["phases"])
    total = parts.pop("total")
    for name, us in parts.items():
        point = f"4 hosts, 1gbit, q4, 64 MiB: share of {name}, %"
        claims.report(point, 100 * us / total)
    added = sum(parts.values()) / total
    claims.check("its shares over the wall time", added, "1 +- 0.05", abs(added - 1) <= 0.05)


PARTS = {
    "limits": limits,
    "eight": eight_hosts,
    "uncompressed": uncompressed,
    "shared": shared_memory,
    "phases": phases,
    "memory": memory,
}


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
