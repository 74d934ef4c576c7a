"""Shared by the tests under mpiexec.

A rank that failed alone would leave the others waiting in the next collective, so assertions stand
in `with together(comm):` blocks without communication, at whose end the ranks exchange verdicts.
"""

import hashlib
import os
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI


@pytest.fixture(scope="session")
def comm():
    comm = MPI.COMM_WORLD
    expected = os.environ.get("MPIQUANT_TEST_SIZE")
    assert expected is None or comm.size == int(expected), "wrong launcher for this MPI"
    return comm


@contextmanager
def together(comm):
    """Assertions of all ranks pass or fail as one."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = f"rank {comm.rank}: {type(error).__name__}: {error}"
    failures = [f for f in comm.allgather(failure) if f]
    if failures:
        pytest.fail("\n".join(failures))


def digests(comm, *arrays):
    """The set of sha256 over the ranks; one member if all ranks are identical."""
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))
    return set(comm.allgather(digest.hexdigest()))


def raised(comm, function):
    """What a call raised on each rank: the exceptions, in rank order (None where it passed)."""
    try:
        function()
    except Exception as error:
        mine = (type(error), [c.__name__ for c in type(error).__mro__], str(error))
    else:
        mine = None
    return comm.allgather(mine and mine[1:])


def normals(comm, count, dtype=np.float32, seed=0):
    """Each rank's own normal deviates, and their exact sum."""
    every = [
        np.random.default_rng([seed, rank]).standard_normal(count).astype(dtype)
        for rank in range(comm.size)
    ]
    return every[comm.rank], np.sum(every, axis=0, dtype=np.float64)


SCHEDULES = ("ring", "halving_doubling", "direct")
ALGORITHMS = (*SCHEDULES, "broadcast")
CODECS = ("exact", "fp16", "bf16", "q16", "q8", "q4", "q3", "q2", "q1", "ternary")
