"""`make peers`: other allreduces beside ours, on one emulated cluster, in one run.

MPICH, Open MPI and Intel MPI, each tuned and as it comes, blocking and nonblocking; gloo through
PyTorch, plain and with the casts of its fp16 hook; and ours on two of the MPIs.  Reports go to
bench/results, one file for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
import cluster
import launch
import measure


def reports(hosts: int, rate: str, iters: int) -> Iterator[tuple[str, measure.Report]]:
    """Name and report of each peer, on a cluster that is up."""
    options = ["-b", "64K", "-e", "64M", "-f", "4", "-n", str(iters), "-w", "2"]

    def bench(mpi: str, *words: str, default: bool = False) -> measure.Report:
        return measure.bench(mpi, hosts, rate, *words, default=default)

    only_native = ["--codec", "exact", "--algo", "native"]
    for mpi in launch.MPIS:
        for default in (False, True):
            name = f"{mpi}-{'default' if default else 'tuned'}"
            yield f"{name}-allreduce", bench(mpi, *options, *only_native, default=default)
            nonblocking = [*options, *only_native, "--nonblocking"]
            yield f"{name}-iallreduce", bench(mpi, *nonblocking, default=default)
    sizes = [(64 << 10) * 4**k for k in range(6)]
    yield "gloo", measure.gloo(hosts, rate, sizes, iters)
    for mpi in ("mpich", "openmpi"):
        ours = ["--codec", "exact,bf16,q8,q4,q2", "--algo", "ring"]
        yield f"mpiquant-{mpi}", bench(mpi, *options, *ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--iters", type=int, default=10)
    a = parser.parse_args()
    with measure.wire(a.hosts, a.rate):
        for name, report in reports(a.hosts, a.rate, a.iters):
            measure.store(f"peers-{a.hosts}x{a.rate}-{name}", report)
            largest = report["results"][-1]
            milliseconds = largest["time_us"] / 1e3
            print(f"{name}: {largest['size'] >> 20} MiB in {milliseconds:.1f} ms", flush=True)


if __name__ == "__main__":
    cluster.check_capabilities()
    main()
