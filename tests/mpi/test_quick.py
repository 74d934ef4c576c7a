"""Native reductions on the short ways: swaps, MPI's nonblocking and blocking ones, late ranks."""

import time

import numpy as np
import pytest
from conftest import together
from mpi4py import MPI

import mpiquant
from mpiquant._comm import channel_of
from mpiquant.calls import BLOCKING_NBYTES
from mpiquant.swap import HALVES_NBYTES, PIECE_NBYTES, SWAP_NBYTES, Swap

pytestmark = pytest.mark.mpi

COUNTS = tuple(
    nbytes // 4
    for nbytes in (8, SWAP_NBYTES, SWAP_NBYTES + 4, BLOCKING_NBYTES - 4, BLOCKING_NBYTES)
)


def values(rank, count, step=0):
    return ((np.arange(count) % 7 + rank + step) % 11).astype(np.float32)


def reduced(comm, count, function, step=0):
    return function([values(rank, count, step) for rank in range(comm.size)], axis=0)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("op", "function"),
    [("sum", np.sum), ("mean", np.mean), (MPI.MAX, np.max), (MPI.MIN, np.min), (MPI.PROD, np.prod)],
)
def test_repeated_calls(comm, count, op, function):
    for step in range(4):  # the first one goes the full way
        x = values(comm.rank, count, step)
        got = np.empty_like(x)
        mpiquant.Allreduce(x, got, op, comm=comm)
        with together(comm):
            np.testing.assert_allclose(got, reduced(comm, count, function, step), rtol=1e-6)
            np.testing.assert_array_equal(x, values(comm.rank, count, step))


@pytest.mark.parametrize("count", COUNTS)
def test_a_known_call_takes_the_short_way(comm, count, monkeypatch):
    x = values(comm.rank, count)
    mpiquant.allreduce(x, comm=comm)
    monkeypatch.setattr("mpiquant.api._start", None)
    out = None
    for _ in range(3):
        got = mpiquant.allreduce(x, comm=comm, out=out) if comm.size > 1 else x
        with together(comm):
            assert out is None or comm.size == 1 or got is out
            np.testing.assert_array_equal(got, reduced(comm, count, np.sum))
        out = np.empty_like(x)


@pytest.mark.parametrize("count", COUNTS)
def test_late_ranks(comm, count):
    """A call that takes long becomes a full one, at whatever point."""
    x = values(comm.rank, count)
    mpiquant.allreduce(x, comm=comm)
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.05)
        got = mpiquant.allreduce(x, comm=comm)
        again = mpiquant.allreduce(x, comm=comm)
        with together(comm):
            np.testing.assert_array_equal(got, reduced(comm, count, np.sum))
            np.testing.assert_array_equal(got, again)
    assert not channel_of(comm).busy


@pytest.mark.parametrize("count", COUNTS)
def test_short_and_full_ways_meet(comm, count):
    """Ranks take the way that their own arrays allow; messages are the same."""
    x = values(comm.rank, count)
    mpiquant.allreduce(x, comm=comm)
    for step in range(4):
        mine = values(comm.rank, count, step)
        if (comm.rank + step) % 2:
            mine = np.stack([mine, mine], axis=1)[:, 0]  # not contiguous
        got = mpiquant.allreduce(mine, comm=comm)
        with together(comm):
            np.testing.assert_array_equal(got, reduced(comm, count, np.sum, step))
    for _ in range(2):
        inside = values(comm.rank, count)
        mpiquant.Allreduce(MPI.IN_PLACE, inside, comm=comm)
        with together(comm):
            np.testing.assert_array_equal(inside, reduced(comm, count, np.sum))


@pytest.mark.parametrize("count", COUNTS)
def test_nonblocking_and_checked_ones(comm, count):
    x = values(comm.rank, count)
    with mpiquant.options(check="always"):
        results = [mpiquant.iallreduce(x, comm=comm) for _ in range(3)]
        results = [mpiquant.allreduce(x, comm=comm), *(r.wait() for r in results)]
    with together(comm):
        for got in results:
            np.testing.assert_array_equal(got, reduced(comm, count, np.sum))


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_differs_is_named_on_the_short_way(comm):
    """Known plans of blocking reductions are compared each time; on two ranks, small ones, too."""
    counts = [BLOCKING_NBYTES // 4, BLOCKING_NBYTES // 2]
    if comm.size == 2:
        counts += [2, 5]
    for count in counts:
        mpiquant.allreduce(values(comm.rank, count), comm=comm)
    for pair in (counts[:2], counts[2:]):
        if pair:
            mine = pair[comm.rank == comm.size - 1]
            with together(comm), pytest.raises(mpiquant.AgreementError, match=str(pair[1])):
                mpiquant.allreduce(values(comm.rank, mine), comm=comm)
            got = mpiquant.allreduce(values(comm.rank, pair[0]), comm=comm)
            with together(comm):
                np.testing.assert_array_equal(got, reduced(comm, pair[0], np.sum))


@pytest.mark.parametrize(
    "nbytes",
    [
        HALVES_NBYTES - 4,
        HALVES_NBYTES + 4,
        PIECE_NBYTES,
        PIECE_NBYTES + 4,
        13 * PIECE_NBYTES,
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("op", ["sum", MPI.MAX])
@pytest.mark.parametrize("way", [None, Swap.PIECES])
def test_two_ranks_of_a_node_swap_arrays_of_any_length(
    comm, nbytes, in_place, op, way, monkeypatch
):
    if way is not None and comm.size != 2:
        pytest.skip("only two ranks swap")
    if way is not None:  # pieces in every MPI
        monkeypatch.setattr("mpiquant.calls.swap_of", lambda *args: way)
        # Not the short way, which knows such calls from before.
        monkeypatch.setattr("mpiquant.quick.reduce", lambda *args: None)
        monkeypatch.setattr("mpiquant.quick.swap_of", lambda *args: way)
    x = values(comm.rank, nbytes // 4)
    right = reduced(comm, x.size, np.sum if op == "sum" else np.max)
    out = x if in_place else np.empty_like(x)
    requests = [mpiquant.iallreduce(x, op, comm=comm)] if not in_place else []
    mpiquant.allreduce(x, op, comm=comm, out=out)
    with together(comm):
        np.testing.assert_array_equal(out, right)
        for request in requests:
            np.testing.assert_array_equal(request.wait(), right)
