"""The MPI job that a command runs in: how it ends when one rank fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from mpi4py import MPI


class UsageError(ValueError):
    """Bad arguments that all ranks find alike, so that none of them waits for another."""


def several_ranks() -> MPI.Intracomm | None:
    """The world of a running MPI with more than one rank; never starts MPI."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    world: MPI.Intracomm = module.COMM_WORLD
    return world if world.size > 1 else None


def exit_code(code: int) -> int:
    """The code, if this process is alone; otherwise end all ranks with it, since they may wait."""
    world = several_ranks()
    if world is not None:
        abort(world, code)
    return code


def abort(world: MPI.Intracomm, code: int, text: str = "") -> NoReturn:
    sys.stdout.flush()
    sys.stderr.write(text)  # in one piece
    sys.stderr.flush()
    time.sleep(0.2)  # launchers drop what they have not forwarded by then
    world.Abort(code)
    os._exit(code)  # MPICH's comes back if another rank was faster


def check_writable(comm: MPI.Intracomm, file: Path | None) -> None:
    """UsageError on all ranks if rank 0, which will write the file, cannot; collective."""
    problem = None
    if comm.rank == 0 and file is not None:
        try:
            file.open("a").close()
        except OSError as error:
            problem = str(error)
    problem = comm.bcast(problem)
    if problem is not None:
        raise UsageError(problem)
