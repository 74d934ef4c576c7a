"""`mpiquant bench allreduce | reduce_scatter | allgather`: whole calls against MPI's own.

Options, columns and the meaning of size and busbw are those of nccl-tests.  Arguments are checked
before MPI is started: a bad one ends every rank alike.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mpiquant.cli import job
from mpiquant.cli.bench_print import FORMATS, NATIVE, RING, Variant, printer_of
from mpiquant.codecs import Codec, UniformCodec, by_name, split_names
from mpiquant.collectives import canonical
from mpiquant.config import PROGRESSES

KINDS = ("allreduce", "reduce_scatter", "allgather")
OPS = ("sum", "prod", "max", "min", "mean")
DTYPES = (
    *("float32", "float64", "float16"),
    *(f"{sign}int{bits}" for bits in (32, 64, 8, 16) for sign in ("", "u")),
)
ALIASES = {"float": "float32", "double": "float64", "half": "float16"}


# ---- the command line ----


def add_parsers(commands: Any) -> None:
    for kind in KINDS:
        parser = commands.add_parser(kind, help=f"{kind} against MPI's own; run by mpiexec")
        parser.set_defaults(run=run, kind=kind, op="none", nonblocking=False)
        _add_sizes(parser)
        _add_what(parser, kind)
        _add_output(parser)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    size: dict[str, Any] = {"type": parse_size, "metavar": "SIZE"}
    number: dict[str, Any] = {"metavar": "N"}
    add = parser.add_argument
    add("-b", "--minbytes", default="8", help="such as 8, 32K, 4M, 1G (default 8)", **size)
    add("-e", "--maxbytes", default="64M", help="default 64M", **size)
    add("-f", "--stepfactor", type=_from(2), default=4, help="default 4", **number)
    add("-i", "--stepbytes", help="a fixed increment instead of a factor", **size)
    add("-n", "--iters", type=_from(1), default=20, help="default 20", **number)
    add("-w", "--warmup_iters", type=_from(0), default=3, help="default 3", **number)


def _add_what(parser: argparse.ArgumentParser, kind: str) -> None:
    add = parser.add_argument
    types = (*DTYPES, *ALIASES)
    listed = ", ".join(types)
    add("-d", "--datatype", choices=types, default="float32", metavar="TYPE", help=listed)
    if kind != "allgather":
        add("-o", "--op", choices=OPS, default="sum", help="default sum")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="compare with exact results")
    codecs = "names (default exact,q8,q4,q2); q4s is q4 stochastic"
    add("--codec", default="exact,q8,q4,q2", metavar="NAMES", help=codecs)
    add("--algo", default="auto", metavar="NAMES", help="algorithms (default auto)")
    add("--segment", type=_from(1), metavar="N", help="elements of a pipelined segment")
    add("--seed", type=_from(0), default=0, metavar="N")
    if kind == "allreduce":
        add("--nonblocking", action="store_true", help="Iallreduce, overlapped with computation")
        progress = "what moves nonblocking calls on (default thread)"
        add("--progress", choices=PROGRESSES, default="thread", help=progress)


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    bandwidth = "of a rank, such as 1gbit: compare times with what it allows"
    add("--bandwidth", type=parse_bandwidth, metavar="RATE", help=bandwidth)
    add("--phases", action="store_true", help="also where the time goes (in the JSON)")
    add("--format", choices=tuple(FORMATS), default="table", help="default table")
    add("--json", type=Path, metavar="FILE", help="write all figures")


def parse_size(text: str) -> int:
    """Bytes of "8", "32K", "4M" or "1GB" (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)B?", text, re.IGNORECASE)
    power = ("", "K", "M", "G").index(match[2].upper()) if match else 0
    size = int(float(match[1]) * 1024**power) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, expected such as 8, 32K, 4M, 1G")
    return size


def parse_bandwidth(text: str) -> int:
    """Bits per second of "1gbit", "200mbit", "2.5gbit" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([kmg]?)bit)?", text, re.IGNORECASE)
    power = ("", "k", "m", "g").index((match[2] or "").lower()) if match else 0
    rate = int(float(match[1]) * 1000**power) if match else 0
    if rate < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no bandwidth, expected such as 1gbit")
    return rate


def _from(lowest: int) -> Any:
    """What argparse makes an integer with."""

    def integer(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is too small, expected {lowest} or more")
        return value

    return integer


# ---- what to measure ----


def sizes(arguments: argparse.Namespace) -> Iterator[int]:
    """Bytes of the whole array, from minbytes to maxbytes."""
    size = arguments.minbytes
    while size <= arguments.maxbytes:
        yield size
        step = arguments.stepbytes
        size = size + step if step else size * arguments.stepfactor


def counts(kind: str, sizes: Iterator[int], itemsize: int, ranks: int) -> list[int]:
    """Elements of the whole arrays: at least one, and as many of each rank in an allgather."""
    unit = ranks if kind == "allgather" else 1
    return sorted({max(1, size // itemsize // unit) * unit for size in sizes})


def parse_codec(name: str) -> Codec:
    """A codec by name; a trailing s asks for stochastic rounding."""
    match = re.fullmatch(r"q(\d+)s", name)
    return UniformCodec(bits=int(match[1]), rounding="stochastic") if match else by_name(name)


def check(arguments: argparse.Namespace) -> list[Variant]:
    """The variants to measure; UsageError if the arguments make no sense."""
    if arguments.minbytes > arguments.maxbytes:
        raise job.UsageError(f"no size from {arguments.minbytes} to {arguments.maxbytes} bytes")
    arguments.datatype = ALIASES.get(arguments.datatype, arguments.datatype)
    names, algorithms = split_names(arguments.codec), arguments.algo.split(",")
    try:
        codecs = {name: parse_codec(name) for name in names}
        algorithms = [canonical(name) for name in algorithms]
    except ValueError as error:
        raise job.UsageError(str(error)) from None
    pairs = product(codecs.items(), algorithms)
    asked_for = [Variant(name, codec, algorithm) for (name, codec), algorithm in pairs]
    baselines = [NATIVE, RING] if arguments.op in ("sum", "mean", "none") else [NATIVE]
    return list(dict.fromkeys([*baselines, *asked_for]))


def run(arguments: argparse.Namespace) -> int:
    variants = check(arguments)
    from mpiquant.cli import bench_measure  # starts MPI

    comm = bench_measure.world()
    job.check_writable(comm, arguments.json)
    itemsize = np.dtype(arguments.datatype).itemsize
    lengths = counts(arguments.kind, sizes(arguments), itemsize, comm.size)
    bench = bench_measure.Bench(comm, arguments)
    printer = printer_of(arguments, bench_measure.environment(comm), comm.rank)
    for count, variant in cases(lengths, variants, by_variant=printer.by_variant):
        printer.add(variant, bench.measure(count, variant))
    printer.close()
    return 1 if printer.wrong else 0


def cases(
    lengths: list[int], variants: list[Variant], *, by_variant: bool
) -> Iterator[tuple[int, Variant]]:
    """All variants for each length, or all lengths for each variant."""
    if by_variant:
        return ((length, variant) for variant in variants for length in lengths)
    return product(lengths, variants)
