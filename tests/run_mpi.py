"""Runs tests/mpi under mpiexec: one launch per number of ranks, each with a time limit.

usage: python tests/run_mpi.py [--tests mpi] [--sizes 1,2,3,4,5,8] [pytest arguments]

Uses the mpiexec beside the running Python and stops at the first failing launch.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 480


def launcher(binaries: Path) -> tuple[list[str], dict[str, str]]:
    """mpiexec with its options, and the environment it needs."""
    mpiexec = str(binaries / "mpiexec")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "Open MPI" not in version:
        return [mpiexec], environment
    for package in ("OMPI", "PRTE"):
        environment[f"{package}_ALLOW_RUN_AS_ROOT"] = "1"
        environment[f"{package}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    # Waiting ranks must yield where there are fewer cores than ranks.
    options = ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [mpiexec, *options], environment


def run(folder: str, size: int, arguments: list[str]) -> int:
    """Exit code of one launch; its whole process group is ended at the time limit."""
    command, environment = launcher(Path(sys.executable).parent)
    environment["MPIQUANT_TEST_SIZE"] = str(size)
    tests = Path(__file__).parent / folder
    pytest = [
        "-m",
        "mpi4py",
        "-m",
        "pytest",
        "--with-mpi",
        "--timeout=120",
        "-x",
        "-q",
        "--color=no",
    ]
    command += ["-n", str(size), sys.executable, *pytest, "-p", "no:cacheprovider", str(tests)]
    # One rank prints; the others' output would be the same.
    quiet = Path(__file__).parent / "quiet_ranks.sh"
    command[command.index(sys.executable) : command.index(sys.executable)] = ["sh", str(quiet)]
    process = subprocess.Popen([*command, *arguments], env=environment, start_new_session=True)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{size} ranks: no end after {LIMIT_S} s", file=sys.stderr)
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        return 124


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tests", default="mpi", help="folder beside this file")
    parser.add_argument("--sizes", default="1,2,3,4,5,8")
    options, arguments = parser.parse_known_args()
    for size in map(int, options.sizes.split(",")):
        begin = time.monotonic()
        code = run(options.tests, size, arguments)
        print(f"-- {size} ranks: exit code {code}, {time.monotonic() - begin:.0f} s", flush=True)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
