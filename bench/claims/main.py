"""`make claims-main`: measures every claim on kernels, ratios, identity, feedback and training.

Exit code 1 if a point falls short.  Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
from _report import ROOT, Claims, run_ranks

SEEDS = 8


def kernels(claims: Claims, folder: Path) -> None:
    """Throughput against np.copyto of the same array, 64 MiB."""
    file = folder / "kernels.json"
    command = [sys.executable, "-m", "mpiquant.cli.main", "bench", "kernels"]
    subprocess.run([*command, "--json", str(file)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = {
        (r["kernel"], r["bits"], r["rounding"], r["dtype"]): r
        for r in json.loads(file.read_text())["results"]
        if r["codec"].startswith("q")
    }
    get = lambda *key: rows[key]["vs_copyto"]  # noqa: E731
    for bits in (8, 4, 2, 1):
        for kernel in ("encode", "decode_add"):
            name = f"{kernel}, {bits} bit, float32: times np.copyto"
            claims.at_least(name, get(kernel, bits, "nearest", "float32"), 1.5)
    for bits in (8, 4):
        ratio = get("encode", bits, "stochastic", "float32")
        ratio /= get("encode", bits, "nearest", "float32")
        claims.at_least(f"encode, {bits} bit: stochastic over nearest", ratio, 0.5)
    for bits in (8, 4, 2, 1):
        fused = get("hop", bits, "nearest", "float32")
        ratio = fused / get("unfused", bits, "nearest", "float32")
        claims.at_least(f"fused hop over its three parts, {bits} bit", ratio, 1.0)
    for bits in (8, 4, 2, 1):
        for kernel in ("encode", "decode_add"):
            ratio = rows[kernel, bits, "nearest", "float64"]["gbps"]
            ratio /= rows[kernel, bits, "nearest", "float32"]["gbps"]
            claims.at_least(f"{kernel}, {bits} bit: float64 over float32 in GB/s", ratio, 0.6)


def errors_fall(claims: Claims) -> None:
    """One encoding at 1 to 8 bits with the default blocks."""
    from mpiquant.codecs import by_name

    rng = np.random.default_rng(0)
    data = {
        "N(0,1)": rng.standard_normal(1 << 20),
        "Laplace": rng.laplace(size=1 << 20),
        "Student-t(3)": rng.standard_t(3, 1 << 20),
    }
    for name, values in data.items():
        x = values.astype(np.float32)
        found = []
        for bits in range(1, 9):
            codec = by_name(f"q{bits}")
            wire, out = np.empty(codec.nbytes(x.size, x.dtype), np.uint8), np.empty_like(x)
            codec.encode(x, wire)
            codec.decode(wire, out)
            found.append(float(np.linalg.norm(out - x) / np.linalg.norm(x)))
        worst = max(later / earlier for earlier, later in pairwise(found))
        claims.check(f"error on {name}, 1 to 8 bits: largest step ratio", worst, "< 1", worst < 1)


def on_ranks(claims: Claims) -> None:
    """Ratio, identity, repeats, feedback: one launch per number of ranks and MPI."""
    script = str(Path(__file__).with_name("on_ranks.py"))
    worst: dict[str, dict[str, float]] = {}
    for venv in ("mpich", "openmpi"):
        for size in range(1, 9):
            for line in run_ranks(size, script, venv=venv).splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                    best = worst.setdefault(row["point"], row)
                    pick = min if row["sense"] == "least" else max
                    best["figure"] = pick(best["figure"], row["figure"])
    for point, row in worst.items():
        check = claims.at_least if row["sense"] == "least" else claims.at_most
        check(point, row["figure"], row["bound"])


def bounded_residuals(claims: Claims) -> None:
    """Residual of the low-bit codecs over 1,000 steps of 16 simulated ranks."""
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from test_program import residual_norms

    from mpiquant.collectives import ALGORITHMS

    for name in ("q1", "q2", "ternary"):
        for algorithm in ALGORITHMS:
            norms = residual_norms(name, algorithm)
            growth = np.mean(norms[-100:]) / np.mean(norms[300:400])
            point = f"{name}, {algorithm}: residual of steps 900-999 over 300-399"
            claims.at_most(point, float(growth), 1.2)


def training(claims: Claims, folder: Path) -> None:
    """Loss of accuracy, paired by seed, in points; a mean minus two standard errors is judged."""
    file = folder / "training.json"
    script = str(ROOT / "docs" / "examples" / "train_mnist.py")
    run_ranks(
        4, script, "--seeds", str(SEEDS), "--codecs", "exact,q8,q4,q2,q1", "--plot", "",
        "--json", str(file),
    )  # fmt: skip
    table: dict[tuple[str, str], list[float]] = {}
    for run in json.loads(file.read_text())["runs"]:
        table.setdefault((run["model"], run["codec"]), []).append(run["accuracy"])
        if run["codec"] != "exact" and not run["identical"]:
            claims.check(f"{run['model']}, {run['codec']}: replicas identical", "no", "yes", False)
    for (model, codec), accuracies in table.items():
        if codec == "exact":
            continue
        losses = np.array(table[model, "exact"]) - np.array(accuracies)
        limit = 0.3 if codec in ("q8", "q4") else 1.0
        point = f"{model}, {codec}: loss of accuracy in points, {len(losses)} seeds"
        claims.accuracy(point, losses, limit)


def drop_in(claims: Claims) -> None:
    """An OSU-style script of plain mpi4py calls, changed in one line only."""
    original = Path(__file__).parents[1] / "osu_allreduce.py"
    line = "comm = MPI.COMM_WORLD"
    text = original.read_text()
    assert text.count(line) == 1
    with tempfile.TemporaryDirectory() as folder:
        for venv in ("mpich", "openmpi"):
            plain = run_ranks(4, str(original), venv=venv)
            for options in ("", ', codec="q8"'):
                wrapped = Path(folder) / "osu_wrapped.py"
                change = f"import mpiquant; {line}; comm = mpiquant.wrap(comm{options})"
                wrapped.write_text(text.replace(line, change))
                ours = run_ranks(4, str(wrapped), venv=venv)
                same = ours.count("Pass") == plain.count("Pass") > 0 and "Fail" not in ours
                point = f"OSU-style script, wrap(comm{options}), {venv}: sizes validated"
                claims.check(point, f"{ours.count('Pass')}", f"= {plain.count('Pass')}", same)


def fresh_clone(claims: Claims) -> None:
    """The two commands of the README in a new folder, with environments of their own."""
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name) / "mpiquant"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        for target, limit in (("demo", 300), ("test", 1500)):
            begin = time.monotonic()
            done = subprocess.run(["make", target], cwd=clone, capture_output=True, text=True)
            took = time.monotonic() - begin
            shown = f"exit {done.returncode}, {took:.0f} s"
            holds = done.returncode == 0 and took < limit
            claims.check(f"make {target} in a fresh clone", shown, f"0, < {limit} s", holds)
            if target == "demo":
                rows = [line for line in done.stdout.splitlines() if " yes " in line]
                claims.at_least("rows of make demo's table with identical replicas", len(rows), 12)
            if not holds:
                print(done.stdout[-3000:], done.stderr[-3000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("kernels", "errors", "ranks", "residuals", "training", "dropin", "fresh")
    parser.add_argument("--only", choices=parts)
    only = parser.parse_args().only
    claims = Claims()
    claims.head()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, work in (
            ("kernels", lambda: kernels(claims, folder)),
            ("errors", lambda: errors_fall(claims)),
            ("ranks", lambda: on_ranks(claims)),
            ("residuals", lambda: bounded_residuals(claims)),
            ("training", lambda: training(claims, folder)),
            ("dropin", lambda: drop_in(claims)),
            ("fresh", lambda: fresh_clone(claims)),
        ):
            if only in (None, part):
                work()
    return claims.code


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
