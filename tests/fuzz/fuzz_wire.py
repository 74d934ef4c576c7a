"""Fuzzes everything that decodes bytes of other ranks; `make fuzz` runs it under sanitizers.

usage: python tests/fuzz/fuzz_wire.py [--mutations N] [--seed S] [--kernels FILE] [--case K]

--kernels is a build of mpiquant._kernels with AddressSanitizer and UndefinedBehaviorSanitizer; it
is shown first that both see its errors.  Without it the installed build is fuzzed.  --case runs
one case again.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))


def load_kernels(path: Path) -> None:
    """Make a build of the kernels the one that the package uses."""
    spec = importlib.util.spec_from_file_location("mpiquant._kernels", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mpiquant._kernels"] = module
    spec.loader.exec_module(module)
    from mpiquant.codecs import _block, cast

    for user in (_block, cast):
        assert Path(user._kernels.__file__) == path, f"{user._kernels.__file__} is in use"


# ---- whether the sanitizers see errors ----


class Format(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("bits", ctypes.c_int32), ("block", ctypes.c_int64)]


class Stream(ctypes.Structure):
    _fields_ = [("key", ctypes.c_uint64), ("index", ctypes.c_int64)]


_ARRAY, _FORMAT = ctypes.c_void_p, ctypes.POINTER(Format)


class Table(ctypes.Structure):
    """The beginning of mpq_kernels, for float."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        (
            "encode",
            ctypes.CFUNCTYPE(None, _ARRAY, ctypes.c_int64, _ARRAY, _FORMAT, Stream, _ARRAY),
        ),
        ("decode", ctypes.CFUNCTYPE(None, _ARRAY, ctypes.c_int64, _FORMAT, _ARRAY)),
        ("decode_add", ctypes.CFUNCTYPE(None, _ARRAY, ctypes.c_int64, _FORMAT, _ARRAY, _ARRAY)),
    ]


def misuses(table: Table, block: int) -> dict[str, Callable[[], None]]:
    """Calls of the unchecked C functions with buffers too short, or too many bits."""
    n, good, bad = 3 * block + 5, Format(0, 8, block), Format(0, 33, block)
    wire = np.zeros(4 * 4 + 8 * (n // 8 + 1), np.uint8)
    x, out, short = (np.zeros(size, np.float32) for size in (n, n, n - 1))
    at = lambda array: array.ctypes.data  # noqa: E731
    cut = wire[:-1].copy()
    return {
        "read of wire": lambda: table.decode(at(cut), n, good, at(out)),
        "read of addend": lambda: table.decode_add(at(wire), n, good, at(short), at(out)),
        "write of output": lambda: table.decode(at(wire), n, good, at(short)),
        "write of wire": lambda: table.encode(at(x), n, at(cut), good, Stream(), None),
        "undefined shift": lambda: table.encode(at(x), n, at(wire), bad, Stream(), None),
    }


def report_of(call: Callable[[], None]) -> str:
    """What a process of its own writes to stderr while it makes a call; empty if it survives."""
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 2)
            call()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        log.seek(0)
        return log.read().decode(errors="replace") if status else ""


def check_sanitizers(path: Path, isas: tuple[str, ...]) -> None:
    """Raise unless errors of this very build are reported, on all instruction sets."""
    find = ctypes.CDLL(str(path)).mpq_find_kernels
    find.restype = ctypes.POINTER(Table)
    for isa, block in itertools.product(isas, (64, 50)):  # vectors, and value by value
        for name, call in misuses(find(isa.encode()).contents, block).items():
            sign = "runtime error: shift" if "shift" in name else "AddressSanitizer: heap-buffer"
            report = report_of(call)
            assert sign in report, f"{name} on {isa} was not caught: {report or 'no report'}"


# ---- running ----


def work(numbers: itertools.count, seed: int, goal: int, state) -> None:
    """Run cases until so many mutations are done; `state` is the case and the number done."""
    from fuzz import cases

    for state[0] in numbers:
        if state[1] >= goal:
            return
        state[1] += cases.run(seed, state[0])


def run(seed: int, mutations: int, processes: int) -> int:
    """The number of mutations done; SystemExit at a finding, which its process has printed."""
    states = [multiprocessing.RawArray("q", 2) for _ in range(processes)]
    workers = []
    for i, state in enumerate(states):
        goal = -(-mutations // processes)
        arguments = (itertools.count(i, processes), seed, goal, state)
        workers.append(multiprocessing.Process(target=work, args=arguments))
        workers[-1].start()
    for worker in workers:
        worker.join()
    failed = [s[0] for s, worker in zip(states, workers, strict=True) if worker.exitcode]
    if failed:
        again = f"--seed {seed} --case {failed[0]}"
        sys.exit(f"fuzz: a finding in case {failed[0]}, to be run again with {again}")
    return sum(state[1] for state in states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kernels", type=Path, help="a sanitized build of mpiquant._kernels")
    parser.add_argument("--case", type=int, help="run this one only")
    arguments = parser.parse_args()
    if arguments.kernels:
        load_kernels(arguments.kernels.resolve())
    from mpiquant import _kernels

    isas = _kernels.available_isas()
    if arguments.kernels:
        check_sanitizers(arguments.kernels.resolve(), isas)
    begin = time.monotonic()
    if arguments.case is not None:
        from fuzz import cases

        done = cases.run(arguments.seed, arguments.case)
    else:
        done = run(arguments.seed, arguments.mutations, arguments.processes)
    print(f"fuzz: {time.monotonic() - begin:.0f} s in {_kernels.__file__}")
    print(f"fuzz: {done} mutations, {len(isas)} instruction sets, clean")


if __name__ == "__main__":
    main()
