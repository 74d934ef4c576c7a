"""What the training example prints and saves: progress, table, plot, raw numbers."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mpiquant


@dataclass(frozen=True)
class Run:
    """Measurements of one training run. Accuracy is in percent, bytes are those of rank 0."""

    model: str
    codec: str
    seed: int
    accuracy: float
    wire_bytes_per_step: float
    raw_bytes_per_step: float
    ratio: float | None
    identical: bool
    step_ms: float
    losses: list[float]


class Progress:
    """One line updated in place on a terminal, otherwise a line per finished run."""

    def __init__(self, total: int, enabled: bool) -> None:
        self.total, self.finished, self.enabled = total, 0, enabled
        self.in_place = sys.stdout.isatty()
        self.start = time.perf_counter()

    def begin(self, what: str) -> None:
        """Name the run that is about to start."""
        if self.in_place:
            self.show(what)

    def done(self, what: str) -> None:
        """Count a finished run."""
        self.finished += 1
        self.show(what)
        if self.enabled and self.in_place and self.finished == self.total:
            print()

    def show(self, what: str) -> None:
        """Print the run with the time elapsed and left."""
        if not self.enabled:
            return
        elapsed = time.perf_counter() - self.start
        line = f"[{self.finished:{len(str(self.total))}d}/{self.total}] {elapsed:4.0f} s"
        if self.finished:
            left = elapsed / self.finished * (self.total - self.finished)
            line += f", about {left:3.0f} s left"
        if self.in_place:
            print(f"\r\x1b[K{line}  {what}", end="", flush=True)
        else:
            print(f"{line}  {what}", flush=True)


def standard_error(values: list[float]) -> float | None:
    """Standard error of the mean, or None for a single value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def summarize(runs: list[Run]) -> list[dict[str, Any]]:
    """One row per model and codec."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.model, run.codec), []).append(run)
    rows = []
    models = list(dict.fromkeys(run.model for run in runs))
    for (model, codec), group in sorted(groups.items(), key=lambda item: models.index(item[0][0])):
        accuracy = [run.accuracy for run in group]
        exact = {run.seed: run.accuracy for run in groups.get((model, "exact"), [])}
        difference = [run.accuracy - exact[run.seed] for run in group if run.seed in exact]
        row = {
            "model": model,
            "codec": codec,
            "accuracy": float(np.mean(accuracy)),
            "accuracy_se": standard_error(accuracy),
            "difference": float(np.mean(difference)) if difference else None,
            "difference_se": standard_error(difference),
            "wire_bytes_per_step": float(np.mean([run.wire_bytes_per_step for run in group])),
            "ratio": group[0].ratio,
            "identical": all(run.identical for run in group),
            "step_ms": float(np.mean([run.step_ms for run in group])),
        }
        rows.append(row)
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        "model  codec   accuracy   minus exact    sent/step  raw/sent  replicas    step",
        "                      %        points        bytes            identical     ms",
    ]
    previous = None
    for row in rows:
        if row["model"] != previous:
            lines.append("-" * len(lines[0]))
        previous = row["model"]
        difference = "-"
        if row["difference"] is not None and row["codec"] != "exact":
            difference = f"{row['difference']:+.2f}"
            if row["difference_se"] is not None:
                difference += f" ±{row['difference_se']:.2f}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"{row['model']:<6} {row['codec']:<6} {row['accuracy']:9.2f} {difference:>13}"
            f" {row['wire_bytes_per_step']:12,.0f} {ratio:>9}"
            f" {'yes' if row['identical'] else 'NO':>10} {row['step_ms']:7.2f}"
        )
    return "\n".join(lines)


def colours(codecs: list[str]) -> dict[str, Any]:
    """Black for exact, and from dark to bright for the others in the order given."""
    from matplotlib import colormaps

    lossy = [codec for codec in codecs if codec != "exact"]
    ramp = colormaps["plasma"](np.linspace(0.1, 0.85, len(lossy)))
    return {"exact": "black", **dict(zip(lossy, ramp, strict=True))}


def legend_above(axes: Any) -> None:
    """Legend between the axes and their title, where it cannot hide a point."""
    entries = max(1, len(axes.get_legend_handles_labels()[1]))
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 0.99),
        ncols=entries,
        frameon=False,
        columnspacing=1.2,
        handlelength=1.4,
    )


def plot_accuracy(axes: Any, rows: list[dict[str, Any]], codecs: list[str]) -> None:
    """Test accuracy of each codec, with a dashed line at the level of exact."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    for i, model in enumerate(models):
        mine = {row["codec"]: row for row in rows if row["model"] == model}
        x = np.arange(len(codecs)) + 0.16 * (i - (len(models) - 1) / 2)
        y = [mine[codec]["accuracy"] for codec in codecs]
        error = [mine[codec]["accuracy_se"] or 0 for codec in codecs]
        axes.errorbar(x, y, error, fmt="os"[i % 2], color=f"C{i}", capsize=3, label=model)
        if "exact" in mine:
            axes.axhline(mine["exact"]["accuracy"], color=f"C{i}", ls="--", lw=0.8, alpha=0.6)
    ratios = {row["codec"]: row["ratio"] for row in rows if row["model"] == models[0]}
    labels = [f"{c}\n{ratios[c]:.3g}x" if ratios[c] else c for c in codecs]
    axes.set_xticks(range(len(codecs)), labels)
    axes.set(xlabel=f"codec, and raw bytes / bytes sent ({models[0]})", ylabel="test accuracy (%)")
    legend_above(axes)


def plot_losses(axes: Any, runs: list[Run], codecs: list[str], window: int = 9) -> None:
    """Training loss over steps, averaged over seeds and smoothed over a few steps."""
    for codec, colour in colours(codecs).items():
        curves = [run.losses for run in runs if run.codec == codec]
        if not curves or len(curves[0]) < window:
            continue
        smooth = np.convolve(np.mean(curves, axis=0), np.ones(window) / window, mode="valid")
        steps = np.arange(len(smooth)) + window // 2 + 1
        axes.plot(steps, smooth, color=colour, lw=3 if codec == "exact" else 1.2, label=codec)
    axes.set(xlabel="step", ylabel="training loss (nats per image)", yscale="log")
    legend_above(axes)


def save_plot(runs: list[Run], rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Accuracy on the left, loss curves of the first model (the MLP) on the right."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    codecs = list(dict.fromkeys(run.codec for run in runs))
    model = runs[0].model
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    plot_accuracy(left, rows, codecs)
    plot_losses(right, [run for run in runs if run.model == model], codecs)
    seeds = len({run.seed for run in runs})
    of_seeds = f" of {seeds} seeds" if seeds > 1 else ""
    left.set_title("Test accuracy" + (of_seeds and f": mean ± s.e.{of_seeds}"), pad=26)
    right.set_title(f"Training loss: {model}" + (of_seeds and f", mean{of_seeds}"), pad=26)
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"Plot: {path}")


def save_json(
    runs: list[Run], rows: list[dict[str, Any]], ranks: int, args: argparse.Namespace
) -> None:
    """Everything measured; a loss that is not finite (a diverged run) becomes null."""
    raw = [
        asdict(run) | {"losses": [loss if math.isfinite(loss) else None for loss in run.losses]}
        for run in runs
    ]
    content = {
        "version": getattr(mpiquant, "__version__", "unknown"),
        "args": vars(args) | {"recipes": {k: asdict(v) for k, v in args.recipes.items()}},
        "ranks": ranks,
        "runs": raw,
        "table": rows,
    }
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")
    print(f"Raw numbers: {path}")


def write(runs: list[Run], data: str, tests: int, ranks: int, args: argparse.Namespace) -> None:
    """Print the table first: it must survive a plot that fails."""
    rows = summarize(runs)
    print(f"\n{format_table(rows)}\n")
    print(f"Data: {data}, {tests} test images, so one image is {100 / tests:.2f} points.")
    print(f"Ranks: {ranks}; seeds: {args.seeds}. Differences: paired by seed, ± standard error.")
    print("Bytes are those that rank 0 sends. Biases are always exact.")
    if args.json:
        save_json(runs, rows, ranks, args)
    if args.plot:
        save_plot(runs, rows, f"Quantized gradients on {ranks} ranks: {data}", Path(args.plot))
