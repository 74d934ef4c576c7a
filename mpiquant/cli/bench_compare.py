"""`mpiquant bench --compare A B`: the same cases of two reports, side by side."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

KEY = ("size", "dtype", "op", "codec", "algo")


def read(file: Path) -> dict[str, Any]:
    """A report of `mpiquant bench`; ValueError if it is none."""
    try:
        report = json.loads(file.read_text())
        rows = report["results"]
        if not rows or not all(isinstance(row["time_us"], (int, float)) for row in rows):
            raise KeyError
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{file} is no report of mpiquant bench allreduce and its kin") from None
    found: dict[str, Any] = report
    return found


def compare(first: Path, second: Path) -> int:
    """Print the times of the cases that both reports have; exit code 1 if there are none."""
    reports = [read(first), read(second)]
    for name, report in zip("ab", reports, strict=True):
        environment = report["env"]
        print(f"# {name}: {report['ranks']} ranks, {environment['mpi']}, {report['version']}")
    left, right = ({_key(row): row for row in report["results"]} for report in reports)
    keys = [key for key in left if key in right]
    if not keys:
        print("# no case is in both")
        return 1
    widths = (12, 9, 7, 9, 18)
    cells = "".join(f"{title:>{w}}" for title, w in zip(KEY, widths, strict=True))
    print(f"{cells}{'a (us)':>14}{'b (us)':>14}{'b / a':>9}")
    ratios = []
    for key in keys:
        times = left[key]["time_us"], right[key]["time_us"]
        ratios.append(times[1] / times[0])
        cells = "".join(f"{value:>{w}}" for value, w in zip(key, widths, strict=True))
        print(f"{cells}{times[0]:>14.1f}{times[1]:>14.1f}{ratios[-1]:>9.3f}")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"# geometric mean of b / a: {mean:.3f} ({len(keys)} cases)")
    return 0


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)
