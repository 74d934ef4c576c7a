"""Rows of a benchmark, and the formats in which rank 0 prints them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mpiquant import __version__
from mpiquant.codecs import EXACT, Codec


@dataclass(frozen=True)
class Variant:
    """What is compared: a codec and an algorithm, as they were asked for."""

    name: str
    codec: Codec | None
    algorithm: str


NATIVE = Variant("native", None, "native")
"""mpi4py's own call."""

RING = Variant("exact", EXACT, "ring")
"""Our schedules without compression: what separates them from native is ours to answer for."""


@dataclass
class Row:
    """One measured case; the fields are the columns."""

    size: int
    count: int
    dtype: str
    op: str
    codec: str
    bits: float
    algo: str
    time_us: float
    p95_us: float
    algbw: float
    busbw: float
    wirebw: float
    ratio: float | None
    err: float | None
    wrong: int | None
    limit_ratio: float | None
    phases: dict[str, float] | None
    """Microseconds of a call, by what they were spent on; None unless asked for."""


@dataclass
class OverlapRow(Row):
    """With computation beside the communication."""

    overall_us: float
    compute_us: float
    pure_us: float
    overlap: float


# Titles, units, widths and formats of the columns in a table.
_COLUMNS = {
    "size": ("size", "(B)", 12, "d"),
    "count": ("count", "(elements)", 11, "d"),
    "dtype": ("type", "", 8, "s"),
    "op": ("redop", "", 6, "s"),
    "codec": ("codec", "", 9, "s"),
    "bits": ("bits", "", 6, "g"),
    "algo": ("algo", "", 17, "s"),
    "time_us": ("time", "(us)", 11, ".2f"),
    "p95_us": ("p95", "(us)", 11, ".2f"),
    "algbw": ("algbw", "(GB/s)", 9, ".3f"),
    "busbw": ("busbw", "(GB/s)", 9, ".3f"),
    "wirebw": ("wirebw", "(GB/s)", 9, ".3f"),
    "ratio": ("ratio", "", 8, ".2f"),
    "err": ("error", "", 10, ".1e"),
    "wrong": ("#wrong", "", 8, "d"),
    "limit_ratio": ("x limit", "", 9, ".2f"),
    "overall_us": ("overall", "(us)", 11, ".2f"),
    "compute_us": ("compute", "(us)", 11, ".2f"),
    "pure_us": ("pure", "(us)", 11, ".2f"),
    "overlap": ("overlap", "(%)", 9, ".1f"),
}


class Table:
    """Columns as in nccl-tests; the base of the other formats, and writer of the report."""

    by_variant = False

    def __init__(
        self, arguments: argparse.Namespace, environment: dict[str, Any], rank: int
    ) -> None:
        self.arguments = arguments
        self.environment = environment
        self.silent = rank != 0
        self.rows: list[Row] = []
        row = OverlapRow if arguments.nonblocking else Row
        self.columns = [field.name for field in fields(row) if field.name in _COLUMNS]
        self.header()

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows)

    def print(self, *words: object) -> None:
        if not self.silent:
            print(*words, flush=True)

    def header(self) -> None:
        """What is measured and where, and the titles."""
        for line in header_lines(self.arguments, self.environment):
            self.print("#", line)
        if not self.arguments.bandwidth:
            self.columns.remove("limit_ratio")
        for part in (0, 1):
            cells = (f"{_COLUMNS[c][part]:>{_COLUMNS[c][2]}}" for c in self.columns)
            self.print("#" + "".join(cells)[1:].rstrip())

    def add(self, variant: Variant, row: Row) -> None:
        self.rows.append(row)
        self.print("".join(_cell(name, getattr(row, name)) for name in self.columns))

    def close(self) -> None:
        """End of the output; writes the file."""
        if self.arguments.check:
            self.print(f"# wrong values: {self.wrong} {'FAILED' if self.wrong else 'OK'}")
        self.write()

    def write(self) -> None:
        if self.arguments.json and not self.silent:
            self.arguments.json.write_text(self.report())

    def report(self) -> str:
        self.rows.sort(key=lambda row: row.size)  # the order of the variants remains
        report = {
            "version": __version__,
            "args": plain(self.arguments),
            "env": self.environment,
            "ranks": len(self.environment["hosts"]),
            "results": [_without_missing_phases(asdict(row)) for row in self.rows],
        }
        return json.dumps(report, indent=1, allow_nan=False)


class Osu(Table):
    """As osu_allreduce and osu_iallreduce print: a block for each variant."""

    by_variant = True

    def header(self) -> None:
        for line in header_lines(self.arguments, self.environment):
            self.print("#", line)
        self.variant: Variant | None = None

    def add(self, variant: Variant, row: Row) -> None:
        self.rows.append(row)
        if variant != self.variant:
            self.variant = variant
            self._titles(variant)
        if isinstance(row, OverlapRow):
            numbers = [row.overall_us, row.compute_us, row.pure_us, row.overlap]
        else:
            numbers = [row.time_us]
        self.print(f"{row.size:<10}" + "".join(f"{number:>18.2f}" for number in numbers))

    def _titles(self, variant: Variant) -> None:
        titles = ["Avg Latency(us)"]
        if self.arguments.nonblocking:
            titles = ["Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)"]
        self.print(f"\n# codec {variant.name}, algorithm {variant.algorithm}")
        self.print(f"{'# Size':<10}" + "".join(f"{title:>18}" for title in titles))


class Csv(Table):
    """The columns of the report."""

    def header(self) -> None:
        for line in header_lines(self.arguments, self.environment):
            self.print("#", line)
        self.print(",".join(self.columns))

    def add(self, variant: Variant, row: Row) -> None:
        self.rows.append(row)
        values = [getattr(row, name) for name in self.columns]
        self.print(",".join("" if value is None else str(value) for value in values))


class Json(Table):
    """The report and nothing else."""

    def header(self) -> None:
        pass

    def add(self, variant: Variant, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.print(self.report())
        self.write()


FORMATS = {"table": Table, "osu": Osu, "csv": Csv, "json": Json}


def printer_of(arguments: argparse.Namespace, environment: dict[str, Any], rank: int) -> Table:
    return FORMATS[arguments.format](arguments, environment, rank)


def header_lines(arguments: argparse.Namespace, environment: dict[str, Any]) -> list[str]:
    """Version, MPI, ranks, hosts and options."""
    hosts = Counter(environment["hosts"])
    places = ", ".join(f"{host} ({ranks})" for host, ranks in hosts.items())
    options = plain(arguments).items()
    return [
        f"mpiquant {__version__} {arguments.kind}, {environment['mpi']}",
        f"{hosts.total()} ranks on {places}",
        "options: " + " ".join(f"{k} {v}" for k, v in options if v not in (None, False)),
        "time: median of the iterations, each that of its slowest rank",
    ]


def plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments as JSON can hold them."""
    values = {key: value for key, value in vars(arguments).items() if key != "run"}
    return {key: str(v) if isinstance(v, Path) else v for key, v in values.items()}


def _without_missing_phases(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "phases" or value is not None}


def _cell(name: str, value: Any) -> str:
    _, _, width, form = _COLUMNS[name]
    return f"{'-':>{width}}" if value is None else f"{value:>{width}{form}}"
