"""Tables and plots of what `compare_training.py` measured, beside each other.

    python docs/examples/compare_report.py bench/results/compare.json docs/images

The file has, for each network, runs without a limit of the network ("steps") and short runs at
several rates: seconds at a rate are steps times the median step there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

SMOOTH = 3
"""Validations that a loss is the mean of."""

ENDS = 0.8
"""Part of its steps behind which exact training counts as ended; others may take all of them to get
as far."""

TOLERANCE = {"conv": 1.05, "gpt": 1.0}
"""Times the loss of exact training that counts as reached.  That of the convolutional network
hardly falls any more behind a third of the steps, so that chance would decide."""

Record = dict[str, Any]


def smoothed(record: Record, column: int = 1) -> tuple[Any, Any]:
    """Steps, and the mean of the last few validations at each."""
    table = np.array(record["validation"])
    values = np.convolve(table[:, column], np.ones(SMOOTH) / SMOOTH, mode="valid")
    return table[SMOOTH - 1 :, 0], values


def final(record: Record, column: int = 1) -> float:
    return float(smoothed(record, column)[1][-1])


def target(exact: Record) -> float:
    """The validation loss that exact training ends with, and others are to reach."""
    steps, losses = smoothed(exact)
    return TOLERANCE[exact["model"]] * float(np.interp(ENDS * steps[-1], steps, losses))


def steps_to(record: Record, loss: float) -> float | None:
    """Steps until the validation loss is that low, between validations in proportion; or None."""
    steps, losses = smoothed(record)
    below = np.flatnonzero(losses <= loss)
    if not below.size:
        return None
    i = int(below[0])
    if i == 0:
        return float(steps[0])
    share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def summarize(model: dict[str, Any]) -> list[Record]:
    """A row for each method, means over the seeds; differences to exact are paired."""
    runs: dict[str, dict[int, Record]] = {}
    for record in model["steps"]:
        runs.setdefault(record["method"], {})[record["seed"]] = record
    exact, rows = runs["exact"], []
    for method, seeds in runs.items():
        shared = [seed for seed in seeds if seed in exact]
        steps = [steps_to(seeds[seed], target(exact[seed])) for seed in shared]
        reached = [s for s in steps if s is not None]
        row = {
            "method": method,
            "seeds": len(seeds),
            "sent": float(np.mean([r["sent"] for r in seeds.values()])),
            "loss": _mean_and_error([final(seeds[s]) for s in shared]),
            "more_loss": _mean_and_error([final(seeds[s]) - final(exact[s]) for s in shared]),
            "right": _mean_and_error([final(seeds[s], 2) for s in shared]),
            "more_right": _mean_and_error(
                [final(seeds[s], 2) - final(exact[s], 2) for s in shared]
            ),
            "steps": float(np.mean(reached)) if len(reached) == len(steps) else None,
            "identical": all(r["identical"] for r in seeds.values()),
            "step_s": {},
            "phases": {},
        }
        for rate, records in model["rates"].items():
            for record in records:
                if record["method"] == method:
                    # Most steps of local SGD send nothing: there the median says little.
                    which = "mean_step_s" if method.startswith("local") else "step_s"
                    row["step_s"][rate] = record[which]
                    row["phases"][rate] = record["phases"]
        rows.append(row)
    return rows


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error, 0 for one value."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(np.mean(values)), float(error)


def seconds(row: Record, rate: str) -> float | None:
    """Until the loss that exact ends with."""
    steps, step_s = row["steps"], row["step_s"].get(rate)
    return None if steps is None or step_s is None else steps * step_s


# ---- text ----


def table(rows: list[Record]) -> str:
    """What each method costs, in Markdown."""
    rates = list(rows[0]["step_s"])
    head = ["method", "MB sent per step", "validation loss", "right, %", "over exact", "steps"]
    head += [f"ms per step, {rate}" for rate in rates] + [f"s, {rate}" for rate in rates]
    head += [f"times faster, {rate}" for rate in rates]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["method"], f"{row['sent'] / 1e6:.3g}", _shown(row["loss"], 3)]
        cells += [_shown(row["right"], 1), _shown(row["more_right"], 1, sign=True)]
        cells += ["-" if row["steps"] is None else f"{row['steps']:.0f}"]
        cells += [f"{1e3 * row['step_s'][rate]:.0f}" for rate in rates]
        taken = [seconds(row, rate) for rate in rates]
        cells += ["-" if s is None else f"{s:.0f}" for s in taken]
        exact = [seconds(rows[0], rate) or 0.0 for rate in rates]
        cells += ["-" if s is None else f"{e / s:.2f}" for s, e in zip(taken, exact, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: tuple[float, float], digits: int, *, sign: bool = False) -> str:
    mean, error = value
    shown = f"{mean:{'+' if sign else ''}.{digits}f}"
    return shown if not error else f"{shown} ± {error:.{digits}f}"


PHASES = ("forward", "backward", "encode", "decode", "wait", "update")


def phase_table(rows: list[Record], rate: str) -> str:
    """Milliseconds of each phase, in Markdown."""
    lines = ["| method | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for row in rows:
        phases = row["phases"].get(rate)
        if phases:
            cells = [f"{phases[p]:.1f}" if p in phases else "" for p in PHASES]
            lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- plots ----


def plot(name: str, model: dict[str, Any], rows: list[Record], folder: Path) -> None:
    """Validation loss against steps, and against seconds at each rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot

    rates = list(model["rates"])
    figure, axes = pyplot.subplots(1, 1 + len(rates), figsize=(15, 5), layout="constrained")
    ramp = colormaps["turbo"](np.linspace(0.05, 0.95, len(rows) - 1))
    for row, colour in zip(rows, ["black", *ramp], strict=True):
        runs = [r for r in model["steps"] if r["method"] == row["method"]]
        steps = smoothed(runs[0])[0]
        losses = np.mean([smoothed(r)[1] for r in runs], axis=0)
        style = {"color": colour, "lw": 2.5 if row["method"] == "exact" else 1.2}
        axes[0].plot(steps, losses, label=row["method"], **style)
        for rate, where in zip(rates, axes[1:], strict=True):
            if rate in row["step_s"]:
                where.plot(steps * row["step_s"][rate], losses, **style)
    axes[0].set(xlabel="step", ylabel="validation loss")
    for rate, where in zip(rates, axes[1:], strict=True):
        where.set(xlabel=f"seconds at {rate}", xscale="log")
    for where in axes:
        where.set_yscale("log")
        where.grid(alpha=0.25)
        where.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    ranks, batch, count = (runs[0][key] for key in ("ranks", "batch", "parameters"))
    figure.suptitle(f"{name}: {count:,} parameters, {ranks} ranks with batches of {batch}")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"compare_{name}.png", dpi=130)


def main() -> None:
    """Print the tables, and save the plots."""
    file, folder = map(Path, sys.argv[1:])
    for name, model in json.loads(file.read_text())["models"].items():
        rows = summarize(model)
        print(f"\n## {name}\n\n{table(rows)}")
        for rate in model["rates"]:
            print(f"\nms per step, {rate}:\n\n{phase_table(rows, rate)}")
        plot(name, model, rows, folder)


if __name__ == "__main__":
    main()
