"""Sums whose error stays within a bound, on ranks."""

import numpy as np
import pytest
from conftest import digests, normals, raised, together

import mpiquant
from mpiquant.codecs import BoundedCodec

EVERY = ("auto", "ring", "hd", "direct", "broadcast", "parameter_server", "hierarchical")
each_algorithm = pytest.mark.parametrize("algorithm", EVERY)


def smooth(comm, count):
    at = np.arange(count) / count
    return [(np.sin(9 * at + rank) * (rank + 1)).astype(np.float32) for rank in range(comm.size)]


@each_algorithm
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 3, 1000, 30_011])
def test_the_error_of_no_element_exceeds_the_bound(comm, algorithm, dtype, count):
    x, right = normals(comm, count, dtype)
    before = x.copy()
    for op in ("sum", "mean"):
        got, stats = mpiquant.allreduce(
            x, op, comm=comm, error_bound=0.01, algorithm=algorithm, stats=True
        )
        exact = right / comm.size if op == "mean" else right
        with together(comm):
            assert got.dtype == dtype
            assert np.max(np.abs(got - exact)) <= 0.01
            np.testing.assert_array_equal(x, before)
            if comm.size > 1:
                assert np.max(np.abs(got - exact)) <= stats.error_bound <= 0.01
                assert stats.codec == "bounded(absolute=0.01)"
        assert len(digests(comm, got)) == 1


def test_all_schedules_give_the_same_bits(comm):
    x, _ = normals(comm, 5001)
    got = [mpiquant.allreduce(x, comm=comm, codec="bounded", algorithm=a) for a in EVERY]
    got.append(mpiquant.allreduce(x, comm=comm, codec="bounded", algorithm="ring", out=x.copy()))
    with mpiquant.options(segment=640):
        got.append(mpiquant.allreduce(x, comm=comm, codec="bounded", algorithm="ring"))
    with mpiquant.options(ranks_per_node=2):
        got.append(mpiquant.allreduce(x, comm=comm, codec="bounded", algorithm="hierarchical"))
    with together(comm):
        for each in got[1:]:
            np.testing.assert_array_equal(each, got[0])


def test_a_relative_bound_is_one_of_the_largest_magnitude_of_all_ranks(comm):
    x = np.full(1000, 0.3 * (comm.rank + 1), np.float32)
    x[comm.rank] = 0.123
    _, stats = mpiquant.allreduce(
        x, comm=comm, codec="bounded(relative=0.01)", algorithm="ring", stats="error"
    )
    with together(comm):
        if comm.size > 1:
            assert stats.max_error <= stats.error_bound <= 0.01 * 0.3 * comm.size


@pytest.mark.mpi(min_size=2)
def test_messages_are_as_long_as_their_blocks_need(comm):
    count = 1 << 16
    _, noise = mpiquant.allreduce(
        normals(comm, count)[0], comm=comm, error_bound=1e-2, algorithm="ring", stats=True
    )
    _, even = mpiquant.allreduce(
        smooth(comm, count)[comm.rank], comm=comm, error_bound=1e-2, algorithm="ring", stats=True
    )
    zeros, none = mpiquant.allreduce(
        np.zeros(count, np.float32), comm=comm, error_bound=1e-2, algorithm="ring", stats=True
    )
    with together(comm):
        assert 2 < noise.ratio < 5
        assert 10 < even.ratio < 100
        assert none.ratio > 100
        assert not np.any(zeros)


def test_residuals_hold_what_was_lost(comm):
    feedback = mpiquant.ErrorFeedback()
    rng = np.random.default_rng(comm.rank)
    sent, right = np.zeros(3001), np.zeros(3001)
    for _ in range(5):
        x = rng.standard_normal(3001)
        sent += mpiquant.allreduce(
            x, comm=comm, error_bound=0.5, feedback=feedback, name="x", algorithm="ring"
        )
        right += comm.allreduce(x)
    kept = comm.allreduce(feedback.residual("x")) if comm.size > 1 else 0
    with together(comm):
        np.testing.assert_allclose(sent + kept, right, atol=1e-12)
        assert comm.size == 1 or np.max(np.abs(kept)) <= 0.5


def test_parts_and_rows(comm):
    x, right = normals(comm, 1003 * comm.size)
    part = mpiquant.reduce_scatter(x, comm=comm, codec=BoundedCodec(absolute=0.02))
    own = slice(comm.rank * 1003, (comm.rank + 1) * 1003)
    rows = mpiquant.allgather(x, comm=comm, codec=BoundedCodec(absolute=0.02))
    everyone = comm.allgather(x)
    with together(comm):
        assert np.max(np.abs(part - right[own])) <= 0.02
        for row, theirs in zip(rows, everyone, strict=True):
            assert np.max(np.abs(row.astype(np.float64) - theirs)) <= 0.02
    assert len(digests(comm, rows)) == 1


def test_dicts_in_place_and_many_at_a_time(comm):
    arrays = {"a": normals(comm, 700)[0], "b": normals(comm, 90, seed=1)[0].reshape(9, 10)}
    right = {"a": normals(comm, 700)[1], "b": normals(comm, 90, seed=1)[1].reshape(9, 10)}
    got = mpiquant.allreduce(arrays, comm=comm, error_bound=1e-3)
    requests = [
        mpiquant.iallreduce(arrays["a"] * n, comm=comm, error_bound=1e-3) for n in range(1, 12)
    ]
    sums = [request.wait() for request in reversed(requests)][::-1]
    mpiquant.allreduce(arrays, comm=comm, error_bound=1e-3, out=arrays)
    with together(comm):
        for name, each in right.items():
            assert np.max(np.abs(got[name] - each)) <= 1e-3
            np.testing.assert_array_equal(arrays[name], got[name])
        for n, each in enumerate(sums, 1):
            assert np.max(np.abs(each - n * right["a"])) <= 1e-3 + n * 1e-5  # float32 products


def test_what_is_no_number_is_seen_by_all(comm):
    x = np.ones(1000, np.float32)
    if comm.rank == comm.size - 1:
        x[5], x[6] = np.nan, np.inf
    got = mpiquant.allreduce(x, comm=comm, error_bound=1e-3, algorithm="ring")
    with together(comm):
        assert np.isnan(got[5])
        assert np.isinf(got[6])
        assert np.all(np.delete(got, [5, 6]) == comm.size)


@pytest.mark.mpi(min_size=2)
def test_a_bound_below_rounding_is_refused_on_all_ranks(comm):
    x = np.full(1000, 1e6 if comm.rank == 0 else 1, np.float32)
    found = raised(comm, lambda: mpiquant.allreduce(x, comm=comm, error_bound=1e-4))
    with together(comm):
        for kind, text in found:
            assert "ValueError" in kind
            assert "float64" in text
    got = mpiquant.allreduce(x.astype(np.float64), comm=comm, error_bound=1e-4)
    with together(comm):
        assert np.all(np.abs(got - (1e6 + comm.size - 1)) <= 1e-4)


def test_a_bound_and_another_codec_exclude_each_other(comm):
    x = np.ones(10, np.float32)
    found = raised(comm, lambda: mpiquant.allreduce(x, comm=comm, codec="q8", error_bound=1e-4))
    with together(comm):
        assert all("not both" in text for _, text in found)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_bounds_are_named(comm):
    x = np.ones(10, np.float32)
    bound = 1e-3 if comm.rank else 1e-4
    with together(comm), pytest.raises(mpiquant.AgreementError, match=r"0\.001"):
        mpiquant.allreduce(x, comm=comm, error_bound=bound)
