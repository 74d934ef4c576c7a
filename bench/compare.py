"""`make compare`: all ways to exchange gradients in real training, on emulated clusters.

Steps to a loss are measured without a limit of the network, seconds as the median of short runs at
each rate; both go to bench/results/compare.json.  `--whole "exact,4 bit direct"` checks that: these
ways, to the end, at the lower rate.
As root on Linux, with .venv/mpich and .venv/torch; takes about an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
import compare_report
import launch
import measure

RANKS = 4
RATES = ("1gbit", "100mbit")
SCRIPT = launch.ROOT / "docs" / "examples" / "compare_training.py"

SHORT = 50
"""Steps of a run at a rate."""

RUNS = {
    "conv": {"steps": 400, "seeds": 5, "every": 20},
    "gpt": {"steps": 500, "seeds": 1, "every": 20},
}

VENVS = {"conv": "mpich", "gpt": "torch"}

Records = list[dict[str, Any]]


def python(model: str) -> Path:
    return launch.ROOT / ".venv" / VENVS[model] / "bin" / "python"


def command(model: str, options: dict[str, Any], file: Path) -> list[str]:
    words = [str(python(model)), "-m", "mpi4py", str(SCRIPT), model, "--json", str(file)]
    return words + [word for key, value in options.items() for word in (f"--{key}", str(value))]


def unlimited(model: str, limit_s: float = 7200, **options: Any) -> Records:
    """Runs on this machine, through its memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.json"
        words = [str(python(model).with_name("mpiexec")), "-n", str(RANKS)]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        subprocess.run(
            words + command(model, options, file),
            env={**os.environ, **one_thread},
            timeout=limit_s,
            check=True,
        )
        records: Records = json.loads(file.read_text())
    return records


def limited(model: str, rate: str, limit_s: float = 3600, **options: Any) -> Records:
    """Runs on hosts with links of this rate."""
    with tempfile.TemporaryDirectory() as folder, measure.wire(RANKS, rate):
        file = Path(folder) / "records.json"
        job = launch.Job("mpich", RANKS, command(model, options, file), limit_s=limit_s)
        done = launch.run(job)
        if done.code:
            raise measure.LabError(f"code {done.code}: {done.out[-1000:]}\n{done.err[-3000:]}")
        print(done.out, end="", flush=True)
        records: Records = json.loads(file.read_text())
    return records


def check_whole(model: str, methods: str) -> None:
    """Runs to the end of exact training at the lower rate, beside what short ones promise."""
    steps = round(compare_report.ENDS * RUNS[model]["steps"])
    options = {**RUNS[model], "seeds": 1, "steps": steps, "every": steps // 4}
    for record in limited(model, RATES[-1], methods=methods, **options):
        seconds = record["seconds"]
        promised = steps * record["step_s"]
        print(
            f"{model}, {record['method']}, {RATES[-1]}: {steps} steps in {seconds:.0f} s, "
            f"{seconds / promised:.3f} of steps times the median of a step, "
            f"validation {record['validation'][-1][1]:.3f}"
        )


def main() -> None:
    """Measure, and store after each part, so that little is lost where one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="conv,gpt", help="default: %(default)s")
    parser.add_argument("--whole", metavar="WAYS", help="only check whole runs of some ways")
    parser.add_argument("--file", type=Path, default=measure.RESULTS / "compare.json")
    args = parser.parse_args()
    if args.whole:
        for model in args.models.split(","):
            check_whole(model, args.whole)
        return
    found: dict[str, Any] = {"models": {}}
    if args.file.exists():
        found = json.loads(args.file.read_text())
    for model in args.models.split(","):
        result: dict[str, Any] = {"rates": {}}
        result["steps"] = unlimited(model, **RUNS[model])
        for rate in RATES:
            result["rates"][rate] = limited(model, rate, steps=SHORT, every=0)
        found["models"][model] = result
        args.file.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
