"""The kernels against the NumPy oracle, bit for bit, on every instruction set."""

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiquant import _kernels as k

FORMATS = (
    [(k.NEAREST, b) for b in range(2, 17)]
    + [(k.STOCHASTIC, b) for b in range(2, 17)]
    + [(k.LEVELS, 1), (k.LEVELS, 2), (k.TERNARY, 2)]
)
COUNTS = [0, 1, 7, 8, 63, 64, 65, 127, 500, 512, 513, 1024, 1500, 5000]
GUARD = 64


@pytest.fixture(params=k.available_isas(), autouse=True)
def isa(request):
    before = k.isa()
    k.use_isa(request.param)
    yield request.param
    k.use_isa(before)


def guarded(nbytes, start=1):
    """A buffer of bytes at an unaligned start, with 0xAA on both sides."""
    whole = np.full(nbytes + 2 * GUARD + start, 0xAA, np.uint8)
    return whole, whole[GUARD + start : GUARD + start + nbytes]


def check_guards(whole, nbytes, start=1):
    assert np.all(whole[: GUARD + start] == 0xAA)
    assert np.all(whole[GUARD + start + nbytes :] == 0xAA)


def sample(n, dtype, seed=0):
    rng = np.random.default_rng([seed, n])
    return rng.standard_normal(n).astype(dtype)


def encode(x, kind, bits, block, key=0, index=0, residual=None):
    nbytes = k.segment_nbytes(len(x), kind, bits, block, x.itemsize)
    whole, wire = guarded(nbytes)
    flag = k.encode(x, wire, kind, bits, block, key, index, residual)
    check_guards(whole, nbytes)
    return wire, flag


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("kind", "bits"), FORMATS)
def test_encode_decode_and_hop_equal_the_oracle(kind, bits, dtype):
    for n in COUNTS:
        for block in (512, 64, 100, 7) if n < 2000 else (512,):
            x = sample(n, dtype)
            wire, flag = encode(x, kind, bits, block, key=12345, index=128)
            expected, scales, codes = oracle.encode(x, kind, bits, block, 12345, 128)
            np.testing.assert_array_equal(wire, expected)
            assert not flag

            values = oracle.decode(expected, n, kind, bits, block, dtype)
            np.testing.assert_array_equal(
                values, codes.astype(dtype) * np.repeat(scales, block)[:n]
            )
            out = np.full(n, np.nan, dtype)
            k.decode(wire, out, kind, bits, block)
            np.testing.assert_array_equal(out, values)

            addend = sample(n, dtype, seed=1)
            k.decode(wire, out, kind, bits, block, addend)
            np.testing.assert_array_equal(out, addend + values)

            sums = addend + values
            rewired, _ = encode(sums, kind, bits, block, key=99, index=64)
            rest, rest_hop = sums.copy(), np.empty_like(sums)
            encode(rest, kind, bits, block, key=99, index=64, residual=rest)
            whole, hopped = guarded(len(wire))
            k.hop(wire, bits, addend, hopped, kind, bits, block, 99, 64, rest_hop)
            check_guards(whole, len(wire))
            np.testing.assert_array_equal(hopped, rewired)
            decoded = oracle.decode(rewired, n, kind, bits, block, dtype)
            np.testing.assert_array_equal(rest, sums - decoded)
            np.testing.assert_array_equal(rest_hop, rest)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hop_between_two_widths(dtype):
    x, n = sample(1000, dtype), 1000
    wire, _ = encode(x, k.NEAREST, 8, 512)
    expected = oracle.encode(
        x + oracle.decode(wire, n, k.NEAREST, 8, 512, dtype), k.NEAREST, 3, 512
    )[0]
    out = np.empty_like(expected)
    k.hop(wire, 8, x, out, k.NEAREST, 3, 512)
    np.testing.assert_array_equal(out, expected)


SPECIAL = {
    "zeros": lambda n, t: np.zeros(n, t),
    "constant": lambda n, t: np.full(n, 0.1, t),
    "negative zeros": lambda n, t: np.full(n, -0.0, t),
    "tiny": lambda n, t: (sample(n, t) * np.finfo(t).tiny).astype(t),
    "subnormal": lambda n, t: (np.arange(n) % 5 - 2).astype(t) * np.finfo(t).smallest_subnormal,
    "huge": lambda n, t: np.sign(sample(n, t)) * np.finfo(t).max * (np.arange(n) % 3 / t(2)),
    "one large": lambda n, t: np.where(np.arange(n) == 0, t(1e30), t(1)),
    "one NaN": lambda n, t: np.where(np.arange(n) == n // 2, t(np.nan), sample(n, t)),
    "infinities": lambda n, t: np.where(np.arange(n) % 600 == 3, t(-np.inf), sample(n, t)),
}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("kind", "bits"), FORMATS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_special_values_equal_the_oracle(kind, bits, dtype, name):
    for block in (512, 100):
        x = SPECIAL[name](700, dtype)
        wire, flag = encode(x, kind, bits, block, key=7)
        np.testing.assert_array_equal(wire, oracle.encode(x, kind, bits, block, 7)[0])
        assert flag == (not np.all(np.isfinite(x)))
        out = np.empty_like(x)
        assert k.decode(wire, out, kind, bits, block) == flag
        for start in range(0, 700, block):
            part, back = x[start : start + block], out[start : start + block]
            if np.all(np.isfinite(part)):
                assert np.all(np.abs(back) / 3.0001 <= np.max(np.abs(part)))
            else:
                assert np.all(np.isnan(back))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 400),
    block=st.integers(1, 300),
    kind_bits=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**32),
    offset=st.integers(0, 7),
)
def test_any_length_block_and_alignment(n, block, kind_bits, seed, offset):
    kind, bits = kind_bits
    for dtype in (np.float32, np.float64):
        raw = np.zeros((n + 2) * np.dtype(dtype).itemsize, np.uint8)
        x = raw[offset : offset + n * np.dtype(dtype).itemsize].view(dtype)
        x[:] = sample(n, dtype, seed)
        wire, _ = encode(x, kind, bits, block, key=seed)
        np.testing.assert_array_equal(wire, oracle.encode(x, kind, bits, block, seed)[0])
        out = np.empty(n, dtype)
        k.decode(wire, out, kind, bits, block)
        np.testing.assert_array_equal(out, oracle.decode(wire, n, kind, bits, block, dtype))


def test_b34_packed_length_pad_bits_and_round_trip():
    """Lengths, zero pad bits, guards and exact return of every code, for 1 to 8 bits."""
    rng = np.random.default_rng(0)
    for n in range(71):
        for bits in range(1, 9):
            kind = k.LEVELS if bits == 1 else k.NEAREST
            limit = max(1, 2 ** (bits - 1) - 1)
            for codes in (rng.integers(-limit, limit + 1, n), np.full(n, limit)):
                x = codes.astype(np.float32)
                if n:
                    x[0] = limit  # fixes the scale at 1
                if bits == 1:
                    x = np.where(x < 0, np.float32(-1), np.float32(1))
                wire, _ = encode(x, kind, bits, 512)
                assert len(wire) == 4 * (n > 0) + bits * -(-n // 8)
                planes = wire[4 * (n > 0) :].reshape(bits, -1)
                assert not np.unpackbits(planes, axis=1, bitorder="little")[:, n:].any()
                out = np.empty(n, np.float32)
                k.decode(wire, out, kind, bits, 512)
                np.testing.assert_array_equal(out, x)
    kinds = [k.LEVELS] + 7 * [k.NEAREST]
    nbytes = [k.segment_nbytes(65, kind, 1 + i, 512, 4) - 4 for i, kind in enumerate(kinds)]
    assert nbytes == [9, 18, 27, 36, 45, 54, 63, 72]


def test_b34_truncated_input_is_refused():
    x = sample(100, np.float32)
    wire, _ = encode(x, k.NEAREST, 4, 64)
    with pytest.raises(ValueError, match="wire has 59 bytes, expected 60"):
        k.decode(wire[:-1], x.copy(), k.NEAREST, 4, 64)


def test_bad_arguments_are_refused():
    x, wire = np.zeros(10, np.float32), np.zeros(14, np.uint8)
    with pytest.raises(TypeError, match="float32 or float64"):
        k.encode(np.zeros(10, np.int32), wire, k.NEAREST, 4, 512)
    with pytest.raises(ValueError, match="bits is 17, expected 2 to 16"):
        k.encode(x, wire, k.NEAREST, 17, 512)
    with pytest.raises(ValueError, match="bits is 3, expected 1 to 2"):
        k.encode(x, wire, k.LEVELS, 3, 512)
    with pytest.raises(ValueError, match="block is 0, expected 1 to 8192"):
        k.encode(x, wire, k.NEAREST, 4, 0)
    with pytest.raises(ValueError, match="index is 5"):
        k.encode(x, wire, k.STOCHASTIC, 4, 512, 0, 5)
    with pytest.raises(ValueError, match="residual has 20 bytes, expected 40"):
        k.encode(x, wire, k.NEAREST, 4, 512, 0, 0, np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="unknown instruction set"):
        k.use_isa("mmx")


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bfloat", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_casts(dtype, bfloat):
    words = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    if bfloat:
        exact = (words.astype(np.uint32) << 16).view(np.float32)
    else:
        exact = words.view(np.float16).astype(np.float32)
    out = np.empty(65536, dtype)
    assert k.cast_decode(words, out, bfloat)
    np.testing.assert_array_equal(out, exact.astype(dtype))

    finite = np.isfinite(exact)
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            exact[finite],
            np.nextafter(exact[finite], np.float32(np.inf)),
            ((exact[finite][:-1].astype(np.float64) + exact[finite][1:]) / 2).astype(np.float32),
            rng.standard_normal(1001).astype(np.float32),
            np.float32([np.inf, -np.inf, 0.0, -0.0, 65519.9, 65520.0, 1e-8, 3e38]),
        ]
    ).astype(dtype)
    got, rest = np.empty(len(x), np.uint16), np.empty_like(x)
    k.cast_encode(x, got, bfloat, rest)
    if bfloat:
        u = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        expected = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):
            expected = x.astype(np.float32).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(got, expected)
    back = np.empty_like(x)
    k.cast_decode(got, back, bfloat)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(rest, x - back)
    addend = np.ones_like(x)
    total = np.empty_like(x)
    k.cast_decode(got, total, bfloat, addend)
    np.testing.assert_array_equal(total, addend + back)
    nan = np.array([np.nan], dtype)
    one = np.empty(1, np.uint16)
    k.cast_encode(nan, one, bfloat)
    assert k.cast_decode(one, nan, bfloat)
    assert np.isnan(nan[0])


def test_stochastic_rounding_is_unbiased_and_its_draws_are_uniform():
    n = 1 << 18
    draws = np.concatenate([oracle.draws(5, i << 12, 1 << 12) for i in range(n >> 12)])
    counts = np.bincount(draws >> 9, minlength=256)
    chi2 = float(np.sum((counts - n / 256) ** 2) / (n / 256))
    assert 255 - 5 * 22.6 < chi2 < 255 + 5 * 22.6  # mean 255, standard deviation 22.6
    lagged = np.corrcoef(draws[:-1], draws[1:])[0, 1]
    assert abs(lagged) < 5 / np.sqrt(n)
    x = np.full(n, 0.3, np.float32)
    x[::512] = 1.0
    wire, _ = encode(x, k.STOCHASTIC, 3, 512, key=5)
    out = np.empty_like(x)
    k.decode(wire, out, k.STOCHASTIC, 3, 512)
    assert abs(np.mean(out - x)) < 5 * np.std(out - x) / np.sqrt(n)


@pytest.mark.parametrize("kind", [k.NEAREST, k.STOCHASTIC])
def test_scaling_by_powers_of_two_is_exact(kind):
    x = sample(1000, np.float32)
    base, _ = encode(x, kind, 6, 512, key=3)
    for power in (-90, -7, 1, 60):
        scaled, _ = encode(np.ldexp(x, power).astype(np.float32), kind, 6, 512, key=3)
        np.testing.assert_array_equal(scaled[8:], base[8:])
        np.testing.assert_array_equal(
            scaled[:8].view(np.float32), np.ldexp(base[:8].view(np.float32), power)
        )


# ---- mix ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("columns", "rows"), [(1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4), (4, 5), (7, 8)]
)
def test_mix_is_a_product_in_doubles(dtype, columns, rows):
    rng = np.random.default_rng(columns)
    for n in (0, 1, 7, 8, 100, 1003):
        matrix = rng.standard_normal((rows, columns)) * 1e3
        sources = list(rng.standard_normal((columns, n)).astype(dtype))
        expected = np.zeros((rows, n))
        for q in range(columns):  # in the order of the kernel
            expected += matrix[:, q : q + 1] * sources[q].astype(np.float64)
        extra = [np.full(n, np.nan, dtype) for _ in range(rows)]
        k.mix(matrix, sources, extra)
        np.testing.assert_array_equal(np.array(extra), expected.astype(dtype))
        in_place = [*sources, np.empty(n, dtype)][:rows]
        k.mix(matrix, sources, in_place)
        np.testing.assert_array_equal(in_place, extra)


def test_mix_checks_its_arguments():
    x, matrix = np.ones(4, np.float32), np.ones((1, 2))
    with pytest.raises(ValueError, match="2 blocks cannot be mixed to 4"):
        k.mix(np.ones((4, 2)), [x, x], [x] * 4)
    with pytest.raises(ValueError, match="not one of 1 x 2"):
        k.mix(np.ones((2, 2)), [x, x], [x])
    with pytest.raises(ValueError, match="expected 16"):
        k.mix(matrix, [x, x[:3]], [x])
    with pytest.raises(TypeError, match="format"):
        k.mix(matrix, [x, x.astype(np.float64)], [x])


# ---- add ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_add_is_numpys(dtype):
    rng = np.random.default_rng(0)
    for n in (0, 1, 7, 100, 1003):
        x, y = rng.standard_normal((2, n)).astype(dtype)
        if n:
            x[0] = y[0] = np.finfo(dtype).max
            x[-1] = np.nan
        with np.errstate(over="ignore"):
            expected = x + y
        k.add(np.concatenate([[0], y.view(np.uint8)]).astype(np.uint8)[1:], x)  # at any address
        np.testing.assert_array_equal(x, expected)
    with pytest.raises(ValueError, match="expected 8"):
        k.add(np.zeros(9, np.uint8), np.ones(8 // np.dtype(dtype).itemsize, dtype))
