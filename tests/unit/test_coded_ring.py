"""The runner of the coded ring on simulated links; no MPI."""

import numpy as np
import pytest
from coded_ring_oracle import outputs, worst_error
from simulated_wire import Clock, Network, run_all

from mpiquant.coded import CodedExecution
from mpiquant.collectives.coding import Perturbed, RootsOfUnity, design
from mpiquant.rate import Trace
from mpiquant.stats import Stats


def run(code, inputs, length=100, in_place=False):
    """Outputs and statistics of all ranks."""
    network = Network(Clock(), lambda rank: Trace([0.0], [1e6]))
    outs = inputs if in_place else [np.full_like(x, np.nan) for x in inputs]
    stats = [Stats() for _ in inputs]
    executions = [
        CodedExecution(code, rank, network.of(rank), x, out, length, stats[rank])
        for rank, (x, out) in enumerate(zip(inputs, outs, strict=True))
    ]
    run_all(network, executions)
    return outs, stats, executions


def normals(size, count, dtype=np.float32):
    rng = np.random.default_rng(count)
    return [rng.standard_normal(count).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 12, 13, 60, 1003])
def test_as_many_components_as_ranks_are_a_ring(size, count):
    inputs = [np.arange(count, dtype=np.float32) * (rank + 1) for rank in range(size)]
    outs, _, _ = run(Perturbed(size, size, 0.0), inputs)
    for out in outs:
        np.testing.assert_array_equal(out, np.arange(count) * (size * (size + 1) // 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("size", "components"),
    [(size, n * size) for size in (2, 3, 4, 5, 8) for n in (2, 3)]
    + [(2, 3), (3, 4), (3, 8), (4, 6), (5, 11), (8, 12)],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_error_is_as_expected(size, components, dtype, in_place):
    found = design(size, components, dtype)
    inputs = normals(size, 4000 * components // 3, dtype)
    right = np.sum(inputs, axis=0, dtype=np.float64)
    before = [x.copy() for x in inputs]
    outs, _, _ = run(found.code, inputs, in_place=in_place)
    error = worst_error([out.astype(np.float64) for out in outs], right[None])
    assert found.error / 2 < error < 2 * found.error
    if not in_place:
        np.testing.assert_array_equal(inputs, before)


@pytest.mark.parametrize("count", [*range(1, 20), 30, 31, 32, 33, 97, 1000])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("code", [Perturbed, RootsOfUnity])
def test_any_count_is_summed(code, size, count):
    """Also one that leaves components or whole tokens empty."""
    code = code(size, 3 * size, 0.02)
    inputs = normals(size, count, np.float64)
    outs, _, _ = run(code, inputs, length=7)
    right = np.sum(inputs, axis=0)
    one = np.eye(code.components)
    for rank, out in enumerate(outs):
        bound = sum(
            np.linalg.norm(code.effect(rank, source) - one, 2) * np.linalg.norm(x)
            for source, x in enumerate(inputs)
        )
        assert np.linalg.norm(out - right) <= bound + 1e-9


def test_it_does_what_the_definition_says():
    code = Perturbed(4, 12, 0.01)
    inputs = normals(4, 12 * 50, np.float64)
    outs, _, _ = run(code, inputs, length=17)
    parts = np.array(inputs).reshape(4, 12, 50)
    expected = outputs(code, parts, np.float64).reshape(4, -1)
    # Both round at each hop, in another order: alike up to that, and not up to the bias only.
    np.testing.assert_allclose(outs, expected, atol=1e-9)


@pytest.mark.parametrize("components", [5, 6, 9, 12])
def test_components_of_complex_pairs_do_what_the_definition_says(components):
    code = RootsOfUnity(4, components, 0.01)
    inputs = normals(4, 2 * components * 50, np.float64)
    outs, _, _ = run(code, inputs, length=17)
    pairs = np.array(inputs).view(np.complex128).reshape(4, components, 50)
    expected = outputs(code, pairs, np.float64).reshape(4, -1).view(np.float64)
    np.testing.assert_allclose(outs, expected, atol=1e-8)


def test_more_components_to_a_token_than_the_kernels_take():
    size, per_token = 3, 10
    code = Perturbed(size, per_token * size, 0.7)  # well conditioned, and not near
    inputs = [np.full(per_token * size * 30, rank + 1.0) for rank in range(size)]
    outs, _, _ = run(code, inputs)
    expected = outputs(code, np.array(inputs).reshape(size, -1, 30), np.float64).reshape(size, -1)
    np.testing.assert_allclose(outs, expected, atol=1e-6)


def test_the_own_contribution_is_exact_and_others_are_nearly():
    code = Perturbed(4, 8, 1e-2)
    for source in range(4):
        inputs = [np.full(80, float(rank == source)) for rank in range(4)]
        outs, _, _ = run(code, inputs)
        np.testing.assert_allclose(outs[source], 1, atol=1e-12)
        for out in outs:
            assert np.abs(out - 1).max() < 1.02e-2


def test_equal_arrays_have_no_error_when_balanced():
    code = Perturbed(4, 12, 0.1, balanced=True)
    outs, _, _ = run(code, [np.arange(120.0)] * 4)
    np.testing.assert_allclose(outs, [4 * np.arange(120.0)] * 4, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("balanced", [False, True])
def test_what_lasts_has_a_small_error_over_two_calls(balanced):
    eps = 1e-2
    inputs = normals(4, 8 * 50, np.float64)
    right = 2 * np.sum(inputs, axis=0)
    total = np.zeros((2, 4, right.size))
    for flipped in (False, True):  # twice the same code, and one of each
        total[0] += run(Perturbed(4, 8, eps, balanced), inputs)[0]
        total[1] += run(Perturbed(4, 8, eps, balanced, flipped), inputs)[0]
    same, other = (max(np.linalg.norm(t - right, axis=1)) for t in total)
    assert other < 5 * eps * same


@pytest.mark.parametrize(
    "code",
    [Perturbed(size, n * size, 0.1) for size, n in ((2, 2), (4, 1), (4, 2), (4, 3), (5, 4))]
    + [RootsOfUnity(size, c, 0.1) for size, c in ((2, 3), (4, 4), (4, 5), (5, 13))],
)
def test_rounds_bytes_and_memory_are_those_of_the_code(code):
    size, count = code.size, 64 * code.components
    outs, stats, executions = run(code, normals(size, count), length=64)
    for out, of, execution in zip(outs, stats, executions, strict=True):
        assert of.messages == code.rounds
        assert of.wire_bytes == code.rate * out.nbytes
        blocks = [block for group in execution.groups for block in group.blocks]
        beside = {id(b): b.nbytes for b in blocks if b.base is not out}
        assert sum(beside.values()) <= out.nbytes * size / code.components


def test_no_more_is_sent_than_there_is():
    """In 9 elements of 12 components, the first nine have one value each."""
    _, stats, _ = run(Perturbed(4, 12, 0.1), normals(4, 9))
    assert all(of.wire_bytes == 4 * of.messages for of in stats)
    _, stats, _ = run(Perturbed(4, 12, 0.1), normals(4, 1))  # only token 0 is not empty
    assert sum(of.messages for of in stats) == Perturbed(4, 12, 0.1).rounds


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_stay_visible_on_all_ranks(value):
    for place in (0, 30, 59):
        inputs = normals(3, 60)
        inputs[1][place] = value
        outs, _, _ = run(Perturbed(3, 6, 1e-2), inputs)
        for out in outs:
            assert not np.isfinite(out[place])
            assert np.isfinite(out).sum() >= 58
