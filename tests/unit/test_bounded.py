"""Integers of one step: the kernels, their messages, and the bound that follows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiquant import _kernels as k
from mpiquant.codecs import BoundedCodec, by_name
from mpiquant.codecs.bounded import (
    INTEGERS,
    exact_rounding,
    largest_magnitude,
    rounding,
)

COUNTS = [0, 1, 7, 15, 16, 17, 127, 128, 129, 300, 1024, 5000]
TYPES = [(np.float32, np.int32), (np.float64, np.int64)]
each_type = pytest.mark.parametrize(("real", "integer"), TYPES)


@pytest.fixture(params=k.available_isas())
def isa(request):
    before = k.isa()
    k.use_isa(request.param)
    yield request.param
    k.use_isa(before)


def unaligned(values):
    """A copy at an odd address."""
    whole = np.empty(values.nbytes + 1, np.uint8)
    copy = whole[1:].view(values.dtype)
    copy[...] = values
    return copy


def arrays(count, integer, seed=0):
    """Integers of all kinds: by name."""
    rng = np.random.default_rng(seed)
    info = np.iinfo(integer)
    walk = np.cumsum(rng.integers(-1, 2, count))
    return {
        name: np.asarray(values).astype(integer)
        for name, values in {
            "zero": np.zeros(count),
            "constant": np.full(count, -12345),
            "narrow": rng.integers(-1, 2, count),
            "widest planes": rng.integers(-32767, 32768, count),
            "beyond planes": rng.integers(-32768, 32769, count),
            "walk": walk + 1_000_000,
            "mixed": rng.integers(-1, 2, count) * 2 ** rng.integers(0, 24, count),
            "all": rng.integers(info.min, info.max, count, dtype=integer, endpoint=True),
            "ends": np.where(rng.integers(0, 2, count), info.min, info.max),
        }.items()
    }


# ---- kernels ----


@each_type
@pytest.mark.parametrize("count", COUNTS)
def test_to_integers_and_back(isa, count, real, integer):
    x = unaligned((np.random.default_rng(count).standard_normal(count) * 100).astype(real))
    step = 0.013
    q, rest = unaligned(np.zeros(count, integer)), unaligned(np.zeros(count, real))
    lost = k.to_integers(x, step, q, rest)
    wide = x.astype(np.float64)
    right = np.rint(wide / step)
    assert np.all(np.abs(wide - q * step) <= step * 0.5001)
    assert np.mean(q == right) > 0.99 if count > 200 else True
    differences = wide - q.astype(np.float64) * step
    assert lost == np.max(np.abs(differences), initial=0)
    np.testing.assert_array_equal(rest, differences.astype(real))
    back = np.empty(count, real)
    k.from_integers(q, step, back)
    np.testing.assert_array_equal(back, (q * np.float64(step)).astype(real))


@each_type
def test_in_place(isa, real, integer):
    x = np.random.default_rng(0).standard_normal(1001).astype(real)
    apart, rest = np.empty(1001, integer), np.empty(1001, real)
    k.to_integers(x, 0.01, apart, rest)
    same = x.copy()
    k.to_integers(same, 0.01, same.view(integer))
    np.testing.assert_array_equal(same.view(integer), apart)
    kept = x.copy()
    k.to_integers(kept, 0.01, same.view(integer), kept)
    np.testing.assert_array_equal(kept, rest)
    values = np.empty(1001, real)
    k.from_integers(apart, 0.01, values)
    k.from_integers(same.view(integer), 0.01, same)
    np.testing.assert_array_equal(same, values)


def test_halves_go_to_the_even_neighbour(isa):
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.0])
    q = np.empty(7, np.int64)
    assert k.to_integers(x, 1.0, q) == 0.5
    assert q.tolist() == [0, 2, 2, 0, -2, -2, 3]


def packed(q, wire_in=None):
    wire = np.full(k.integers_nbytes(q.size, q.itemsize), 0xAA, np.uint8)
    took = k.pack_integers(q, wire, wire_in)
    assert np.all(wire[took:] == 0xAA)
    return wire[:took]


@each_type
@pytest.mark.parametrize("count", COUNTS)
def test_messages(isa, count, real, integer):
    addend = arrays(count, integer, 7)["all"]
    for name, q in arrays(count, integer).items():
        wire = packed(unaligned(q))
        out = np.empty(count, integer)
        k.unpack_integers(unaligned(wire), out)
        np.testing.assert_array_equal(out, q, err_msg=name)
        with np.errstate(over="ignore"):
            total = addend + q
        k.unpack_integers(wire, out, addend)
        np.testing.assert_array_equal(out, total, err_msg=name)
        in_place = addend.copy()
        k.unpack_integers(wire, in_place, in_place)
        np.testing.assert_array_equal(in_place, total, err_msg=name)
        np.testing.assert_array_equal(packed(addend, wire), packed(total), err_msg=name)


@each_type
def test_instruction_sets_write_the_same_bytes(real, integer):
    x = (np.random.default_rng(0).standard_normal(3000) * 1000).astype(real)
    seen = set()
    before = k.isa()
    for name in k.available_isas():
        k.use_isa(name)
        q, rest = np.empty(3000, integer), np.empty(3000, real)
        lost = k.to_integers(x, 0.3, q, rest)
        messages = [packed(a).tobytes() for a in arrays(3000, integer).values()]
        seen.add((lost, q.tobytes(), rest.tobytes(), *messages))
    k.use_isa(before)
    assert len(seen) == 1


def test_what_blocks_cost():
    """A byte a block for constants, two planes for small differences, the integers at the most."""
    made = arrays(128 * 8, np.int32)
    sizes = {name: packed(q).size for name, q in made.items()}
    assert sizes["zero"] == 8
    assert sizes["constant"] == 8 + 128 // 8 * 15  # the first one's differences begin at 0
    assert sizes["narrow"] == 8 * (1 + 2 * 16)
    assert sizes["widest planes"] == 8 * (1 + 16 * 16)
    assert sizes["all"] == 8 + 4096 == k.integers_nbytes(1024, 4)
    assert sizes["walk"] == 8 + 7 * 2 * 16 + 512  # the first block's begin at 0, too far away


def test_broken_messages_are_refused(isa):
    q = arrays(300, np.int32)["walk"]
    good = packed(q)
    out = np.full(300, 7, np.int32)
    for length in range(good.size):
        with pytest.raises(ValueError, match="no message of 300 integers"):
            k.unpack_integers(good[:length], out)
    for how in (1, 18, 31, 33, 49, 64, 255):
        wire = good.copy()
        wire[1] = how
        with pytest.raises(ValueError, match="no message of 300 integers"):
            k.unpack_integers(wire, out)
        with pytest.raises(ValueError, match="no message of 300 integers"):
            packed(q, wire)
    assert np.all(out == 7)


def test_wrong_arguments_are_refused():
    x, q = np.ones(4, np.float32), np.ones(4, np.int32)
    with pytest.raises(ValueError, match="16 and 4"):
        k.to_integers(x, 1.0, np.ones(4, np.int64))
    with pytest.raises(TypeError, match="expected int32 or int64"):
        k.to_integers(x, 1.0, np.ones(4, np.uint32))
    with pytest.raises(ValueError, match="expected"):
        k.pack_integers(q, np.empty(16, np.uint8))
    with pytest.raises(TypeError, match="expected int32 or int64"):
        k.pack_integers(np.ones(4, np.int16), np.empty(9, np.uint8))
    with pytest.raises(ValueError, match="0 or more"):
        k.integers_nbytes(-1, 4)


# ---- codecs ----


@pytest.mark.parametrize("integer", [np.int32, np.int64])
def test_the_codec_of_integers(integer):
    for q in arrays(1000, integer).values():
        wire = np.full(INTEGERS.nbytes(1000, q.dtype), 0xAA, np.uint8)
        INTEGERS.encode(q, wire)
        assert INTEGERS.used(wire) <= wire.size
        out, total = np.empty_like(q), np.empty_like(q)
        assert not INTEGERS.decode(wire, out)
        np.testing.assert_array_equal(out, q)
        INTEGERS.decode_add(wire[: INTEGERS.used(wire)], q, total)
        np.testing.assert_array_equal(total, q + q)
        hopped, right = np.zeros_like(wire), np.zeros_like(wire)
        INTEGERS.hop(wire, q, hopped)
        INTEGERS.encode(total, right)
        np.testing.assert_array_equal(hopped, right)


@pytest.mark.parametrize("head", [-1, 10_000, 2**62, -(2**63)])
def test_a_head_that_lies_is_refused(head):
    wire = np.zeros(100, np.uint8)
    wire[:8].view("<i8")[0] = head
    with pytest.raises(ValueError, match="in its message"):
        INTEGERS.decode(wire, np.empty(4, np.int32))
    with pytest.raises(ValueError, match="expected 8 or more"):
        INTEGERS.decode(wire[:5], np.empty(4, np.int32))


def test_names_and_parameters():
    assert by_name("bounded") == BoundedCodec(relative=1e-3)
    for codec in (BoundedCodec(absolute=2.5e-7), BoundedCodec(relative=0.1), BoundedCodec()):
        assert by_name(codec.spec) == codec
    with pytest.raises(ValueError, match="not both"):
        BoundedCodec(absolute=1.0, relative=1.0)
    for bad in (0, -1, np.inf, np.nan):
        with pytest.raises(ValueError, match="expected more than 0"):
            BoundedCodec(absolute=bad)
    with pytest.raises(TypeError, match="no format of its own"):
        BoundedCodec().encode(np.ones(3), np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match="cannot be sent in"):
        by_name("top_k(values=bounded)")


# ---- the bound ----


def summed(parts, codec, *, mean=False):
    """The result of a call and its step, without messages."""
    dtype, ranks = parts[0].dtype, len(parts)
    integer = np.dtype(f"i{dtype.itemsize}")
    step = codec.step(max(map(largest_magnitude, parts)), ranks, dtype, mean=mean)
    if step is None:
        total = sum(parts[1:], parts[0].copy())
    else:
        integers = np.zeros(parts[0].size, integer)
        for part in parts:
            q = np.empty_like(integers)
            k.to_integers(part, step, q)
            integers += q
        total = np.empty_like(parts[0])
        k.from_integers(integers, step, total)
    return total / dtype.type(ranks) if mean else total


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 9),
    exponent=st.integers(-44, 38),
    spread=st.integers(0, 12),
    digits=st.floats(0.3, 7),
    dtype=st.sampled_from([np.float32, np.float64]),
    mean=st.booleans(),
)
def test_the_bound_holds(seed, ranks, exponent, spread, digits, dtype, mean):
    """Whatever the magnitudes; or the bound is refused, and only where it is below rounding."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        parts = [
            (rng.standard_normal(200) * 10.0 ** (exponent - rng.integers(0, spread + 1, 200)))
            .clip(-1e37, 1e37)
            .astype(dtype)
            for _ in range(ranks)
        ]
    largest = max(map(largest_magnitude, parts))
    bound = max(10.0**-digits * largest, 1e-320)
    for codec, wanted in (
        (BoundedCodec(absolute=bound), bound),
        (BoundedCodec(relative=10.0**-digits), 10.0**-digits * largest),
    ):
        try:
            found = summed(parts, codec, mean=mean)
        except ValueError:
            allowed = wanted * ranks if mean else wanted
            assert allowed < 3 * rounding(largest, ranks, np.dtype(dtype))
            assert allowed < exact_rounding(largest, ranks, np.dtype(dtype), mean=mean)
            continue
        right = np.sum([p.astype(np.longdouble) for p in parts], axis=0)
        error = np.max(np.abs(found - (right / ranks if mean else right)))
        assert error <= wanted


def test_steps():
    codec = BoundedCodec(absolute=0.01)
    step = codec.step(5.0, 4, np.dtype(np.float32), mean=False)
    assert 0.99 * 0.005 < step < 0.005
    assert codec.step(5.0, 4, np.dtype(np.float32), mean=True) > 3.9 * step
    assert codec.step(0.0, 4, np.dtype(np.float32), mean=False) == 1
    assert codec.step(np.inf, 4, np.dtype(np.float32), mean=False) is None
    assert codec.step(2e38, 4, np.dtype(np.float32), mean=False) is None
    with pytest.raises(ValueError, match="use a larger bound, or float64"):
        codec.step(1e6, 4, np.dtype(np.float32), mean=False)
    assert codec.step(1e6, 4, np.dtype(np.float64), mean=False) > 0.0049
    # No loss in sums of subnormal numbers: they are made exactly where a bound asks for that.
    tiny = BoundedCodec(relative=0.01)
    assert tiny.step(1e-44, 2, np.dtype(np.float32), mean=False) is None


def test_largest_magnitude():
    assert largest_magnitude(np.array([])) == 0
    assert largest_magnitude(np.array([1.0, -3.0, 2.0], np.float32)) == 3
    for bad in (np.nan, np.inf, -np.inf):
        assert largest_magnitude(np.array([1.0, bad, 2.0])) == np.inf
