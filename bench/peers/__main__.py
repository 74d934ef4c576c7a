"""`make peers`: other allreduces beside ours, on one emulated cluster, in one run.

MPICH, Open MPI and Intel MPI, each tuned and as it comes, blocking and nonblocking; gloo through
PyTorch, plain and with the casts of its fp16 hook; and ours on two of the MPIs.  Reports go to
bench/results, one file for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
import cluster
import launch
import measure


def peers(hosts: int, rate: str, iters: int) -> dict[str, Callable[[], measure.Report]]:
    """What makes the report of each peer, on a cluster that is up."""
    options = ["-b", "64K", "-e", "64M", "-f", "4", "-n", str(iters), "-w", "2"]
    only_native = [*options, "--codec", "exact", "--algo", "native"]
    ours = [*options, "--codec", "exact,bf16,q8,q4,q2", "--algo", "ring"]
    found = {}
    for mpi in launch.MPIS:
        for default in (False, True):
            bench = partial(measure.bench, mpi, hosts, rate, *only_native, default=default)
            overlapping = partial(
                measure.bench, mpi, hosts, rate, *only_native, "--nonblocking", default=default
            )
            name = f"{mpi}-{'default' if default else 'tuned'}"
            found |= {f"{name}-allreduce": bench, f"{name}-iallreduce": overlapping}
    sizes = [(64 << 10) * 4**k for k in range(6)]
    found["gloo"] = partial(measure.gloo, hosts, rate, sizes, iters)
    for mpi in ("mpich", "openmpi"):
        found[f"mpiquant-{mpi}"] = partial(measure.bench, mpi, hosts, rate, *ours)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--iters", type=int, default=10)
    parser.add_argument("--only", default="", help="peers whose names have this in them")
    a = parser.parse_args()
    with measure.wire(a.hosts, a.rate):
        for name, report_of in peers(a.hosts, a.rate, a.iters).items():
            if a.only in name:
                report = report_of()
                measure.store(f"peers-{a.hosts}x{a.rate}-{name}", report)
                largest = report["results"][-1]
                milliseconds = largest["time_us"] / 1e3
                print(f"{name}: {largest['size'] >> 20} MiB in {milliseconds:.1f} ms", flush=True)


if __name__ == "__main__":
    cluster.check_capabilities()
    main()
