"""`make study`: allreduce at many sizes, rates and numbers of hosts, on emulated clusters.

Reports go to bench/results, one file for each cluster, and a table of scaling efficiencies:
the time that 2 hosts take over that of N, at equal bytes on each link.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lab"))
import cluster
import measure

HOSTS = (2, 4, 8, 16)
RATES = ("100mbit", "200mbit", "1gbit", "2.5gbit")
CODECS = ["--codec", "q8,q4,q2"]


def parts(hosts: int, rate: str) -> Iterator[tuple[list[str], list[str]]]:
    """Sizes and algorithms of the runs at a rate; fewer repeats where calls take seconds.

    A rank takes twelve times its array, for inputs, outputs and the check of its results: eight
    ranks with the largest ones do not fit into 24 GiB.
    """
    fast = cluster.parse_rate(rate) >= 10**9
    every = ["--algo", "ring,halving_doubling,direct"]
    yield ["-b", "8", "-e", "1M", "-f", "8", "-n", "30" if fast else "10", "-w", "3"], every
    few = ["-n", "7" if fast else "3", "-w", "1"]
    largest = "256M" if fast and hosts <= 4 else "64M"
    yield ["-b", "4M", "-e", largest, "-f", "4", *few], ["--algo", "ring"]


def holds(hosts: int, rate: str) -> bool:
    """Whether two cores move as many bits as these wires would."""
    return hosts * cluster.parse_rate(rate) <= measure.TRUSTED_BITS


def run(mpi: str, hosts: int, rate: str) -> measure.Report:
    reports = []
    for sizes, algorithms in parts(hosts, rate):
        with measure.wire(hosts, rate):
            options = [*sizes, *CODECS, *algorithms]
            reports.append(measure.bench(mpi, hosts, rate, *options, limit_s=1500))
    whole = reports[0]
    whole["results"] += reports[1]["results"]
    return whole


def efficiencies(rows: dict[int, list[dict[str, Any]]]) -> Iterator[str]:
    """Lines of the table: busbw on N hosts over that on 2."""
    few = {(r["codec"], r["algo"], r["size"]): r["busbw"] for r in rows[min(rows)]}
    for hosts, found in rows.items():
        for row in found:
            key = (row["codec"], row["algo"], row["size"])
            if few.get(key):
                efficiency = row["busbw"] / few[key]
                yield f"{hosts:>5} {row['size']:>12} {row['codec']:>8} {row['algo']:>17} " + (
                    f"{row['time_us'] / 1e3:>12.3f} {efficiency:>7.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", default="mpich")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--rates", nargs="+", default=RATES)
    a = parser.parse_args()
    for rate in a.rates:
        for hosts in a.hosts:
            if holds(hosts, rate):
                name = f"study-{a.mpi}-{hosts}x{rate}"
                measure.store(name, run(a.mpi, hosts, rate))
                print(name, flush=True)
        write_table(a.mpi, rate)


def write_table(mpi: str, rate: str) -> None:
    """Efficiencies at a rate, of all reports that there are."""
    rows = {}
    for hosts in HOSTS:
        file = measure.RESULTS / f"study-{mpi}-{hosts}x{rate}.json"
        if file.exists():
            rows[hosts] = json.loads(file.read_text())["results"]
    head = "hosts   size (bytes)    codec         algorithm    time (ms)   efficiency\n"
    table = measure.RESULTS / f"scaling-{mpi}-{rate}.txt"
    table.write_text(head + "\n".join(efficiencies(rows)) + "\n")


if __name__ == "__main__":
    cluster.check_capabilities()
    main()
