"""`mpiquant report results.json ...`: plots as PNG files, and one page that holds everything."""

from __future__ import annotations

import argparse
import base64
import html
import io
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from mpiquant.cli import job
from mpiquant.cli.bench_compare import read

Row = dict[str, Any]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1em 0 }
td, th { padding: .15em .7em; text-align: right; border-bottom: 1px solid #ddd }
img { max-width: 100%; margin: .5em 0 }
code { background: #f4f4f4; padding: .1em .3em }
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("report", help="plots and a page of benchmark results")
    parser.add_argument("results", type=Path, nargs="+", help="files of mpiquant bench --json")
    parser.add_argument("-o", "--output", type=Path, help="page (default: first file, as .html)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    reports = {file.stem: read(file) for file in arguments.results}
    page = arguments.output or arguments.results[0].with_suffix(".html")
    plots = dict(_plots(reports))
    for name, png in plots.items():
        file = page.with_name(f"{page.stem}-{name}.png")
        file.write_bytes(png)
        print(file)
    page.write_text(_page(page.stem, reports, plots))
    print(page)
    return 0


# ---- plots ----


def _plots(reports: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Name and PNG of each plot that the figures allow."""
    try:
        import matplotlib
    except ImportError:
        raise job.UsageError("report needs matplotlib: pip install 'mpiquant[report]'") from None
    matplotlib.use("Agg")
    lines = {
        (f"{stem}: {name}" if len(reports) > 1 else name): rows
        for stem, report in reports.items()
        for name, rows in _lines(report["results"]).items()
    }
    yield "time", _against_size(lines, "time (ms)", lambda row: row["time_us"] / 1e3, log=True)
    for report in reports.values():
        _add_speedup(report["results"])
    rows = [row for line in lines.values() for row in line]
    if any("speedup" in row and row["algo"] != "native" for row in rows):
        label = "times as fast as native"
        yield "speedup", _against_size(lines, label, lambda row: row.get("speedup"), level=1)
    if any(row.get("limit_ratio") for row in rows):
        label = "time / what the link allows"
        # Small messages take a thousand times what a link allows; large ones little more.
        of_limit: dict[str, Any] = {"log": True, "level": 1}
        yield "limit", _against_size(lines, label, lambda row: row.get("limit_ratio"), **of_limit)
    if any(row.get("phases") for row in rows):
        yield "phases", _phases(lines)


def _lines(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of one variant, by its name, in order of size."""

    def name(row: Row) -> str:
        return "native" if row["codec"] == "native" else f"{row['codec']}, {row['algo']}"

    ordered = sorted(rows, key=lambda row: (name(row), row["size"]))
    return {key: list(group) for key, group in groupby(ordered, name)}


def _add_speedup(rows: list[Row]) -> None:
    native = {row["size"]: row["time_us"] for row in rows if row["codec"] == "native"}
    for row in rows:
        if row["size"] in native:
            row["speedup"] = native[row["size"]] / row["time_us"]


def _against_size(
    lines: dict[str, list[Row]],
    label: str,
    value: Callable[[Row], float | None],
    *,
    log: bool = False,
    level: float | None = None,
) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, rows in lines.items():
        points = [(row["size"], value(row)) for row in rows if value(row) is not None]
        if points:
            native = name.endswith("native")
            sizes, values = zip(*points, strict=True)
            axes.plot(sizes, values, "k--" if native else "o-", label=name, markersize=4)
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if level is not None:
        axes.axhline(level, color="grey", linewidth=0.8)
    axes.set_xlabel("size of the array (bytes)")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return _png(figure)


def _phases(lines: dict[str, list[Row]]) -> bytes:
    """Where the time of the largest size of each variant goes."""
    from matplotlib.figure import Figure

    largest = {name: rows[-1] for name, rows in lines.items() if rows[-1].get("phases")}
    figure = Figure(figsize=(9, 1 + 0.4 * len(largest)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(largest)
    for phase in (name for name in next(iter(largest.values()))["phases"] if name != "total"):
        widths = [row["phases"][phase] / 1e3 for row in largest.values()]
        axes.barh(list(largest), widths, left=left, label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of one call, mean over the ranks")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


# ---- the page ----


def _page(title: str, reports: dict[str, dict[str, Any]], plots: dict[str, bytes]) -> str:
    images = "\n".join(
        f'<h2>{name}</h2>\n<img alt="{name}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for name, png in plots.items()
    )
    tables = "\n".join(_table(stem, report) for stem, report in reports.items())
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{name}</h1>\n{images}\n{tables}\n</html>\n"
    )


def _table(stem: str, report: dict[str, Any]) -> str:
    titles = [key for key, value in report["results"][0].items() if not isinstance(value, dict)]
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_shown(row.get(key))}</td>" for key in titles) + "</tr>"
        for row in report["results"]
    )
    facts = {**report["env"], **report["args"], "version": report["version"]}
    about = ", ".join(f"{key} <code>{html.escape(str(v))}</code>" for key, v in facts.items())
    return f"<h2>{html.escape(stem)}</h2>\n<p>{about}</p>\n<table><tr>{head}</tr>\n{body}\n</table>"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))
