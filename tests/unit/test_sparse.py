"""Sparsifiers: which positions are chosen, and how they are written."""

import numpy as np
import pytest

from mpiquant.codecs import (
    BlockRandomKCodec,
    LowBitCodec,
    RandomKCodec,
    Sparsifier,
    ThresholdCodec,
    TopKCodec,
    UniformCodec,
    by_name,
)
from mpiquant.codecs import sparsifier as sparsifier_module
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.sparse_message import (
    decode_message,
    decode_positions,
    encode_message,
    encode_positions,
    positions_nbytes,
    positions_width,
)
from mpiquant.codecs.sparsifier import largest, not_below

EXACT = IdentityCodec()


def largest_by_sorting(x, count):
    """The definition: by magnitude, ties at the lowest positions first."""
    magnitudes = np.where(np.isnan(x), np.inf, np.abs(x.astype(np.float64)))
    order = np.argsort(-magnitudes, kind="stable")
    return np.sort(order[:count])


def arrays(n, dtype):
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n).astype(dtype)
    few = np.zeros(n, dtype)
    few[rng.integers(0, n, n // 500 + 1)] = 1
    steps = np.arange(n) % max(n // (1 << 14), 1)  # what a sample with this stride never sees
    bad = normal.copy()
    bad[:: max(n // 7, 1)] = np.nan
    bad[n // 2] = -np.inf
    return {
        "normal": normal,
        "ties": rng.integers(-3, 4, n).astype(dtype),
        "zeros": np.zeros(n, dtype),
        "few": few,
        "steps": steps.astype(dtype),
        "ascending": np.arange(n, dtype=dtype),
        "tiny": (normal * np.finfo(dtype).tiny).astype(dtype),
        "no numbers": bad,
    }


# ---- the largest ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 100, 70_001, 200_003])
def test_largest_is_what_sorting_finds(n, dtype):
    for name, x in arrays(n, dtype).items():
        before = x.copy()
        for count in {1, 2, n // 1000, n // 100, n // 3, n - 1, n}:
            if 0 < count <= n:
                found = largest(x, count)
                np.testing.assert_array_equal(found, largest_by_sorting(x, count), err_msg=name)
        np.testing.assert_array_equal(x, before)


def test_magnitude_counts_and_one_value_at_least_is_sent():
    x = np.array([-5, 1, 2, 0.5], np.float32)
    np.testing.assert_array_equal(TopKCodec(ratio=0.25).positions(x, 0), [0])
    assert TopKCodec(ratio=0.01).most(10) == 1
    assert TopKCodec(ratio=0.01).most(0) == 0
    np.testing.assert_array_equal(TopKCodec(ratio=0.1).positions(np.ones(20), 0), [0, 1])
    x[3] = np.nan
    np.testing.assert_array_equal(TopKCodec(ratio=0.25).positions(x, 0), [3])


def test_not_below_keeps_what_is_no_number():
    x = np.array([1, -2, np.nan, 3, np.inf, 1.9], np.float32)
    np.testing.assert_array_equal(not_below(x, 2), [1, 2, 3, 4])
    long = np.zeros(3 * sparsifier_module.CHUNK + 5)
    long[[0, sparsifier_module.CHUNK, -1]] = 1
    np.testing.assert_array_equal(not_below(long, 1), np.flatnonzero(long))


# ---- thresholds ----


def test_threshold():
    x = np.array([0.1, -4, 0, 2, 3], np.float64)
    absolute = ThresholdCodec(threshold=2, unit="absolute")
    np.testing.assert_array_equal(absolute.positions(x, 0), [1, 3, 4])
    rms = np.sqrt(np.mean(x**2))
    found = ThresholdCodec(threshold=1.2).positions(x, 0)
    np.testing.assert_array_equal(found, np.flatnonzero(np.abs(x) >= 1.2 * rms))
    assert ThresholdCodec().positions(np.zeros(10), 0).size == 0
    x[2] = np.nan
    assert 2 in ThresholdCodec().positions(x, 0)
    np.testing.assert_array_equal(ThresholdCodec().positions(np.full(3, 1e38, "f4"), 0), [])


# ---- drawn positions ----

DRAWN = [
    RandomKCodec(ratio=0.1),
    RandomKCodec(ratio=0.3, draw="own", seed=5),
    BlockRandomKCodec(ratio=0.1, block=7),
    BlockRandomKCodec(ratio=0.25, block=16, draw="own"),
    BlockRandomKCodec(ratio=0.02, block=1000),
]


@pytest.mark.parametrize("codec", DRAWN, ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 9, 100, 1003])
def test_drawn_positions_ascend_and_depend_on_the_key_only(codec, n):
    x = np.random.default_rng(1).standard_normal(n)
    at = codec.positions(x, 17)
    assert at.size == codec.most(n) >= codec.ratio * n
    assert np.all(np.diff(at) > 0)
    assert n == 0 or 0 <= at[0] <= at[-1] < n
    np.testing.assert_array_equal(codec.positions(np.zeros(n), 17), at)
    if n > 99:
        assert any(not np.array_equal(codec.positions(x, key), at) for key in range(5))


@pytest.mark.parametrize("codec", DRAWN, ids=str)
def test_each_value_is_as_likely_as_any_other(codec):
    n, draws = 101, 4000
    counts = np.zeros(n)
    for key in range(draws):
        counts[codec.positions(np.empty(n), key)] += 1
    expected = draws * codec.most(n) / n
    # Binomial, or wider where positions come in blocks; six deviations.
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_blocks_are_blocks():
    codec = BlockRandomKCodec(ratio=0.1, block=50)
    for key in range(50):
        at = codec.positions(np.empty(1003), key)
        gaps = np.flatnonzero(np.diff(at) > 1).size
        assert at.size == 150
        assert gaps <= 3  # one more where a block goes around the end


# ---- parts and scopes ----


@pytest.mark.parametrize("codec", [TopKCodec(ratio=0.1), *DRAWN[:3], ThresholdCodec()], ids=str)
def test_each_part_keeps_its_share(codec):
    x = np.concatenate([100 * np.arange(50.0), np.arange(200.0), [0.5]])
    parted = codec.of_parts((50, 200, 1))
    at = parted.positions(x, 3)
    begin = 0
    for n in (50, 200, 1):
        inside = at[(begin <= at) & (at < begin + n)] - begin
        if isinstance(codec, TopKCodec):
            np.testing.assert_array_equal(inside, largest(x[begin : begin + n], codec.most(n)))
        elif not isinstance(codec, ThresholdCodec):
            assert inside.size == codec.most(n)
        begin += n
    assert np.all(np.diff(at) > 0)
    if not isinstance(codec, ThresholdCodec):
        assert parted.most(251) == at.size
    with pytest.raises(ValueError, match="parts of 251"):
        parted.positions(x[:-1], 3)


def test_a_global_scope_has_no_parts():
    codec = TopKCodec(ratio=0.1, scope="global")
    assert codec.of_parts((3, 4)) is codec
    assert codec.undivided
    assert not TopKCodec().undivided
    assert TopKCodec().of_parts((3,)) == TopKCodec()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopKCodec(ratio=0), "ratio is 0"),
        (lambda: RandomKCodec(ratio=1.1), "ratio is 1.1"),
        (lambda: RandomKCodec(draw="mine"), "draw is 'mine'"),
        (lambda: BlockRandomKCodec(block=0), "block is 0"),
        (lambda: ThresholdCodec(threshold=0), "threshold is 0"),
        (lambda: ThresholdCodec(unit="sd"), "unit is 'sd'"),
        (lambda: TopKCodec(scope="all"), "scope is 'all'"),
        (lambda: TopKCodec(values=TopKCodec()), "cannot be sent in"),
        (lambda: TopKCodec(values=by_name("aqat")), "cannot be sent in"),
    ],
)
def test_bad_parameters(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "codec",
    [
        *DRAWN,
        TopKCodec(),
        TopKCodec(ratio=1e-3, values=UniformCodec(bits=8, block=64), scope="global"),
        ThresholdCodec(threshold=0.5, unit="absolute", values=LowBitCodec()),
        TopKCodec().of_parts((3, 4, 5)),
    ],
    ids=str,
)
def test_a_spec_names_the_codec(codec):
    assert by_name(codec.spec) == codec
    assert isinstance(codec, Sparsifier)
    with pytest.raises(TypeError, match="no format"):
        codec.encode(np.ones(3), np.zeros(3, np.uint8))
    with pytest.raises(TypeError, match="no format"):
        codec.decode(np.zeros(3, np.uint8), np.ones(3))


# ---- messages ----


@pytest.mark.parametrize("total", [1, 7, 8, 255, 256, 257, 1000, 70_000, 3_000_000])
def test_positions_are_read_as_they_were_written(total):
    rng = np.random.default_rng(total)
    counts = {1, 2, total // 3000, total // 100, total // 10, total // 2, total}
    for count in sorted(c for c in counts if 0 < c <= total):
        draws = [np.sort(rng.choice(total, count, replace=False))]
        draws += [np.arange(count), np.arange(total - count, total)]
        for at in draws:
            wire = np.empty(positions_nbytes(total, count), np.uint8)
            encode_positions(at, total, wire)
            np.testing.assert_array_equal(decode_positions(wire, total, count), at)


def test_positions_of_long_arrays():
    total = 1 << 40
    at = np.array([0, 1, 1 << 31, (1 << 32) + 5, total - 1])
    assert positions_width(total, at.size) == 32
    wire = np.empty(positions_nbytes(total, at.size), np.uint8)
    encode_positions(at, total, wire)
    np.testing.assert_array_equal(decode_positions(wire, total, at.size), at)


@pytest.mark.parametrize("ratio", [1e-4, 1e-3, 1e-2, 0.1, 0.5])
def test_positions_take_little_more_than_they_must(ratio):
    total = 10_000_000
    count = round(ratio * total)
    entropy = -ratio * np.log2(ratio) - (1 - ratio) * np.log2(1 - ratio)
    bits = 8 * positions_nbytes(total, count) / total
    assert entropy <= bits < 1.3 * entropy
    assert bits <= 1


@pytest.mark.parametrize("codec", [EXACT, UniformCodec(bits=8), LowBitCodec()], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_messages(codec, dtype):
    rng = np.random.default_rng(0)
    for total, count in ((0, 0), (5, 0), (5, 5), (1000, 10), (100_000, 999)):
        at = np.sort(rng.choice(total, count, replace=False)) if total else np.zeros(0, np.int64)
        values = rng.standard_normal(count).astype(dtype)
        lost = values.copy()
        wire = encode_message(at, lost, total, codec)
        found, decoded, nonfinite = decode_message(wire, total, codec, np.dtype(dtype))
        assert not nonfinite
        np.testing.assert_array_equal(found, at)
        np.testing.assert_array_equal(lost, values - decoded)
        if codec == EXACT:
            np.testing.assert_array_equal(decoded, values)


def test_what_is_no_message_is_refused():
    at, values = np.arange(0, 1000, 10), np.ones(100, np.float32)
    wire = encode_message(at, values.copy(), 1000, EXACT)
    read = lambda w: decode_message(w, 1000, EXACT, values.dtype)  # noqa: E731
    for bad in (wire[:5], wire[:-1], np.append(wire, 0).astype(np.uint8)):
        with pytest.raises(ValueError, match="message"):
            read(bad)
    broken = wire.copy()
    broken[0] ^= 1
    with pytest.raises(ValueError, match="says that it has 101 values"):
        read(broken)
    broken = wire.copy()
    broken[8 + 400] ^= 0xFF  # the lower bits of the first position
    with pytest.raises(ValueError, match="ascend"):
        read(broken)
    broken = wire.copy()
    broken[-1] ^= 0x80
    with pytest.raises(ValueError, match="positions"):
        read(broken)
