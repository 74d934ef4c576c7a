"""Start an MPI job on the emulated cluster, one process or several on each host."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import cluster

HERE = Path(__file__).parent
MPIS = ("mpich", "openmpi")


@dataclass
class Job:
    """A command for all ranks.

    Attributes
    ----------
    mpi : {"mpich", "openmpi"}
    binaries : Path
        Folder with that MPI's mpiexec, and a python that finds it.
    hosts, ppn : int
    command : list of str
    limit_s : float
        The job is ended after this time.
    """

    mpi: str
    binaries: Path
    hosts: int
    command: list[str]
    ppn: int = 1
    limit_s: float = 120.0
    environment: dict[str, str] = field(default_factory=dict)


def _mpiexec(job: Job, agent: str) -> list[str]:
    names = [f"{cluster.PREFIX}{i}" for i in range(job.hosts)]
    ranks = str(job.hosts * job.ppn)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **job.environment}
    mpiexec = str(job.binaries / "mpiexec")
    if job.mpi == "mpich":
        # libfabric's tcp provider: the fastest of MPICH's ways over this wire, and full duplex.
        wire = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"}
        environment = [word for pair in {**wire, **threads}.items() for word in ("-genv", *pair)]
        command = [mpiexec, "-launcher", "ssh", "-launcher-exec", agent, "-iface", "eth0"]
        return [
            *command,
            "-hosts",
            ",".join(names),
            "-ppn",
            str(job.ppn),
            "-n",
            ranks,
            *environment,
        ]
    options = {
        "pml": "ob1",
        "btl": "tcp,self" if job.ppn == 1 else "tcp,self,sm",
        "btl_tcp_if_include": "eth0",
        "btl_tcp_links": "2",  # with one, exchanges above the rendezvous size run at half speed
        "mpi_yield_when_idle": "1",
    }
    command = [mpiexec, "--prtemca", "plm_ssh_agent", agent, "--prtemca", "oob_tcp_if_include"]
    command += ["eth0", "--host", ",".join(f"{name}:{job.ppn}" for name in names)]
    command += ["--map-by", f"ppr:{job.ppn}:node", "--bind-to", "none", "-n", ranks]
    command += [word for pair in options.items() for word in ("--mca", *pair)]
    return command + [w for key, value in threads.items() for w in ("-x", f"{key}={value}")]


@contextmanager
def _agent() -> Iterator[str]:
    """A command like ssh, for the launchers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "agent.sh"
        call = f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE))} agent"
        file.write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        file.chmod(0o755)
        yield str(file)


def run(job: Job) -> subprocess.CompletedProcess[str]:
    """Run a job to its end; output as text.  Raises LabError if nothing crossed the wire."""
    allow = {
        f"{package}_ALLOW_RUN_AS_ROOT{end}": "1"
        for package in ("OMPI", "PRTE")
        for end in ("", "_CONFIRM")
    }
    before = cluster.sent_bytes()
    with _agent() as agent:
        argv = [sys.executable, str(HERE), "exec", f"{cluster.PREFIX}0", "--"]
        argv += [*_mpiexec(job, agent), *job.command]
        process = subprocess.Popen(
            argv,
            env={**os.environ, **allow},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=job.limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                out, err = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return subprocess.CompletedProcess(argv, 124, out, err)
    quiet = [host for host, sent in cluster.sent_bytes().items() if sent - before[host] < 2000]
    if process.returncode == 0 and job.hosts > 1 and set(quiet) & {"mq0", "mq1"}:
        raise cluster.LabError(f"nothing crossed the wire of {', '.join(quiet)}")
    return subprocess.CompletedProcess(argv, process.returncode, out, err)
