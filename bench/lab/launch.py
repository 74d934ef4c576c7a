"""Start an MPI job on the emulated cluster, one process or several on each host."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import cluster
from system import LabError, busy_s

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MPIS = ("mpich", "openmpi", "intel")

LEAST_SENT = 4000
"""Bytes that even a job of one barrier puts on the wire of each host."""


@dataclass
class Job:
    """A command for all ranks.

    Attributes
    ----------
    mpi : {"mpich", "openmpi", "intel"}
    hosts, ppn : int
        Processes are as many as the product; those of one host are neighbours.
    command : list of str
        For each rank; programs of `binaries` are found by name.
    binaries : Path
        Folder with that MPI's mpiexec; by default that of `.venv/<mpi>`.
    limit_s : float
        The job is ended after this time.
    environment : dict
        Variables for all ranks, beside those that choose the wire.
    default : bool
        Whether the MPI is left as its wheel comes, as far as it then uses the wire at all.
    """

    mpi: str
    hosts: int
    command: list[str]
    ppn: int = 1
    binaries: Path | None = None
    limit_s: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)
    default: bool = False

    @property
    def bin(self) -> Path:
        return self.binaries or ROOT / ".venv" / self.mpi / "bin"

    @property
    def names(self) -> list[str]:
        return [f"{cluster.PREFIX}{i}" for i in range(self.hosts)]


@dataclass
class Result:
    """How a job went."""

    code: int
    out: str
    err: str
    wall_s: float
    busy_s: float
    """Core-seconds of the whole machine meanwhile, with its network."""
    sent: dict[str, int]
    """Bytes on the wire of each host."""

    def summary(self) -> str:
        sent = ", ".join(f"{host} {nbytes:,}" for host, nbytes in self.sent.items())
        cores = self.busy_s / self.wall_s
        return f"{self.wall_s:.2f} s, {cores:.2f} cores busy, bytes sent: {sent}"

    def require(self, nbytes: float) -> Result:
        """The result itself; LabError unless each host has sent at least so many bytes."""
        quiet = [host for host, sent in self.sent.items() if sent < nbytes]
        if self.code == 0 and len(self.sent) > 1 and quiet:
            raise LabError(
                f"less than {nbytes:,.0f} bytes crossed the wire of {', '.join(quiet)}: "
                + self.summary()
            )
        return self


# ---- command lines ----


def _mpich(job: Job, agent: str) -> list[str]:
    # libfabric's tcp provider: the fastest of MPICH's ways over this wire, and full duplex.
    wire = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
    if job.default:
        wire = {"UCX_TLS": "tcp,self,sm", "UCX_NET_DEVICES": "eth0"}
    return _hydra(job, "mpiexec", ["-launcher", "ssh", "-launcher-exec", agent], wire)


def _intel(job: Job, agent: str) -> list[str]:
    fabrics = "ofi" if job.ppn == 1 else "shm:ofi"
    wire = {"I_MPI_FABRICS": fabrics, "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
    wire |= {"I_MPI_PIN": "0", "MPI4PY_LIBMPI": str(job.bin.parent / "lib" / "libmpi.so.12")}
    if not job.default:
        wire["I_MPI_THREAD_YIELD"] = "2"  # else a waiting rank keeps its core for itself
    return _hydra(job, "mpiexec.hydra", ["-bootstrap", "ssh", "-bootstrap-exec", agent], wire)


def _hydra(job: Job, mpiexec: str, launcher: list[str], wire: dict[str, str]) -> list[str]:
    command = [str(job.bin / mpiexec), *launcher, "-iface", "eth0", "-hosts", ",".join(job.names)]
    command += ["-ppn", str(job.ppn), "-n", str(job.hosts * job.ppn)]
    variables = {**wire, **_variables(job)}
    return command + [word for pair in variables.items() for word in ("-genv", *pair)]


def _openmpi(job: Job, agent: str) -> list[str]:
    options = {
        "pml": "ob1",
        "btl": "tcp,self" if job.ppn == 1 else "tcp,self,sm",
        "btl_tcp_if_include": "eth0",
    }
    if not job.default:
        # With one link, exchanges above the rendezvous size run at half speed.
        options |= {"btl_tcp_links": "2", "mpi_yield_when_idle": "1"}
    command = [str(job.bin / "mpiexec"), "--prtemca", "plm_ssh_agent", agent]
    command += ["--prtemca", "oob_tcp_if_include", "eth0"]
    command += ["--host", ",".join(f"{name}:{job.ppn}" for name in job.names)]
    # The default binds the first rank of every "host" to the same core.
    command += ["--map-by", f"ppr:{job.ppn}:node", "--bind-to", "none"]
    command += ["-n", str(job.hosts * job.ppn)]
    command += [word for pair in options.items() for word in ("--mca", *pair)]
    return command + [w for key, value in _variables(job).items() for w in ("-x", f"{key}={value}")]


def _variables(job: Job) -> dict[str, str]:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    path = f"{job.bin}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, **one_thread, **job.environment}


_COMMANDS = {"mpich": _mpich, "openmpi": _openmpi, "intel": _intel}


@contextmanager
def _agent() -> Iterator[str]:
    """A command like ssh, for the launchers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "agent.sh"
        call = f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE))} agent"
        file.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        file.chmod(0o755)
        yield str(file)


# ---- running ----


def run(job: Job) -> Result:
    """Run a job to its end, on a cluster that is up; code 124 if it took too long.

    Raises LabError if it ended well and put next to nothing on the wire.
    """
    root_too = {
        f"{package}_ALLOW_RUN_AS_ROOT{end}": "1"
        for package in ("OMPI", "PRTE")
        for end in ("", "_CONFIRM")
    }
    if not job.bin.is_dir():
        raise LabError(f"no {job.mpi} in {job.bin}")
    sent, busy, begin = cluster.sent_bytes(), busy_s(), time.monotonic()
    with _agent() as agent:
        argv = [sys.executable, str(HERE), "exec", job.names[0], "--"]
        argv += [*_COMMANDS[job.mpi](job, agent), *job.command]
        process = subprocess.Popen(
            argv,
            env={**os.environ, **root_too},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        code, out, err = _finish(process, job.limit_s)
    wall_s = time.monotonic() - begin
    now = cluster.sent_bytes()
    moved = {host: now[host] - sent[host] for host in job.names}
    return Result(code, out, err, wall_s, busy_s() - busy, moved).require(LEAST_SENT)


def _finish(process: subprocess.Popen[str], limit_s: float) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=limit_s)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        return (124, *_end(process))
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the launcher, which ends the ranks; what is left then ends with the hosts."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)
    return "", ""
