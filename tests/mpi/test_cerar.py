"""The coded ring on ranks."""

import numpy as np
import pytest
from conftest import raised, together

import mpiquant


def relative(found, right):
    return np.linalg.norm(found - right) / np.linalg.norm(right)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 7, 1003, 300_000])
def test_sum_is_near(comm, dtype, count):
    x = np.random.default_rng(comm.rank).standard_normal(count).astype(dtype)
    exact = comm.allreduce(x.astype(np.float64))
    found, stats = mpiquant.allreduce(x, comm=comm, algorithm="cerar", stats=True)
    with together(comm):
        assert found.dtype == dtype
        if comm.size > 1:
            assert stats.algorithm == "cerar"
            assert "components" in stats.reason
        if count > 1000:
            assert relative(found, exact) < (1e-3 if dtype == np.float32 else 1e-7)


@pytest.mark.parametrize(("per_token", "more"), [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1)])
def test_components_are_what_was_asked_for(comm, per_token, more):
    c = max(2, per_token * comm.size + more)
    count = 2400 * c
    x = np.ones(count, np.float32)
    found, stats = mpiquant.allreduce(
        x, "mean", comm=comm, algorithm="cerar", components=c, stats=True
    )
    with together(comm):
        np.testing.assert_allclose(found, 1, rtol=0.3 if more else 2e-2)
        if comm.size > 1:
            assert stats.wire_bytes == x.nbytes * (c + comm.size - 2) / c


def test_an_error_is_kept_to(comm):
    x = np.random.default_rng(comm.rank).standard_normal(60_000)
    exact = comm.allreduce(x)
    for error_max in (1e-3, 1e-6, 1e-12):
        found = mpiquant.allreduce(x, comm=comm, algorithm="cerar", error_max=error_max)
        with together(comm):
            assert relative(found, exact) < 2 * error_max


def test_several_calls_at_once_and_in_place(comm):
    arrays = [np.full(50_000, k + 1.0) for k in range(4)]
    with mpiquant.options(progress="thread", algorithm="cerar"):
        requests = [mpiquant.iallreduce(x, comm=comm, out=x) for x in arrays]
    for request in reversed(requests):
        request.wait()
    with together(comm):
        for k, x in enumerate(arrays):
            np.testing.assert_allclose(x, (k + 1) * comm.size, rtol=1e-7)


def test_what_is_never_coded_is_exact(comm):
    with mpiquant.options(algorithm="cerar"):
        counts = mpiquant.allreduce(np.arange(5000), comm=comm)
    with together(comm):
        np.testing.assert_array_equal(counts, np.arange(5000) * comm.size)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_other_codes_disagree(comm):
    private = comm.Dup()
    c = comm.size * (2 if comm.rank else 3)
    errors = raised(
        comm,
        lambda: mpiquant.allreduce(np.ones(5000), comm=private, algorithm="cerar", components=c),
    )
    after = mpiquant.allreduce(np.ones(5000), comm=private, algorithm="cerar")
    with together(comm):
        for error in errors:
            assert "AgreementError" in error[0]
            assert f"components={2 * comm.size}" in error[1]
        np.testing.assert_allclose(after, comm.size, rtol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "q4"}, "takes no codec"),
        ({"feedback": mpiquant.ErrorFeedback()}, "takes no feedback"),
        ({"components": 1}, "components is 1"),
        ({"cond_max": 1.5}, "condition number"),
    ],
)
def test_what_it_cannot_do_is_refused(comm, options, words):
    private = comm.Dup()
    if options.get("cond_max"):
        options = {**options, "components": 2 * comm.size}
    errors = raised(
        comm,
        lambda: mpiquant.allreduce(np.ones(5000), comm=private, algorithm="cerar", **options),
    )
    with together(comm):
        assert all(words in error[1] for error in errors), errors


def test_only_allreduce_has_it(comm):
    private = comm.Dup()
    for call in (mpiquant.reduce_scatter, mpiquant.allgather):
        errors = raised(comm, lambda call=call: call(np.ones(500), comm=private, algorithm="cerar"))
        with together(comm):
            if comm.size > 1:
                assert all("has no algorithm 'cerar'" in error[1] for error in errors)
