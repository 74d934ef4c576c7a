"""Buckets, waits and optimizers: what needs no MPI call."""

import numpy as np
import pytest

from mpiquant.codecs import EXACT, UniformCodec
from mpiquant.gradients.bucket import Bucket
from mpiquant.gradients.optimizer import SGD, Adam
from mpiquant.plan import Parameter, bucket_limits, plan_buckets
from mpiquant.rate import split_waits

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
Q4 = UniformCodec(bits=4)


def parameters(*sizes, dtype=F32, codec=EXACT):
    return [Parameter(f"p{i}", (n,), dtype, codec) for i, n in enumerate(sizes)]


def test_all_buckets_can_be_under_way_at_once():
    assert bucket_limits(60 << 20) == (10 << 20, 1 << 20)
    assert bucket_limits(1000) == (1 << 20, 1 << 20)
    assert bucket_limits(60 << 20, asked_for=500) == (500, 500)


def names(buckets):
    return [[p.name for p in bucket] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter_with_small_ends():
    buckets = plan_buckets(parameters(1, 10, 10, 10, 10, 1, 1), limit=80, ends=8)
    assert names(buckets) == [["p6", "p5"], ["p4", "p3"], ["p2", "p1"], ["p0"]]


@pytest.mark.parametrize("limit", [1, 40, 100, 10**9])
@pytest.mark.parametrize("ends", [1, 40])
def test_every_parameter_is_in_one_bucket(limit, ends):
    sizes = [3, 20, 1, 50, 5, 5, 5, 1, 30]
    mixed = [
        Parameter(f"p{i}", (n,), F64 if i % 3 == 1 else F32, Q4 if i % 2 else EXACT)
        for i, n in enumerate(sizes)
    ]
    buckets = plan_buckets(mixed, limit, ends)
    found = [p.name for bucket in buckets for p in bucket]
    assert sorted(found) == sorted(p.name for p in mixed)
    for bucket in buckets:
        assert len({(p.dtype, p.codec) for p in bucket}) == 1
        assert len(bucket) == 1 or sum(p.nbytes for p in bucket) <= max(limit, ends)
    # A bucket becomes full with its first layer: in this order.
    firsts = [min(int(p.name[1:]) for p in bucket) for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True)


def test_one_parameter_is_one_bucket():
    assert names(plan_buckets(parameters(1000), 8, 8)) == [["p0"]]


def test_a_bucket_is_one_buffer():
    bucket = Bucket(0, [Parameter("a", (2, 3), F32, EXACT), Parameter("b", (), F32, EXACT)])
    bucket.take("a", np.arange(6).reshape(2, 3))
    bucket.take("b", np.float32(7))
    np.testing.assert_array_equal(bucket.flat, [0, 1, 2, 3, 4, 5, 7])
    bucket.begun.add("b")
    bucket.take("b", np.float32(1))
    assert bucket.views["b"] == 8
    assert bucket.missing == ["a", "b"]
    joined = bucket.join({"a": np.ones((2, 3))}, F64)
    np.testing.assert_array_equal(joined, [1, 1, 1, 1, 1, 1, 0])
    bucket.protect(True)
    with pytest.raises(ValueError, match="read-only"):
        bucket.views["a"][...] = 0
    bucket.protect(False)
    bucket.views["a"][...] = 0


def test_waits_are_split_at_the_last_rank_to_be_ready():
    ready = np.array([[0.0, 0.0], [3.0, 1.0]])
    need = np.array([[1.0, 2.0], [4.0, 2.0]])
    wait_s = np.array([[5.0, 4.0], [2.0, 1.0]])
    wire, peer = split_waits(ready, need, wait_s)
    np.testing.assert_array_equal(peer, [[2.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(wire, wait_s - peer)


def test_sgd():
    g = [np.array([1.0, -2.0]), np.array([0.5, 0.5])]
    plain = SGD({"w": np.ones(2)}, 0.1)
    heavy = SGD({"w": np.ones(2)}, 0.1, momentum=0.9)
    ahead = SGD({"w": np.ones(2)}, 0.1, momentum=0.9, nesterov=True)
    decay = SGD({"w": np.ones(2)}, 0.1, weight_decay=0.5)
    for optimizer in (plain, heavy, ahead, decay):
        for gradient in g:
            optimizer.update("w", gradient)
    np.testing.assert_allclose(plain.parameters["w"], 1 - 0.1 * (g[0] + g[1]))
    np.testing.assert_allclose(heavy.parameters["w"], 1 - 0.1 * (g[0] + 0.9 * g[0] + g[1]))
    v1, v2 = g[0], 0.9 * g[0] + g[1]
    np.testing.assert_allclose(ahead.parameters["w"], 1 - 0.1 * (g[0] + 0.9 * v1 + g[1] + 0.9 * v2))
    w1 = 1 - 0.1 * (g[0] + 0.5)
    np.testing.assert_allclose(decay.parameters["w"], w1 - 0.1 * (g[1] + 0.5 * w1))
    with pytest.raises(ValueError, match="momentum"):
        SGD({}, 0.1, nesterov=True)


def test_adam():
    """By the formulas of the paper."""
    w, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    optimizer = Adam({"w": np.ones(3)}, 0.01, weight_decay=0.1)
    rng = np.random.default_rng(0)
    for t in range(1, 20):
        g = rng.standard_normal(3)
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        w = w - 0.01 * 0.1 * w
        w = w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        optimizer.update("w", g)
    np.testing.assert_allclose(optimizer.parameters["w"], w, rtol=1e-12)


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p)])
def test_optimizers_go_on_where_they_were(make):
    rng = np.random.default_rng(1)
    gradients = rng.standard_normal((6, 3))
    whole = make({"w": np.ones(3)})
    for g in gradients:
        whole.update("w", g)
    first = make({"w": np.ones(3)})
    for g in gradients[:3]:
        first.update("w", g)
    second = make({"w": first.parameters["w"].copy()})
    second.load_state_dict(first.state_dict())
    for g in gradients[3:]:
        first.update("w", g)  # must not disturb the copy
        second.update("w", g)
    np.testing.assert_array_equal(second.parameters["w"], whole.parameters["w"])
