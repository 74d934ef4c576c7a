"""Adaptive calls on real MPI."""

import time

import numpy as np
import pytest
from conftest import SCHEDULES, digests, normals, raised, together

import mpiquant
from mpiquant import AqatCodec, ErrorFeedback
from mpiquant.collectives import ALGORITHMS

COUNTS = [1, 2, 3, 1000, 70_001]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("budget_s", [1e-6, 0.003, 60.0])
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_ranks_are_identical_and_nothing_is_lost(comm, algorithm, budget_s, dtype):
    for count in COUNTS:
        feedback, total, exact = ErrorFeedback(), 0.0, 0.0
        for step in range(3):
            x, right = normals(comm, count, dtype, seed=step)
            with mpiquant.options(budget_s=budget_s, segment=4096, min_size=0):
                out = mpiquant.allreduce(
                    x, codec="aqat", algorithm=algorithm, feedback=feedback, name="x"
                )
            total, exact = total + out.astype(float), exact + right
            same = digests(comm, out)
            with together(comm):
                assert len(same) == 1
        rest = feedback.residual("x")
        kept = comm.allreduce(np.zeros(count) if rest is None else rest.astype(float))
        with together(comm):
            tolerance = 1e-9 if dtype == np.float64 else 1e-4
            np.testing.assert_allclose(total + kept, exact, rtol=0, atol=tolerance)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_much_time_all_is_exact(comm, algorithm):
    x = np.full(50_000, 2.0**comm.rank, np.float32)
    for _ in range(2):
        out, stats = mpiquant.allreduce(
            x, codec=AqatCodec(lowest=16), algorithm=algorithm, budget_s=600.0, stats=True
        )
    with together(comm):
        np.testing.assert_array_equal(out, 2.0**comm.size - 1)
        if comm.size > 1:
            # A folded rank sends no final sums, and a server no partial ones.
            assert {stats.partial_bits, stats.final_bits} - {None} == {32}


@pytest.mark.parametrize("few", [1, 64])
def test_calls_that_waited_for_others_say_nothing_of_the_links(comm, few):
    """They had bits to spare, so a call with much time and many values still has all it can."""
    fresh = comm.Dup()
    with mpiquant.options(codec="aqat", algorithm="ring", min_size=0):
        for _ in range(60):
            time.sleep(0.004 * (comm.rank == 0))
            mpiquant.allreduce(np.ones(few, np.float32), comm=fresh, budget_s=2e-3)
        many = np.ones(200_000, np.float32)
        _, stats = mpiquant.allreduce(many, comm=fresh, budget_s=20.0, stats=True)
    fresh.Free()
    with together(comm):
        if comm.size > 1:
            assert stats.partial_bits >= 8


def test_without_time_the_lowest_level_is_taken(comm):
    x, right = normals(comm, 200_000)
    for _ in range(3):
        out, stats = mpiquant.allreduce(
            x, codec=AqatCodec(lowest=4, highest=8), budget_s=1e-9, stats=True, algorithm="ring"
        )
    with together(comm):
        if comm.size > 1:
            assert stats.partial_bits == stats.final_bits == 4
        assert np.linalg.norm(out - right) < 0.3 * np.linalg.norm(right)


@pytest.mark.parametrize("kind", ["reduce_scatter", "allgather"])
def test_the_other_collectives(comm, kind):
    x, right = normals(comm, 8 * 1000 * comm.size)
    with mpiquant.options(budget_s=60.0):
        if kind == "allgather":
            out = mpiquant.allgather(x, codec="aqat", algorithm="ring")
            every = np.array([normals(comm, x.size)[0]])
            right = comm.allgather(every)
        else:
            out = mpiquant.reduce_scatter(x, codec="aqat", algorithm="ring")
            own = x.size // comm.size
            right = right[comm.rank * own : (comm.rank + 1) * own]
    with together(comm):
        np.testing.assert_allclose(out.ravel(), np.ravel(right), rtol=0, atol=1e-1)


def test_many_calls_in_flight_with_deadlines_of_their_own(comm):
    arrays = [normals(comm, 30_000 + 1000 * i, seed=i) for i in range(12)]
    begin = time.perf_counter()
    requests = [
        mpiquant.iallreduce(x, codec="aqat", algorithm="ring", deadline=begin + 0.05 * (12 - i))
        for i, (x, _) in enumerate(arrays)
    ]
    outs = [request.wait() for request in requests]
    same = digests(comm, *outs)
    with together(comm):
        assert len(same) == 1
        for out, (_, right) in zip(outs, arrays, strict=True):
            assert np.linalg.norm(out - right) < 0.9 * np.linalg.norm(right)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("budget_s", [1e-6, 60.0])
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_b15_overflow_leaves_no_trace(comm, algorithm, budget_s, bad):
    feedback = ErrorFeedback()
    x = np.ones(5000, np.float32)
    with mpiquant.options(codec="aqat", algorithm=algorithm, budget_s=budget_s):
        mpiquant.allreduce(x, feedback=feedback, name="x")
        before = feedback.residual("x")
        before = None if before is None else before.copy()
        if comm.rank == 0:
            x[0] = bad
        out = mpiquant.allreduce(x, feedback=feedback, name="x")
        after = feedback.residual("x")
    with together(comm):
        assert not np.isfinite(out[0])
        assert np.all(np.isfinite(out[-512:]))
        if before is not None:
            np.testing.assert_array_equal(before, after)


def test_a_call_without_a_time_is_refused_on_all_ranks(comm):
    x = np.ones(5000, np.float32)
    found = raised(comm, lambda: mpiquant.allreduce(x, codec="aqat", algorithm="ring"))
    out = mpiquant.allreduce(x, codec="q8")
    with together(comm):
        if comm.size > 1:
            assert all(f is not None and "budget_s" in f[1] for f in found)
        np.testing.assert_allclose(out, comm.size)


@pytest.mark.mpi(min_size=2)
def test_ranks_must_agree_on_the_levels(comm):
    x = np.ones(5000, np.float32)
    codec = AqatCodec(lowest=2 if comm.rank else 3)
    found = raised(comm, lambda: mpiquant.allreduce(x, codec=codec, budget_s=1.0))
    out = mpiquant.allreduce(x, codec="aqat", budget_s=1.0)
    with together(comm):
        assert all(f is not None and "lowest=2" in f[1] and "lowest=3" in f[1] for f in found)
        np.testing.assert_allclose(out, comm.size)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b32_final_bits_are_the_same_on_all_ranks_and_errors_within_their_bound(comm, algorithm):
    """Constant data on one rank, a heavy tail on the others; options that change meanwhile."""
    count = 100_000
    rng = np.random.default_rng(comm.rank)
    x = np.ones(count) if comm.rank == 0 else rng.standard_t(3, count)
    request = mpiquant.iallreduce(
        x, codec=AqatCodec(lowest=4, highest=8), algorithm=algorithm, budget_s=0.01, stats=True
    )
    with mpiquant.options(codec="q1", budget_s=100.0):
        out, stats = request.wait()
    right = comm.allreduce(x)
    most = comm.allreduce(np.abs(x).max())
    same = digests(comm, out)
    with together(comm):
        assert len(same) == 1
        sent = [b for b in (stats.partial_bits, stats.final_bits) if b is not None]
        assert 4 <= min(sent) <= max(sent) <= 8
        assert np.abs(out - right).max() <= (comm.size + 1) * most / (2 * 7)
