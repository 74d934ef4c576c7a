"""Benchmarks on the emulated cluster: `mpiquant bench`, and gloo, as reports that were checked."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cluster
import launch
from system import LabError

Report = dict[str, Any]

RESULTS = launch.ROOT / "bench" / "results"

TRUSTED_BITS = 10**10
"""Hosts times rate up to which two cores move what the wire would (docs/benchmarks.md)."""


@contextmanager
def wire(hosts: int, rate: str, latency_s: float = 0.0) -> Iterator[None]:
    """A cluster for the block."""
    try:
        cluster.up(hosts, rate, latency_s)
        yield
    finally:
        cluster.down()


def bench(
    mpi: str,
    hosts: int,
    rate: str,
    *options: str,
    kind: str = "allreduce",
    ppn: int = 1,
    default: bool = False,
    limit_s: float = 600.0,
    environment: dict[str, str] | None = None,
) -> Report:
    """Report of `mpiquant bench` on a cluster that is up at this rate.

    LabError if it fails, finds a wrong value, or if the bytes did not cross the wire.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        command = ["mpiquant", "bench", kind, *options]
        command += ["--bandwidth", str(cluster.parse_rate(rate)), "--json", str(file)]
        job = launch.Job(mpi, hosts, command, ppn, limit_s=limit_s, default=default)
        job.environment |= environment or {}
        done = launch.run(job)
        if done.code:
            raise LabError(f"code {done.code}: {done.out[-1000:]}\n{done.err[-2000:]}")
        report: Report = json.loads(file.read_text())
    if ppn == 1:
        done.require(_least_bytes(report))
    return _with_facts(report, mpi, rate, default, done)


def _least_bytes(report: Report) -> float:
    """What each host must have sent, at least."""
    args = report["args"]
    calls = args["iters"] + args["warmup_iters"]
    # Not every rank sends as much as the one that sends most, of which the rows tell.
    even = report["ranks"] & (report["ranks"] - 1) == 0
    sent = sum(row["wirebw"] * row["time_us"] * 1e3 for row in report["results"])
    return calls * sent * (0.9 if even else 0.4)


def gloo(hosts: int, rate: str, sizes: list[int], iters: int, limit_s: float = 600.0) -> Report:
    """Report of gloo through PyTorch, on a cluster that is up at this rate."""
    python = launch.ROOT / ".venv" / "torch" / "bin" / "python"
    if not python.exists():
        raise LabError("gloo needs .venv/torch: make peers")
    script = str(launch.ROOT / "bench" / "peers" / "gloo.py")
    command = [str(python), script, *map(str, sizes), "--iters", str(iters)]
    command += ["--bandwidth", str(cluster.parse_rate(rate))]
    job = launch.Job("mpich", hosts, command, limit_s=limit_s)
    job.environment["GLOO_SOCKET_IFNAME"] = "eth0"
    done = launch.run(job)
    if done.code:
        raise LabError(f"gloo: code {done.code}: {done.err[-2000:]}")
    done.require(sum(sizes))
    return _with_facts(json.loads(done.out), "gloo", rate, False, done)


def _with_facts(report: Report, mpi: str, rate: str, default: bool, done: launch.Result) -> Report:
    report.get("args", {}).pop("json", None)  # a temporary file
    report["lab"] = {
        "mpi": mpi,
        "default": default,
        "rate": rate,
        "wall_s": round(done.wall_s, 2),
        "busy_s": round(done.busy_s, 2),
        "sent": done.sent,
    }
    return report


def script(
    mpi: str, hosts: int, file: str, *arguments: str, limit_s: float, ppn: int = 1
) -> tuple[Any, launch.Result]:
    """What a script of bench/claims prints last, as JSON, on a cluster that is up; and its run.

    LabError if it fails.
    """
    python = str(launch.ROOT / ".venv" / mpi / "bin" / "python")
    command = [python, "-m", "mpi4py", str(launch.ROOT / "bench" / "claims" / file), *arguments]
    done = launch.run(launch.Job(mpi, hosts, command, ppn, limit_s=limit_s))
    if done.code:
        raise LabError(f"code {done.code}: {done.out[-1000:]}\n{done.err[-3000:]}")
    return json.loads(done.out.splitlines()[-1]), done


def store(name: str, report: Report) -> None:
    """Write a report to bench/results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
