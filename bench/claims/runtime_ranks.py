"""Measured on some ranks for `runtime.py`: JSON lines of points, printed by rank 0.

usage: runtime_ranks.py mismatches | back_to_back | in_flight | small | headers | memory
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
from _on_ranks import alternate, comm, memory_kib, point
from mpi4py import MPI

import mpiquant

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "mpi"))

ALGORITHMS = ("ring", "halving_doubling", "direct")


def mismatches() -> None:
    """Every kind of disagreement: of new plans, of known ones, and of a new with a known one.

    Of two known plans, those that are both native are compared with check="always" only.
    """
    from test_faults import COUNTS, MISMATCHES, TRAVELLING

    mixed = (*TRAVELLING, "native against compressed", "native against ring")
    for form, known, check, kinds in (
        ("new plans", (), "first", MISMATCHES),
        ("a new and a known plan", (0,), "first", MISMATCHES),
        ("known plans", (0, 1), "first", mixed),
        ("known plans, check='always'", (0, 1), "always", MISMATCHES),
    ):
        cases, right, slowest = 0, 0, 0.0
        for kind in kinds:
            for count in COUNTS:
                good, took = _mismatch(kind, count, known, check)
                cases += 1
                right += comm.allreduce(int(good), MPI.MIN)
                slowest = max(slowest, comm.allreduce(took, MPI.MAX))
        point(form=form, cases=cases, right=right, slowest_s=slowest)


def _mismatch(kind: str, count: int, known: tuple[int, ...], check: str) -> tuple[bool, float]:
    from test_faults import differing

    private = comm.Dup()
    with mpiquant.options(check=check):
        errors, words, out, took, after = differing(comm, kind, count, private, known)
    private.Free()
    named = [word for word in words if word != "1001"]
    good = all(e and "AgreementError" in e[0] for e in errors)
    good = good and all(word in e[1] for word in named for e in errors)
    good = good and bool(np.all(after == comm.size)) and took < 10
    return good and (bool(known) or bool(np.all(out == -7.0))), took


def back_to_back() -> None:
    """2,000 calls of cycling sizes without a barrier; the last rank is late at random."""
    rng = np.random.default_rng(comm.rank)
    base = comm.size * (comm.size - 1) / 2
    for algorithm in ALGORITHMS:
        for blocking in (True, False):
            wrong, window = 0, []
            for k in range(2000):
                if comm.rank == comm.size - 1:
                    time.sleep(rng.uniform(0, 0.002))
                x = np.full((3, 4096, 17, 65536)[k % 4], float(k + comm.rank))
                codec = "q8" if k % 2 else None
                call = mpiquant.allreduce if blocking else mpiquant.iallreduce
                out = call(x, comm=comm, codec=codec, algorithm=algorithm)
                window.append((k, out))
                if blocking or len(window) > 20:
                    first, out = window.pop(0)
                    out = out if blocking else out.wait()
                    wrong += not np.allclose(out, comm.size * first + base, rtol=1e-5)
            for first, out in window:
                wrong += not np.allclose(out.wait(), comm.size * first + base, rtol=1e-5)
            point(algorithm=algorithm, blocking=blocking, wrong=comm.allreduce(int(wrong)))


def in_flight() -> None:
    """100 calls at once, waited for in an order of each rank's own."""
    wrong = 0
    for mode in ("manual", "thread"):
        with mpiquant.options(progress=mode):
            requests = [
                mpiquant.iallreduce(
                    np.full(1 + 997 * (k % 40), float(k + comm.rank)),
                    codec=(None, "q8", "q4")[k % 3],
                    algorithm=("auto", *ALGORITHMS)[k % 4],
                )
                for k in range(100)
            ]
            order = list(range(100))
            random.Random(comm.rank).shuffle(order)
            for k in order:
                right = comm.size * k + comm.size * (comm.size - 1) / 2
                wrong += not np.allclose(requests[k].wait(), right, rtol=1e-6, atol=1e-6)
    point(wrong=comm.allreduce(int(wrong)))


def small() -> None:
    """Calls below min_size with a codec in the options, against the native call."""
    for count in (2, 256, 1023):
        x = np.ones(count, np.float32)
        out = np.empty_like(x)
        with mpiquant.options(codec="q8"):
            times = alternate(
                {
                    "native": lambda x=x, out=out: comm.Allreduce(x, out),
                    "ours": lambda x=x, out=out: mpiquant.Allreduce(x, out, comm=comm),
                },
                calls=500,
                repeat=41,
            )
        point(nbytes=x.nbytes, **times)


def headers() -> None:
    """What the header and its check cost a large call: with them and without."""
    x = np.random.default_rng(comm.rank).standard_normal(4 << 20).astype(np.float32)
    out = np.empty_like(x)

    def call(check: str) -> None:
        with mpiquant.options(check=check):
            mpiquant.Allreduce(x, out, comm=comm, codec="q4", algorithm="ring")

    times = alternate(
        {"with": lambda: call("first"), "without": lambda: call("never")}, calls=3, repeat=31
    )
    point(nbytes=x.nbytes, **times)


def memory() -> None:
    """Resident memory over 100,000 calls of all kinds."""

    few, some = np.ones(3, np.float32), np.ones(2000, np.float32)
    outs = np.empty_like(few), np.empty_like(some)
    found = []
    for k in range(100_000):
        if k % 4 == 0:
            mpiquant.iallreduce(some, codec="q8", name=f"layer{k % 50}").wait()
        elif k % 4 == 1:
            mpiquant.Allreduce(some, outs[1], codec="q4", algorithm=ALGORITHMS[k % 3])
        else:
            mpiquant.Allreduce(few, outs[0])
        if k in (20_000, 99_999):
            found.append(memory_kib("VmRSS"))
    point(grown_kib=comm.allreduce(found[1] - found[0], MPI.MAX), resident_kib=found[1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {
        "mismatches": mismatches,
        "back_to_back": back_to_back,
        "in_flight": in_flight,
        "small": small,
        "headers": headers,
        "memory": memory,
    }[sys.argv[1]]()
