"""`mpiquant sim`: training on a cluster that need not exist; no MPI."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpiquant import __version__
from mpiquant.cli import job
from mpiquant.cli.bench_collectives import parse_bandwidth
from mpiquant.cli.bench_print import plain
from mpiquant.cli.sim_plots import figure_class, write_plots
from mpiquant.sim import WORKLOADS, traces, workload
from mpiquant.sim.compute import Load
from mpiquant.sim.machine import TYPICAL
from mpiquant.sim.schemes import Scheme, scheme_of
from mpiquant.sim.traces import Bandwidths
from mpiquant.sim.training import History, Training
from mpiquant.sim.wires import Cluster

SCHEMES = "fp32,bf16,q8,q4,q2,aqgb,aqat,aqat@halving_doubling,cerar,hierarchical"
DRAWN = ("walk", "markov", "day")

SWEEP = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Bandwidths of the plot, as shares of the one that was asked for."""

SWEEP_ITERATIONS = 8


# ---- the command line ----


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("sim", help="simulate training on a cluster; no MPI")
    parser.set_defaults(run=run)
    _add_cluster(parser)
    _add_training(parser)
    _add_output(parser)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=16, metavar="N", help="default 16")
    add("--ranks-per-node", type=int, default=1, metavar="N", help="default 1")
    rate: dict[str, Any] = {"type": parse_bandwidth, "metavar": "RATE"}
    add("--bandwidth", default="10gbit", help="of a node, such as 10gbit (the default)", **rate)
    seconds: dict[str, Any] = {"type": parse_seconds, "metavar": "TIME"}
    add("--latency", default="30us", help="of a message, such as 30us (the default)", **seconds)
    kinds = "steady, walk, markov, day, or a file with lines SECONDS RATE [NODE] (default steady)"
    add("--trace", default="steady", metavar="KIND", help=kinds)
    add("--interval", default="100ms", help="of a trace's steps (default 100ms)", **seconds)
    add("--period", default="60s", help="of a day of the trace (default 60s)", **seconds)
    add("--common", action="store_true", help="all nodes follow one trace")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=WORKLOADS, default="gpt2", help="default gpt2")
    add("--iterations", type=int, default=20, metavar="N", help="default 20")
    seconds: dict[str, Any] = {"type": parse_seconds, "metavar": "TIME"}
    step = "computation of an iteration, such as 400ms (default: one sample at 100 GFLOP/s)"
    add("--step-time", help=step, **seconds)
    add("--jitter", type=float, default=0.0, metavar="X", help="relative, of a pass (default 0)")
    slow = "chance of a rank to be slow in an iteration (default 0)"
    add("--stragglers", type=float, default=0.0, metavar="P", help=slow)
    add("--slowdown", type=float, default=1.5, metavar="X", help="of slow ranks (default 1.5)")
    names = "codecs, codec@algorithm, fp32, aqgb, cerar, hierarchical (default: all that can be)"
    add("--schemes", metavar="NAMES", help=names)
    add("--seed", type=int, default=0, metavar="N")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures, of each iteration too")
    add("--plot", type=Path, metavar="DIR", help="write PNG files; simulates more bandwidths")


def parse_seconds(text: str) -> float:
    """Seconds of "50us", "80ms", "1.5s" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|s|ms|us)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, expected such as 50us, 80ms, 1.5s")
    return float(match[1]) / {"": 1, "s": 1, "ms": 1000, "us": 1_000_000}[match[2]]


def read_trace(file: Path) -> list[tuple[float, float, int | None]]:
    """Seconds, bytes per second, and the node or None, of each line.

    Raises
    ------
    UsageError
        Naming a bad line.
    """
    changes = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            at_s, rate, *node = words
            change = float(at_s), parse_bandwidth(rate) / 8, int(*node) if node else None
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            raise job.UsageError(f"{file}:{number}: expected SECONDS RATE [NODE]") from None
        changes.append(change)
    return changes


# ---- what to simulate ----


def schemes_of(arguments: argparse.Namespace) -> list[Scheme]:
    """Those asked for; by default all that the number of ranks allows."""
    names = (arguments.schemes or SCHEMES).split(",")
    if arguments.schemes is None:
        if arguments.ranks & (arguments.ranks - 1):
            names.remove("aqat@halving_doubling")
        if arguments.ranks_per_node == 1:
            names.remove("hierarchical")
    return [scheme_of(name) for name in names]


def bandwidths_of(arguments: argparse.Namespace, scale: float = 1.0) -> Bandwidths:
    """The trace, drawn anew from the seed; times a number."""
    nodes = arguments.ranks // arguments.ranks_per_node
    columns = 1 if arguments.common else nodes
    bandwidth = scale * arguments.bandwidth / 8
    # Not the stream of the jitter, which has the seed itself.
    rng = np.random.default_rng([arguments.seed, 1])
    if arguments.trace == "steady":
        return traces.steady(bandwidth)
    if arguments.trace == "walk":
        return traces.random_walk(bandwidth, columns, arguments.interval, rng)
    if arguments.trace == "markov":
        return traces.markov(bandwidth, columns, arguments.interval, rng)
    if arguments.trace == "day":
        return traces.day(bandwidth, columns, arguments.interval, rng, arguments.period)
    changes = [(at, scale * rate, node) for at, rate, node in read_trace(Path(arguments.trace))]
    return traces.replay(changes, bandwidth, nodes)


def training_of(
    arguments: argparse.Namespace, scheme: Scheme, scale: float = 1.0, *, stragglers: bool = True
) -> Training:
    model = workload(arguments.model)
    if arguments.step_time is not None:
        model = replace(model, step_s=arguments.step_time)
    cluster = Cluster(
        arguments.ranks,
        bandwidths_of(arguments, scale),
        arguments.latency,
        arguments.ranks_per_node,
    )
    share = arguments.stragglers if stragglers else 0.0
    load = Load(arguments.jitter, share, arguments.slowdown)
    return Training(model, scheme, cluster, TYPICAL, load, arguments.seed)


def check(arguments: argparse.Namespace) -> list[Scheme]:
    """The schemes; UsageError if the arguments make no sense."""
    if arguments.iterations < 1:
        raise job.UsageError(f"{arguments.iterations} iterations, expected 1 or more")
    times = (arguments.interval, arguments.period, arguments.step_time)
    if any(each is not None and each <= 0 for each in times):
        raise job.UsageError("interval, period and step time must be more than 0")
    if arguments.trace not in ("steady", *DRAWN) and not Path(arguments.trace).is_file():
        raise job.UsageError(f"trace {arguments.trace!r} is no file, nor steady, walk, markov, day")
    if arguments.json is not None:  # rather fail now than after a long run
        arguments.json.open("a").close()
    if arguments.plot is not None:
        figure_class()
        arguments.plot.mkdir(parents=True, exist_ok=True)
    return schemes_of(arguments)


def run(arguments: argparse.Namespace) -> int:
    schemes = check(arguments)
    table = Table(arguments)
    outcomes, results = [], []
    for scheme in schemes:
        outcome = simulate(arguments, scheme)
        outcomes.append(outcome)
        results.append(result_of(arguments, scheme, outcome))
        table.add(results[-1])
    if arguments.json is not None:
        arguments.json.write_text(report(arguments, results))
    if arguments.plot is not None:
        sweep = {s.name: list(_sweep(arguments, s)) for s in schemes}
        for file in write_plots(arguments.plot, outcomes, sweep):
            print(file)
    return 0


def simulate(arguments: argparse.Namespace, scheme: Scheme, *, stragglers: bool = True) -> History:
    training = training_of(arguments, scheme, stragglers=stragglers)
    progress = Progress(scheme.name, arguments.iterations)
    try:
        return training.run(arguments.iterations, progress.show)
    finally:
        progress.clear()


def _sweep(arguments: argparse.Namespace, scheme: Scheme) -> Iterator[tuple[float, float]]:
    """Bits per second and seconds of an iteration."""
    progress = Progress(f"{scheme.name}, other bandwidths", len(SWEEP))
    for number, scale in enumerate(SWEEP, 1):
        outcome = training_of(arguments, scheme, scale).run(SWEEP_ITERATIONS)
        yield scale * arguments.bandwidth, outcome.summary().iteration_s
        progress.show(number)
    progress.clear()


def result_of(arguments: argparse.Namespace, scheme: Scheme, outcome: History) -> dict[str, Any]:
    """Figures of a scheme, as JSON can hold them: what is not a number, or infinite, is None."""
    result = asdict(outcome.summary())
    if arguments.stragglers:
        without = simulate(arguments, scheme, stragglers=False).summary()
        result["straggler_cost_s"] = result["iteration_s"] - without.iteration_s
    result["iterations"] = [_finite(asdict(each)) for each in outcome.iterations]
    return _finite(result)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    bad = {key for key, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
    return {key: None if key in bad else value for key, value in row.items()}


def report(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    known = {"version": __version__, "args": plain(arguments), "results": results}
    return json.dumps(known, indent=1, allow_nan=False)


# ---- what is printed ----

# Titles, units, widths, formats and factors of the columns.
_COLUMNS: dict[str, tuple[str, str, int, str, float]] = {
    "iteration_s": ("iteration", "(ms)", 11, ".1f", 1e3),
    "wire_wait_s": ("wire wait", "(ms)", 11, ".1f", 1e3),
    "peer_wait_s": ("peer wait", "(ms)", 11, ".1f", 1e3),
    "straggler_cost_s": ("stragglers", "(ms)", 12, ".1f", 1e3),
    "efficiency": ("efficiency", "(%)", 12, ".1f", 1e2),
    "hidden": ("hidden", "(%)", 8, ".1f", 1e2),
    "row": ("ROW", "", 9, ".2f", 1.0),
    "bits": ("bits", "", 7, ".2f", 1.0),
    "wire_bits": ("wire", "(bits)", 8, ".2f", 1.0),
    "oracle_bits": ("oracle", "(bits)", 8, ".2f", 1.0),
    "error": ("error", "", 10, ".1e", 1.0),
    "sent_nbytes": ("sent", "(MB)", 11, ".1f", 1e-6),
}


class Table:
    """One line for each scheme."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.columns = dict(_COLUMNS)
        if not arguments.stragglers:
            del self.columns["straggler_cost_s"]
        options = plain(arguments).items()
        print(f"# mpiquant {__version__} sim: a model, no measurement")
        print("# options: " + " ".join(f"{k} {v}" for k, v in options if v not in (None, False)))
        for title, part in (("# scheme", 0), ("#", 1)):
            cells = (f"{column[part]:>{column[2]}}" for column in self.columns.values())
            print((f"{title:<24}" + "".join(cells)).rstrip(), flush=True)

    def add(self, result: dict[str, Any]) -> None:
        print(f"{result['scheme']:<24}" + "".join(self._cells(result)), flush=True)

    def _cells(self, result: dict[str, Any]) -> Iterator[str]:
        for name, (_, _, width, form, factor) in self.columns.items():
            value = result[name]
            yield f"{'-':>{width}}" if value is None else f"{factor * value:>{width}{form}}"


class Progress:
    """A line on the terminal, if there is one."""

    EVERY_S = 0.2

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.last = name, total, time.monotonic()
        self.shown = False

    def show(self, done: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - self.last > self.EVERY_S:
            self.last, self.shown = time.monotonic(), True
            text = f"{self.name}: {done} of {self.total}"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
