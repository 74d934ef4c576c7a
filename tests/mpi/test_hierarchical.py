"""Sums within nodes and across them; nodes are runs of ranks here."""

import numpy as np
import pytest
from conftest import raised, together

import mpiquant
from mpiquant.feedback import is_nothing

NODES = [1, 2, 3, 100, None]


def run(comm, x, ranks_per_node, **options):
    with mpiquant.options(ranks_per_node=ranks_per_node):
        return mpiquant.allreduce(x, comm=comm, algorithm="hierarchical", **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_exact_integers(comm, ranks_per_node, dtype):
    for count in (0, 1, 2, 7, 100_003):
        x = np.full(count, 1 << comm.rank, dtype)
        found = run(comm, x, ranks_per_node)
        with together(comm):
            np.testing.assert_array_equal(found, np.full(count, (1 << comm.size) - 1))


@pytest.mark.parametrize("codec", ["q8", "q4", "bf16", "q1"])
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_ranks_are_alike_and_near(comm, ranks_per_node, codec):
    x = np.random.default_rng(comm.rank).standard_normal(200_000).astype(np.float32)
    exact = comm.allreduce(x.astype(np.float64))
    found, stats = run(comm, x, ranks_per_node, codec=codec, stats=True)
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    with together(comm):
        limits = {"q8": 0.03, "q4": 0.6, "bf16": 0.02, "q1": 1}
        assert error < limits[codec]
        if comm.size > 1:
            assert stats.algorithm == "hierarchical"
        if ranks_per_node == 100:
            assert stats.wire_bytes == 0  # one node: nothing is encoded
            assert error < 1e-6
    assert len(set(comm.allgather(found.tobytes()))) == 1


@pytest.mark.parametrize("codec", ["exact", "q4"])
def test_in_place(comm, codec):
    x = np.arange(5000.0) + comm.rank
    right = run(comm, x, 2, codec=codec)
    with mpiquant.options(ranks_per_node=2):
        mpiquant.allreduce(x, comm=comm, algorithm="hierarchical", codec=codec, out=x)
    with together(comm):
        np.testing.assert_array_equal(x, right)


@pytest.mark.parametrize("ranks_per_node", NODES)
def test_nothing_is_lost(comm, ranks_per_node):
    feedback = mpiquant.ErrorFeedback()
    sent, right = np.zeros(3000), np.zeros(3000)
    for step in range(5):
        x = np.random.default_rng([comm.rank, step]).standard_normal(3000)
        sent += run(comm, x, ranks_per_node, codec="q2", feedback=feedback, name="x")
        right += comm.allreduce(x)
    kept = comm.allreduce(feedback.residual("x").copy())
    with together(comm):
        np.testing.assert_allclose(sent + kept, right, atol=1e-9)


def test_what_crosses_the_network_is_that_of_one_rank(comm):
    """Counted: bytes to other nodes, over all ranks of a node."""
    nodes = comm.size // 2
    x = np.ones(64_000 * comm.size, np.float32)
    _, stats = run(comm, x, 2, codec="q8", stats=True)
    sent = comm.allreduce(stats.wire_bytes)
    with together(comm):
        if comm.size % 2 == 0 and nodes > 1:
            q8 = mpiquant.UniformCodec(bits=8).nbytes(x.size, x.dtype) / x.size
            assert sent == pytest.approx(2 * (nodes - 1) * x.size * q8, rel=1e-3)
            assert stats.node_bytes == x.nbytes  # half to be summed, half of the sum


def test_adaptive_bits_across_nodes(comm):
    x = np.random.default_rng(comm.rank).standard_normal(300_000).astype(np.float32)
    exact = comm.allreduce(x.astype(np.float64))
    found, stats = run(comm, x, 1, codec="aqat", budget_s=30.0, stats=True)
    with together(comm):
        assert np.linalg.norm(found - exact) < 0.5 * np.linalg.norm(exact)
        if comm.size > 1:
            assert stats.partial_bits >= 2
    assert len(set(comm.allgather(found.tobytes()))) == 1


def test_several_calls_at_once(comm):
    arrays = [np.full(50_000, k + 1.0) for k in range(4)]
    with mpiquant.options(progress="thread", algorithm="hierarchical", ranks_per_node=2):
        requests = [mpiquant.iallreduce(x, comm=comm) for x in arrays]
        found = [request.wait() for request in reversed(requests)][::-1]
    with together(comm):
        for k, x in enumerate(found):
            np.testing.assert_array_equal(x, (k + 1) * comm.size)


def test_what_is_no_number_is_seen_everywhere(comm):
    x = np.ones(5000, np.float32)
    x[3000] = np.nan if comm.rank == comm.size - 1 else 1
    feedback = mpiquant.ErrorFeedback()
    found = run(comm, x, 2, codec="q4", feedback=feedback)
    with together(comm):
        assert np.isnan(found[3000])
        assert is_nothing(feedback.residual(""))


@pytest.mark.mpi(min_size=2)
def test_only_allreduce_has_it(comm):
    private = comm.Dup()
    errors = raised(
        comm,
        lambda: mpiquant.reduce_scatter(np.ones(500), comm=private, algorithm="hierarchical"),
    )
    with together(comm):
        assert all("has no algorithm 'hierarchical'" in error[1] for error in errors)
