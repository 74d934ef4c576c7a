"""Whole jobs, started under mpiexec and watched from outside."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from run_mpi import launcher

PREAMBLE = """
import os, signal, sys, time
import numpy as np
import mpiquant
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
x = np.full(100_000, 1.0 + rank, np.float32)
def say(*words):
    os.write(1, (f"[{rank}] " + " ".join(map(str, words)) + "\\n").encode())
"""


class Job:
    """A job under way; ended with its whole process group when the test is over."""

    def __init__(self, size, script, folder, *, preamble=PREAMBLE, options=(), mpi_options=()):
        file = folder / "job.py"
        file.write_text(preamble + textwrap.dedent(script))
        mpiexec, environment = launcher(Path(sys.executable).parent)
        mark = uuid.uuid4().hex
        environment["MPIQUANT_TEST_JOB"], self.mark = mark, mark.encode()
        command = [*mpiexec, *mpi_options, "-n", str(size), sys.executable, *options]
        command += ["-m", "mpi4py", str(file)]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []

    def read_until(self, word, limit=30):
        """Output lines up to the first with the word."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            line = self.process.stdout.readline()
            if not line:
                break
            self.lines.append(line)
            if word in line:
                return line
        raise AssertionError(f"no {word!r} in\n{''.join(self.lines)}")

    def finish(self, limit=30):
        """Exit code and the whole output."""
        out, _ = self.process.communicate(timeout=limit)
        return self.process.returncode, "".join(self.lines) + out

    def pids(self):
        """Processes of the job; launchers put ranks into sessions of their own."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if self.mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def end(self):
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def start(tmp_path):
    """Start a job of some ranks."""
    jobs = []

    def begin(size, script, **more):
        jobs.append(Job(size, script, tmp_path, **more))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()
