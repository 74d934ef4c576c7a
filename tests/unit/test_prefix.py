"""Messages cut short: the middles of their bins."""

import numpy as np
import oracle
import pytest

from mpiquant import _kernels as k
from mpiquant.codecs import UniformCodec
from mpiquant.codecs.prefix import FEWEST, WIDE_MOST, decode_prefix, expand, prefix_nbytes

CUTS = [(bits, sent) for bits in range(4, 16) for sent in range(FEWEST, bits)]
CUTS += [(16, sent) for sent in range(FEWEST, WIDE_MOST + 1)]
DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "t3": lambda rng, n: rng.standard_t(3, n),
}


def cut(codec, x, sent):
    wire = np.empty(codec.nbytes(x.size, x.dtype), np.uint8)
    codec.encode(x, wire)
    return wire, wire[: prefix_nbytes(codec, x.size, x.dtype, sent)]


def middles(wire, n, bits, sent, block, dtype):
    """By the book: whole integers, cut to bins, and the middle of each."""
    blocks = -(-n // block)
    scales = np.frombuffer(wire[: blocks * dtype.itemsize].tobytes(), dtype)
    scale = np.repeat(scales, block)[:n]
    codes = np.rint(oracle.decode(wire, n, k.NEAREST, bits, block, dtype) / scale).astype(int)
    width = 2 ** (bits - sent)
    bins = np.abs(codes) // width
    middle = width / 2 if bits == 16 else (width - 1) / 2
    return np.sign(codes) * np.where(bins, bins * width + middle, 0) * scale


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("bits", "sent"), CUTS)
def test_a_cut_message_decodes_to_the_middles_of_its_bins(bits, sent, dtype):
    dtype = np.dtype(dtype)
    for n, block in ((1, 512), (65, 64), (1500, 512), (700, 100)):
        codec = UniformCodec(bits=bits, block=block)
        x = np.random.default_rng(n).standard_normal(n).astype(dtype)
        wire, prefix = cut(codec, x, sent)
        out = np.full(n, np.nan, dtype)
        assert not decode_prefix(codec, prefix, out, sent)
        expected = middles(wire, n, bits, sent, block, dtype)
        np.testing.assert_allclose(out, expected, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("bits", "sent"), [c for c in CUTS if c[0] <= 8 or c[0] == 16])
def test_its_error_is_near_that_of_a_message_of_so_many_bits(bits, sent, name):
    x = DISTRIBUTIONS[name](np.random.default_rng(5), 1 << 16).astype(np.float32)
    _, prefix = cut(UniformCodec(bits=bits), x, sent)
    out, direct = np.empty_like(x), np.empty_like(x)
    decode_prefix(UniformCodec(bits=bits), prefix, out, sent)
    codec = UniformCodec(bits=sent, block=512)
    codec.decode(cut(codec, x, sent)[0], direct)
    limit = 1.4 if bits <= 8 else 1.5
    assert np.linalg.norm(x - out) <= limit * np.linalg.norm(x - direct)


@pytest.mark.parametrize("bits", [3, 8, 16])
def test_a_whole_message_stays_as_it_is(bits):
    x = np.ones(100, np.float32)
    codec = UniformCodec(bits=bits)
    wire, _ = cut(codec, x, bits)
    same, whole = expand(codec, wire, 100, x.dtype, bits)
    assert same is codec
    assert whole is wire


def test_zeros_stay_zero_and_what_is_not_finite_is_seen():
    x = np.zeros(1024, np.float32)
    x[600] = np.inf
    codec = UniformCodec(bits=8)
    _, prefix = cut(codec, x, 4)
    out = np.ones_like(x)
    assert decode_prefix(codec, prefix, out, 4)
    assert np.all(out[:512] == 0)
    assert np.isnan(out[600])


@pytest.mark.parametrize(
    ("bits", "sent", "nbytes", "word"),
    [
        (8, 2, 0, "2 planes"),
        (8, 9, 0, "9 planes"),
        (8, 4, -1, "bytes"),
        (8, 4, 1, "bytes"),
        (16, 13, 0, "at most 12"),
    ],
)
def test_bad_prefixes(bits, sent, nbytes, word):
    codec = UniformCodec(bits=bits)
    right = prefix_nbytes(codec, 100, np.dtype(np.float32), sent)
    prefix = np.zeros(right + nbytes, np.uint8)
    with pytest.raises(ValueError, match=word):
        expand(codec, prefix, 100, np.dtype(np.float32), sent)
