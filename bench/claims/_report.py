"""What the claims scripts share: points with verdicts, and launches on several ranks."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench" / "lab")]
from run_mpi import launcher  # noqa: E402
from system import LabError  # noqa: E402


def run_ranks(size: int, *command: str, venv: str = "mpich", limit: int = 900) -> str:
    """Output of a Python command on several ranks; raises if it fails."""
    mpiexec, environment = launcher(ROOT / ".venv" / venv / "bin")
    python = str(ROOT / ".venv" / venv / "bin" / "python")
    full = [*mpiexec, "-n", str(size), python, "-m", "mpi4py", *command]
    done = subprocess.run(
        full, env=environment, capture_output=True, text=True, timeout=limit, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(full)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def rows_on_ranks(
    size: int, script: str, *arguments: str, mpi: str = "mpich", limit: int = 900
) -> Iterator[dict[str, Any]]:
    """The points that a script of this folder prints on several ranks."""
    file = str(Path(__file__).with_name(script))
    for line in run_ranks(size, file, *arguments, venv=mpi, limit=limit).splitlines():
        if line.startswith("{"):
            yield json.loads(line)


class Claims:
    """Prints one line per point; `code` is 1 once a point fell short."""

    def __init__(self) -> None:
        self.code = 0

    def head(self) -> None:
        print(f"{'point':64} {'figure':>24} {'bound':>14}  verdict")

    def report(self, point: str, figure: float | str) -> None:
        """Print a figure that has no bound."""
        self.check(point, figure, "reported", True)

    def check(self, point: str, figure: float | str, bound: str, holds: bool) -> None:
        shown = figure if isinstance(figure, str) else f"{figure:.4g}"
        verdict = "holds" if holds else "FALLS SHORT"
        print(f"{point:64} {shown:>24} {bound:>14}  {verdict}", flush=True)
        self.code |= not holds

    def at_least(self, point: str, figure: float, bound: float) -> None:
        self.check(point, figure, f">= {bound:g}", figure >= bound)

    def at_most(self, point: str, figure: float, bound: float) -> None:
        self.check(point, figure, f"<= {bound:g}", figure <= bound)

    def accuracy(self, point: str, lost: Any, limit: float) -> None:
        """Points of accuracy lost, paired by seed; the mean minus two standard errors is judged."""
        mean, error = lost.mean(), lost.std(ddof=1) / math.sqrt(len(lost))
        holds = bool(mean - 2 * error <= limit)
        self.check(point, f"{mean:.2f} +- {error:.2f}", f"-2se <= {limit}", holds)


def run_parts(description: str, parts: Mapping[str, Callable[[Claims], None]]) -> int:
    """Measure all parts, or the one that `--only` names; the exit code, 2 without a lab."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--only", choices=parts)
    only = parser.parse_args().only
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    claims = Claims()
    claims.head()
    for name, work in parts.items():
        if only in (None, name):
            try:
                work(claims)
            except LabError as error:
                print(error, file=sys.stderr)
                return 2
    return claims.code
