"""Sparse sums on ranks."""

import numpy as np
import pytest
from conftest import raised, together

import mpiquant
from mpiquant import sparse
from mpiquant.codecs import (
    BlockRandomKCodec,
    RandomKCodec,
    ThresholdCodec,
    TopKCodec,
    UniformCodec,
)
from mpiquant.feedback import is_nothing

Q8 = UniformCodec(bits=8)
WAYS = [
    (TopKCodec(ratio=0.05), "auto"),
    (TopKCodec(ratio=0.05), "sparse_allgather"),
    (TopKCodec(ratio=0.05), "sparse_reduce_scatter"),
    (TopKCodec(ratio=0.05, values=Q8), "sparse_allgather"),
    (TopKCodec(ratio=0.05, values=Q8), "sparse_reduce_scatter"),
    (ThresholdCodec(threshold=2), "sparse_allgather"),
    (ThresholdCodec(threshold=2), "sparse_reduce_scatter"),
    (RandomKCodec(ratio=0.05), "auto"),
    (RandomKCodec(ratio=0.05, values=Q8), "ring"),
    (RandomKCodec(ratio=0.05, draw="own"), "auto"),
    (RandomKCodec(ratio=0.05, draw="own"), "sparse_reduce_scatter"),
    (BlockRandomKCodec(ratio=0.1, block=16), "halving_doubling"),
    (BlockRandomKCodec(ratio=0.1, block=16, draw="own", values=Q8), "auto"),
]
each_way = pytest.mark.parametrize(("codec", "algorithm"), WAYS, ids=str)


def alike(comm, x):
    return len(set(comm.allgather(x.tobytes()))) == 1


@each_way
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nothing_is_lost(comm, codec, algorithm, dtype):
    """What was not sent yet is in the residuals, to the last integer or up to rounding."""
    rng = np.random.default_rng(comm.rank)
    feedback = mpiquant.ErrorFeedback()
    sent, right = np.zeros(3001), np.zeros(3001)
    for _ in range(5):
        x = rng.integers(-1000, 1000, 3001).astype(dtype)
        before = x.copy()
        found = mpiquant.allreduce(
            x, comm=comm, codec=codec, algorithm=algorithm, feedback=feedback, name="x"
        )
        with together(comm):
            assert found.dtype == dtype
            np.testing.assert_array_equal(x, before)
        assert alike(comm, found)
        sent += found
        right += comm.allreduce(before.astype(np.float64))
    kept = comm.allreduce(feedback.residual("x").astype(np.float64))
    with together(comm):
        if codec.values == Q8 and comm.size > 1:
            np.testing.assert_allclose(sent + kept, right, atol=1 if dtype == np.float32 else 1e-6)
        else:
            np.testing.assert_array_equal(sent + kept, right)
        if comm.size > 1:
            assert np.count_nonzero(found) < 3001


@each_way
def test_all_positions_are_the_exact_sum(comm, codec, algorithm):
    if isinstance(codec, ThresholdCodec):
        codec = ThresholdCodec(threshold=0.5, unit="absolute")
    elif codec.values == Q8:
        return
    else:
        codec = type(codec)(**{**vars(codec), "ratio": 1.0})
    x = np.random.default_rng(comm.rank).integers(-99, 99, 1000).astype(np.float32)
    found = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm)
    right = comm.allreduce(x.astype(np.float64))
    with together(comm):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("algorithm", ["sparse_allgather", "sparse_reduce_scatter"])
def test_positions_that_ranks_share_add_up(comm, algorithm):
    x = np.zeros(100, np.float32)
    x[0] = -5 if comm.rank == 0 else -3
    x[1 + comm.rank] = 1
    found = mpiquant.allreduce(x, comm=comm, codec=TopKCodec(ratio=0.01), algorithm=algorithm)
    with together(comm):
        assert found[0] == -5 - 3 * (comm.size - 1)
        assert comm.size == 1 or not found[1:].any()


@each_way
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_short_arrays(comm, codec, algorithm, count):
    x = np.arange(1, count + 1, dtype=np.float64)
    found = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm)
    with together(comm):
        assert found.shape == (count,)
        assert np.all((found >= 0) & (found < (comm.size + 0.1) * x))
        if not codec.drawn and not isinstance(codec, ThresholdCodec):
            assert np.count_nonzero(found) >= min(count, 1)
    assert alike(comm, found)


@each_way
def test_in_place_and_nonblocking(comm, codec, algorithm):
    rng = np.random.default_rng(comm.rank)
    arrays = [rng.standard_normal(2000) for _ in range(3)]
    expected = [mpiquant.allreduce(a, comm=comm, codec=codec, algorithm=algorithm) for a in arrays]
    if codec.drawn:
        expected = [None] * 3  # other calls have other positions
    options = {"comm": comm, "codec": codec, "algorithm": algorithm}
    with mpiquant.options(progress="thread"):
        requests = [mpiquant.iallreduce(a, out=a, **options) for a in arrays]
    for request in reversed(requests):
        request.wait()
    for a, right in zip(arrays, expected, strict=True):
        assert alike(comm, a)
        with together(comm):
            if right is not None:
                np.testing.assert_array_equal(a, right)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("algorithm", ["sparse_allgather", "sparse_reduce_scatter"])
@pytest.mark.parametrize("codec", [TopKCodec(ratio=0.001), ThresholdCodec()], ids=str)
def test_what_is_no_number_is_seen_on_all_ranks(comm, codec, algorithm, value):
    x = np.ones(3000, np.float32)
    if comm.rank == comm.size - 1:
        x[1234] = value
    feedback = mpiquant.ErrorFeedback()
    found = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm, feedback=feedback)
    with together(comm):
        assert not np.isfinite(found[1234])
        assert is_nothing(feedback.residual(""))  # such a step leaves no trace


def test_what_is_sent_is_counted(comm):
    n, size = 100_000, comm.size
    x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)

    def sent(codec, algorithm="auto"):
        _, stats = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm, stats=True)
        return stats.wire_bytes

    shared = comm.allreduce(sent(RandomKCodec(ratio=0.01), "ring"))
    own = sent(RandomKCodec(ratio=0.01, draw="own"))
    gathered = sent(TopKCodec(ratio=0.01), "sparse_allgather")
    split = sent(TopKCodec(ratio=0.01), "sparse_reduce_scatter")
    with together(comm):
        if size > 1:
            assert shared == 2 * (size - 1) * 1000 * 4  # values and nothing else, of all ranks
            assert own == (size - 1) * 1000 * 4
            assert own < gathered < 1.35 * own
            assert split < 2.7 * 1000 * 4 + 100 * size


@pytest.mark.mpi(min_size=2)
def test_arrays_of_a_dict_keep_their_shares(comm):
    rng = np.random.default_rng(comm.rank)
    arrays = {"a": 100 * rng.standard_normal(300), "b": rng.standard_normal((20, 10))}
    layerwise = mpiquant.allreduce(arrays, comm=comm, codec=TopKCodec(ratio=0.01))
    whole = mpiquant.allreduce(arrays, comm=comm, codec=TopKCodec(ratio=0.01, scope="global"))
    with together(comm):
        assert np.any(layerwise["a"])
        assert np.any(layerwise["b"])
        assert np.any(whole["a"])
        assert not np.any(whole["b"])


def test_sections(comm, monkeypatch):
    x = np.random.default_rng(comm.rank).integers(-50, 50, 1000).astype(np.float32)
    for codec, algorithm in WAYS[1:2] + WAYS[9:10]:  # others choose again, section by section
        monkeypatch.setattr(sparse, "SECTION", 1 << 27)
        key = {"comm": comm.Dup(), "codec": codec, "algorithm": algorithm}
        whole = mpiquant.allreduce(x, **key)
        monkeypatch.setattr(sparse, "SECTION", 300)
        key["comm"] = comm.Dup()  # the same number of a call, for the same positions
        with together(comm):
            np.testing.assert_array_equal(mpiquant.allreduce(x, **key), whole)
    feedback = mpiquant.ErrorFeedback()
    options = {"algorithm": "sparse_reduce_scatter", "feedback": feedback}
    found = mpiquant.allreduce(x, comm=comm, codec=TopKCodec(ratio=0.05), **options)
    kept, right = comm.allreduce(feedback.residual("")), comm.allreduce(x)
    with together(comm):
        np.testing.assert_array_equal(found + kept, right)


def test_of_what_is_never_compressed_all_is_sent(comm):
    with mpiquant.options(codec="top_k"):
        found = mpiquant.allreduce(np.arange(5000), comm=comm)
        few = mpiquant.allreduce(np.arange(5.0), comm=comm)
    with together(comm):
        np.testing.assert_array_equal(found, comm.size * np.arange(5000))
        np.testing.assert_array_equal(few, comm.size * np.arange(5.0))


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_is_refused(comm):
    private = comm.Dup()
    x = np.ones(5000)
    cases = [
        (lambda: mpiquant.allreduce(x, comm=private, codec="top_k", algorithm="ring"), "ring"),
        (lambda: mpiquant.reduce_scatter(x, comm=private, codec="top_k"), "has no codec"),
        (lambda: mpiquant.allgather(x, comm=private, codec="random_k"), "has no codec"),
        (lambda: mpiquant.allreduce(x, comm=private, codec="top_k(k=3)"), "unexpected keyword"),
    ]
    for call, words in cases:
        errors = raised(comm, call)
        with together(comm):
            assert all(words in error[1] for error in errors), errors


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_sparsifiers_disagree(comm):
    private = comm.Dup()
    codec = RandomKCodec(seed=comm.rank)
    errors = raised(comm, lambda: mpiquant.allreduce(np.ones(5000), comm=private, codec=codec))
    after = mpiquant.allreduce(
        np.ones(5000), comm=private, codec="top_k", algorithm="sparse_allgather"
    )
    with together(comm):
        assert all("seed=0" in error[1] for error in errors), errors
        assert np.count_nonzero(after) == 50


@pytest.mark.parametrize("codec", [TopKCodec(ratio=0.1), RandomKCodec(ratio=0.1, scope="global")])
def test_a_synchronizer_sends_sparse_gradients(comm, codec):
    rng = np.random.default_rng(comm.rank)
    params = {"w": np.zeros((40, 50)), "b": np.zeros(50)}
    sync = mpiquant.GradientSynchronizer(params, "sum", comm=comm, codec=codec)
    sent = {name: np.zeros_like(p) for name, p in params.items()}
    right = {name: np.zeros_like(p) for name, p in params.items()}
    for _ in range(4):
        for name in ("b", "w"):
            gradient = rng.integers(-9, 9, params[name].shape).astype(float)
            sync.ready(name, gradient)
            right[name] += comm.allreduce(gradient)
        for name, found in sync.wait_all().items():
            sent[name] += found
    residuals = {name: comm.allreduce(r.copy()) for name, r in sync.residuals().items()}
    with together(comm):
        for name in params:
            np.testing.assert_array_equal(sent[name] + residuals.get(name, 0), right[name])
