"""The mathematics of the coded ring: weights, errors, conditions, design."""

import math

import numpy as np
import pytest
from coded_ring_oracle import outputs, worst_error

from mpiquant.collectives.coded_ring import Layout, visits
from mpiquant.collectives.coding import (
    Code,
    Perturbed,
    RootsOfUnity,
    Vandermonde,
    design,
)


def normals(size, components, n=400, dtype=np.float32):
    return np.random.default_rng(1).standard_normal((size, components, n)).astype(dtype)


def slope(xs, ys):
    return np.polyfit(np.log(xs), np.log(ys), 1)[0]


class Plain(Perturbed):
    """The same code, by the general formulas."""

    condition = Code.condition
    bias = Code.bias
    _rounding_of = Code._rounding_of
    _unlike_ranks = Code._unlike_ranks


# ---- cost ----


@pytest.mark.parametrize(
    ("size", "components", "rate"),
    [
        (4, 4, 1.5),
        (4, 8, 1.25),
        (4, 12, 7 / 6),
        (8, 16, 1.375),
        (8, 24, 1.25),
        (2, 2, 1),
        (2, 6, 1),
    ],
)
def test_rate(size, components, rate):
    code = Perturbed(size, components, 1e-3)
    assert code.rate == pytest.approx(rate)
    assert code.storage == 1 + size / components


def test_a_rank_meets_every_token_often_enough():
    for size in range(2, 7):
        for per_token in range(1, 4):
            for rank in range(size):
                steps = visits(rank, size, per_token * size, size)
                assert sum(v.sent for v in steps) == per_token * size + size - 2
                assert [v.received for v in steps] == [False] + [True] * (len(steps) - 1)
                for token in range(size):
                    behind = (rank - token) % size
                    count = sum(v.token == token for v in steps)
                    assert count == per_token + (behind < size - 1)


@pytest.mark.parametrize("count", [0, 1, 5, 7, 16, 17, 100, 101])
@pytest.mark.parametrize(("groups", "width"), [(4, 1), (1, 2)])
def test_layout_covers_each_element_once(count, groups, width):
    layout = Layout(count, 8, groups, width)
    elements = np.concatenate([np.arange(count)[layout.present(m)] for m in range(8)])
    np.testing.assert_array_equal(elements, np.arange(count))
    for m in range(8):
        part, length = layout.present(m), layout.group_length(m % groups)
        assert part.stop - part.start <= length
        assert length % width == 0


# ---- weights ----


def test_a_code_of_as_many_components_as_ranks_is_the_ring():
    g = normals(4, 4)
    code = Perturbed(4, 4, 0.0)
    assert code.bias == 0
    assert code.condition == 1
    for out in outputs(code, g, np.float32):
        np.testing.assert_allclose(out, g.sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("per_token", [1, 2, 3, 4])
def test_encoding_and_decoding_give_the_weights(per_token, balanced):
    """One value 1 at a source, followed by hand through the hops to a receiver."""
    size = 5
    code = Perturbed(size, per_token * size, 0.01, balanced)
    for source in range(size):  # distances behind the token's start
        for receiver in range(size):
            token = np.zeros((per_token,))
            equations, hop = [], 0
            token = np.zeros(per_token)
            for hop in range(code.rounds + 1):
                at, visit = hop % size, hop // size
                if at == source:
                    token = token + code.encoding(source)[visit]
                if at == receiver and hop >= size - 1 and len(equations) < per_token:
                    equations.append(token)
            solved = code.decoding(receiver) @ np.array(equations)
            expected = np.diag([code.weights(q)[receiver, source] for q in range(per_token)])
            np.testing.assert_allclose(solved, expected, atol=1e-7)


def test_own_contribution_is_exact():
    code = Perturbed(5, 15, 0.01)
    for q in range(3):
        np.testing.assert_array_equal(np.diag(code.weights(q)), 1)


def test_balanced_weights_have_mean_one_for_each_source_and_receiver():
    code = Perturbed(6, 18, 0.05, balanced=True)
    for q in range(3):
        np.testing.assert_allclose(code.weights(q).mean(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(code.weights(q).mean(axis=1), 1, atol=1e-12)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_balanced_weights_err_less(size):
    plain, balanced = Perturbed(size, 2 * size, 1e-3), Perturbed(size, 2 * size, 1e-3, True)
    gain = plain.bias / balanced.bias
    assert math.sqrt(3) < gain < math.sqrt(6) + 0.01  # of a triangle of N x N, 6 as N grows


def test_the_short_formulas_of_a_perturbed_code_are_the_general_ones():
    for size, per_token in ((3, 2), (4, 3), (5, 2)):
        short, general = (kind(size, per_token * size, 0.02) for kind in (Perturbed, Plain))
        assert short.condition == pytest.approx(general.condition, rel=1e-6)
        assert short.bias == pytest.approx(general.bias, rel=1e-6)
        assert short.rounding(np.float32) == pytest.approx(general.rounding(np.float32), rel=1e-6)


# ---- errors ----

TABLE = [  # c / N, eps, error and condition number, in float32
    (2, 3e-4, 2.3e-4, 6.7e3),
    (3, 1e-2, 5.2e-3, 9.0e4),
    (4, 3e-2, 2.8e-2, 1.7e6),
]


@pytest.mark.parametrize("size", [3, 4, 5, 8])
@pytest.mark.parametrize(("per_token", "eps", "error", "condition"), TABLE)
def test_values_of_the_table(size, per_token, eps, error, condition):
    code = Perturbed(size, per_token * size, eps)
    g = normals(size, per_token * size)
    found = worst_error(outputs(code, g, np.float32), g.astype(np.float64))
    assert error / 2 < found < error * 2
    assert code.condition == pytest.approx(condition, rel=0.1)
    assert found / 2 < code.error(np.float32) < found * 2


@pytest.mark.parametrize(
    ("per_token", "eps", "error"), [(2, 1e-8, 1.3e-8), (3, 1e-5, 6.6e-6), (4, 3e-4, 1.5e-4)]
)
def test_values_of_the_table_in_float64(per_token, eps, error):
    code = Perturbed(4, per_token * 4, eps)
    g = normals(4, per_token * 4, dtype=np.float64)
    found = worst_error(outputs(code, g, np.float64), g)
    assert error / 2 < found < error * 2


@pytest.mark.parametrize("size", [3, 4])
def test_error_and_condition_follow_their_laws(size):
    """For all c in N+1 ... 3N: error as eps, condition as eps to the power 1 - ceil(c/N)."""
    spreads = np.geomspace(1e-3, 1e-2, 4)
    for components in range(size + 1, 3 * size + 1):
        kinds = [RootsOfUnity] + [Perturbed] * (components % size == 0)
        for kind in kinds:
            codes = [kind(size, components, eps) for eps in spreads]
            assert 0.9 < slope(spreads, [code.bias for code in codes]) < 1.1
            power = slope(1 / spreads, [code.condition for code in codes])
            assert abs(power - codes[0].order) < 0.1
            assert codes[0].order == -(-components // size) - 1


def test_roots_of_unity_solve_for_any_number_of_components():
    rng = np.random.default_rng(2)
    for components in range(3, 9):
        code = RootsOfUnity(3, components, 1e-3)
        g = rng.standard_normal((2, 3, components, 50))
        found = outputs(code, g[0] + 1j * g[1], np.float64)
        assert worst_error(found, g[0] + 1j * g[1]) < (1e-12 if components == 3 else 3e-2)


def test_plain_vandermonde():
    spreads = np.geomspace(1e-2, 1e-1, 4)
    codes = [Vandermonde(3, 4, eps) for eps in spreads]
    assert 0.9 < slope(spreads, [code.bias for code in codes]) < 1.1
    assert slope(1 / spreads, [code.condition for code in codes]) == pytest.approx(3, abs=0.1)
    g = normals(3, 4, dtype=np.float64)
    found = worst_error(outputs(codes[0], g, np.float64), g)
    assert found == pytest.approx(codes[0].bias, rel=0.3)


# ---- design ----


def test_design_finds_the_least_error():
    found = design(4, 8, balanced=False)
    near = [Perturbed(4, 8, found.code.eps * f).error(np.float32) for f in (0.5, 0.9, 1.1, 2)]
    assert found.error <= min(near) * 1.001
    assert found.error == pytest.approx(math.hypot(found.bias, found.rounding))
    assert 1e-4 < found.code.eps < 1e-3


def test_design_keeps_to_the_condition_number():
    found = design(4, 12, cond_max=1e4)
    assert found.condition == pytest.approx(1e4, rel=0.01)
    assert found.error > design(4, 12).error
    with pytest.raises(ValueError, match="condition number"):
        design(4, 16, cond_max=5)


def test_design_takes_the_fewest_bytes_that_an_error_allows():
    assert design(4, error_max=1e-6).code.components == 4
    assert design(4, error_max=1e-3).code.components == 8
    assert design(4, error_max=1e-7, dtype=np.float64).code.components == 8
    assert design(4, error_max=4e-3).code.components == 12
    with pytest.raises(ValueError, match=r"8 components .* error"):
        design(4, 8, error_max=1e-6)


def test_design_for_any_number_of_components():
    found = design(4, 6)
    assert isinstance(found.code, RootsOfUnity)
    assert found.error < 1e-2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1, 2, 0.1), "two ranks"), ((4, 3, 0.1), "components for 4"), ((4, 8, 1.0), "eps is 1.0")],
)
def test_impossible_codes(arguments, words):
    with pytest.raises(ValueError, match=words):
        Perturbed(*arguments)
    with pytest.raises(ValueError, match="no multiple"):
        Perturbed(4, 9, 0.1)
