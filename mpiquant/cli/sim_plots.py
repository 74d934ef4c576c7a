"""Plots of `mpiquant sim`: times against bandwidths, bits over time, and how much is hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpiquant.cli import job
from mpiquant.rate import row
from mpiquant.sim.training import History

Sweep = Mapping[str, Sequence[tuple[float, float]]]
"""Bits per second and seconds of an iteration, of each scheme."""


def figure_class() -> Any:
    """That of matplotlib; UsageError without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise job.UsageError("plots need matplotlib: pip install 'mpiquant[report]'") from None
    return Figure


def write_plots(folder: Path, outcomes: Sequence[History], sweep: Sweep) -> Iterator[Path]:
    """Write each plot as a PNG file, and say where."""
    make = figure_class()
    plots: dict[str, Callable[[Any], None]] = {
        "time": lambda figure: _time(figure, sweep),
        "bits": lambda figure: _bits(figure, outcomes),
        "row": lambda figure: _row(figure, outcomes),
    }
    for name, draw in plots.items():
        figure = make(figsize=(9, 5), layout="constrained")
        draw(figure)
        file = folder / f"sim-{name}.png"
        figure.savefig(file, dpi=110)
        yield file


def _legend(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))


def _time(figure: Any, sweep: Sweep) -> None:
    axes = figure.subplots()
    for name, points in sweep.items():
        rates, seconds = zip(*points, strict=True)
        axes.plot(np.array(rates) / 1e9, 1e3 * np.array(seconds), "o-", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bandwidth of a node (Gbit/s)")
    axes.set_ylabel("iteration (ms)")
    _legend(axes)


def _bits(figure: Any, outcomes: Sequence[History]) -> None:
    """Of adaptive schemes, above the slowest link that they had."""
    upper, lower = figure.subplots(2, sharex=True)
    for outcome in outcomes:
        begins = [each.begin_s for each in outcome.iterations]
        bits = [each.wire_bits for each in outcome.iterations]
        best = [each.oracle_bits for each in outcome.iterations]
        if np.isfinite(best).any():
            (line,) = upper.plot(begins, bits, "o-", markersize=3, label=outcome.scheme)
            upper.plot(begins, best, ":", color=line.get_color(), label="its oracle")
            links = [8e-9 * each.bandwidth for each in outcome.iterations]
            lower.plot(begins, links, color=line.get_color(), label=outcome.scheme)
    upper.set_ylabel("bits per value on the wire")
    lower.set_ylabel("slowest link (Gbit/s)")
    lower.set_xlabel("time (s)")
    if upper.lines:
        _legend(upper)
        _legend(lower)


def _row(figure: Any, outcomes: Sequence[History]) -> None:
    """Where nothing waits, ROW is infinite: nothing is drawn there."""
    axes = figure.subplots()
    for outcome in outcomes:
        overlap = [each.overlap_s for each in outcome.iterations]
        found = row(overlap, [each.wire_wait_s for each in outcome.iterations])
        places = np.arange(len(found))[np.isfinite(found)]
        axes.plot(places, found[places], "o-", markersize=3, label=outcome.scheme)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_xlabel("iteration")
    axes.set_ylabel("ROW: overlap over waiting for the wire")
    _legend(axes)
