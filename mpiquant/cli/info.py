"""`mpiquant info`: what runs here, for bug reports and for choosing."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import numpy as np

from mpiquant import __version__, _kernels, codecs
from mpiquant.collectives import NAMES
from mpiquant.config import Options, current


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("info", help="versions, instruction set, MPI, codecs, options")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    rows = [
        ("mpiquant", __version__),
        ("python", platform.python_version()),
        ("numpy", np.__version__),
        ("machine", f"{platform.machine()}, {os.cpu_count()} cores"),
        ("instruction set", f"{_kernels.isa()} (of {', '.join(_kernels.available_isas())})"),
        *_mpi_rows(),
        ("codecs", ", ".join(codecs.names())),
        ("algorithms", ", ".join(NAMES[1:])),
    ]
    options = current()
    changed = [
        f"{name}={getattr(options, name)}"
        for name in Options.__dataclass_fields__
        if getattr(options, name) != getattr(Options(), name)
    ]
    rows.append(("options changed", ", ".join(changed) or "none"))
    for name, value in rows:
        print(f"{name:16} {value}")
    return 0


def _mpi_rows() -> list[tuple[str, str]]:
    """What mpi4py finds; a machine without MPI is no error here."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # asking needs no running MPI
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return [("MPI", f"none: {error}")]
    library = MPI.Get_library_version().splitlines()[0].strip(" \0")
    return [("mpi4py", mpi4py.__version__), ("MPI", library)]
