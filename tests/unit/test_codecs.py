"""One contract for every codec, the registry, and options."""

import dataclasses
import itertools

import numpy as np
import pytest

import mpiquant
from mpiquant import codecs
from mpiquant.codecs import Codec, LowBitCodec, UniformCodec, WithoutFormat, by_name
from mpiquant.config import Options, current, reload_environment

WITH_A_FORMAT = [c for c in map(by_name, codecs.names()) if not isinstance(c, WithoutFormat)]
EVERY = [
    *WITH_A_FORMAT,
    UniformCodec(bits=5, rounding="stochastic", seed=2),
    UniformCodec(bits=4, block=48),
    LowBitCodec(bits=2, block=7),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_contract(codec, dtype):
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 100, 511, 513, 3000):
        x = rng.standard_normal(count).astype(dtype)
        before = x.copy()
        wire = np.full(codec.nbytes(count, x.dtype), 0xAA, np.uint8)
        residual, out, total = (np.full(count, np.nan, dtype) for _ in range(3))

        codec.encode(x, wire, stream=3)
        again = np.zeros_like(wire)
        codec.encode(x, again, stream=3)
        np.testing.assert_array_equal(wire, again)
        np.testing.assert_array_equal(x, before)
        assert not codec.decode(wire, out)
        assert np.all(np.isfinite(out))
        if not codec.lossy:
            np.testing.assert_array_equal(out, x)

        codec.decode_add(wire, x, total)
        np.testing.assert_array_equal(total, x + out)

        codec.encode(x, wire, residual=residual, stream=3)
        codec.decode(wire, out)
        np.testing.assert_array_equal(residual, x - out)
        in_place = x.copy()
        codec.encode(in_place, again, residual=in_place, stream=3)
        np.testing.assert_array_equal(in_place, residual)

        hopped, expected = np.zeros_like(wire), np.zeros_like(wire)
        codec.hop(wire, x, hopped, stream=5)
        codec.encode(x + out, expected, stream=5)
        np.testing.assert_array_equal(hopped, expected)

        if count > codec.granule:
            cut = codec.granule
            parts = [np.zeros(codec.nbytes(n, x.dtype), np.uint8) for n in (cut, count - cut)]
            codec.encode(x[:cut], parts[0], stream=5)
            codec.encode(x[cut:], parts[1], stream=5, index=cut)
            codec.encode(x, again, stream=5)
            codec.decode(again, out)
            pieces = np.empty_like(out)
            codec.decode(parts[0], pieces[:cut])
            codec.decode(parts[1], pieces[cut:])
            np.testing.assert_array_equal(pieces, out)


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_equal_codecs_are_interchangeable(codec):
    twin = dataclasses.replace(codec)
    assert codec == twin
    assert hash(codec) == hash(twin)
    assert codec.spec == twin.spec == str(codec)


def test_specs_tell_codecs_apart():
    specs = [codec.spec for codec in EVERY if codec.spec != "q1"]
    assert len(set(specs)) == len(specs)


def test_error_falls_strictly_with_the_width():
    rng = np.random.default_rng(0)
    for values in (
        rng.standard_normal(1 << 17),
        rng.laplace(size=1 << 17),
        rng.standard_t(3, 1 << 17),
    ):
        x = values.astype(np.float32)
        errors = []
        for bits in range(1, 17):
            codec = by_name(f"q{bits}")
            wire, out = np.empty(codec.nbytes(x.size, x.dtype), np.uint8), np.empty_like(x)
            codec.encode(x, wire)
            codec.decode(wire, out)
            errors.append(np.linalg.norm(out - x))
        assert all(later < earlier for earlier, later in itertools.pairwise(errors))


def test_b32_ratio_is_raw_over_wire():
    codec = UniformCodec(bits=4, block=1024)
    assert codec.nbytes(1_000_000, np.dtype("f4")) == 503_908


class Halves(Codec):
    """A third-party codec with the three methods that must be written."""

    spec = "halves"

    def nbytes(self, count, dtype):
        return 2 * count

    def encode(self, x, wire, *, residual=None, stream=0, index=0):
        half = x.astype(np.float16)
        wire.view(np.float16)[...] = half
        if residual is not None:
            residual[...] = x - half

    def decode(self, wire, out):
        out[...] = wire.view(np.float16)
        return not np.all(np.isfinite(out))


def test_third_party_codecs(monkeypatch):
    codecs.register("halves", Halves)
    with pytest.raises(ValueError, match="taken"):
        codecs.register("halves", Halves)
    codec = by_name("halves")
    x = np.linspace(-1, 1, 100, dtype=np.float32)
    wires = [np.empty(200, np.uint8) for _ in range(2)]
    out = np.empty_like(x)
    codec.encode(x, wires[0])
    codec.hop(wires[0], x, wires[1])
    codec.decode(wires[1], out)
    np.testing.assert_allclose(out, 2 * x, atol=2e-3)

    class Point:
        name = "pointed"

        def load(self):
            return Halves

    from mpiquant.codecs import registry

    monkeypatch.setattr(registry, "entry_points", lambda group: [Point()])
    registry._installed.cache_clear()
    assert isinstance(by_name("pointed"), Halves)
    registry._installed.cache_clear()


def test_what_a_codec_may_be_given_as():
    assert codecs.resolve(None, "w", (3,)) == codecs.EXACT
    assert codecs.resolve("q4", "w", (3,)) == UniformCodec(bits=4)
    policy = lambda name, shape: "q2" if len(shape) > 1 else None  # noqa: E731
    assert codecs.resolve(policy, "w", (3, 4)) == LowBitCodec(bits=2)
    assert codecs.resolve(policy, "b", (3,)) == codecs.EXACT
    with pytest.raises(ValueError, match="unknown codec 'q17'"):
        codecs.resolve("q17", "w", ())
    with pytest.raises(TypeError, match="int"):
        codecs.resolve(4, "w", ())
    with pytest.raises(ValueError, match="bits is 2, expected 3 to 16"):
        UniformCodec(bits=2)
    with pytest.raises(ValueError, match="'up'"):
        UniformCodec(bits=4, rounding="up")
    with pytest.raises(ValueError, match="block is 9000"):
        UniformCodec(bits=4, block=9000)


def test_options(monkeypatch):
    assert current() == Options()
    monkeypatch.setenv("MPIQUANT_ALGORITHM", "ring")
    monkeypatch.setenv("MPIQUANT_TIMEOUT", "2.5")
    reload_environment()
    assert (current().algorithm, current().timeout) == ("ring", 2.5)
    with mpiquant.options(algorithm="hd", codec="q4"):
        with mpiquant.options(codec="q8") as inner:
            assert inner.codec == "q8"
            assert (current().algorithm, current().codec) == ("hd", "q8")
        assert current().codec == "q4"
        assert current(codec="q1").codec == "q1"
    assert current().codec is None
    monkeypatch.undo()
    reload_environment()
    with pytest.raises(TypeError), mpiquant.options(codex="q4"):
        pass
    with pytest.raises(ValueError, match="segment is 0"), mpiquant.options(segment=0):
        pass


def test_error_feedback_state():
    feedback = mpiquant.ErrorFeedback()
    feedback.put("w", np.ones(3))
    state = feedback.state_dict()
    state["w"][0] = 5
    assert feedback.residual("w")[0] == 1
    other = mpiquant.ErrorFeedback()
    other.load_state_dict(state)
    state["w"][1] = 7
    np.testing.assert_array_equal(other.residual("w"), [5, 1, 1])
    with pytest.raises(ValueError, match=r"'w' has shape \(3,\), the array has \(4,\)"):
        feedback.take("w", (4,), np.dtype("f8"))
    with pytest.raises(ValueError, match="'w' is float64, the array is float32"):
        feedback.take("w", (3,), np.dtype("f4"))
    feedback.reset()
    assert len(feedback) == 0


def test_b20_error_grows_slowly_with_the_hops():
    from test_program import collective, data

    codec = UniformCodec(bits=8, block=8192)
    for size in (2, 4, 8, 16):
        inputs = data(size, 4096)
        out = collective("allreduce", "ring", inputs, codec)[0][0]
        exact = np.sum(inputs, axis=0, dtype=np.float64)
        error = np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2))
        assert error <= 0.012 * np.sqrt(size / 2)


def test_b03_three_hundred_ranks():
    from test_program import collective

    inputs = [np.ones(2400, np.float32) for _ in range(300)]
    out = collective("allreduce", "ring", inputs, UniformCodec(bits=8, block=4))[0][0]
    np.testing.assert_allclose(out, 300.0, rtol=1e-6)


# ---- aqat ----


def test_aqat_is_no_format():
    codec = by_name("aqat")
    assert codec.adaptive
    for action in (codec.encode, codec.decode):
        with pytest.raises(TypeError, match="no format"):
            action(np.zeros(1, np.uint8), np.zeros(1, np.float32))


def test_levels_of_aqat_and_what_they_cost():
    levels = codecs.AqatCodec(lowest=1, highest=16).levels(np.dtype(np.float32))
    assert levels.bits == (1, 2, 3, 4, 5, 6, 7, 8, 16)
    assert levels.costs == (1.0625, 2.0625, 3.25, *(b + 0.0625 for b in (4, 5, 6, 7, 8, 16)))
    assert codecs.AqatCodec().levels(np.dtype(np.float64)).costs[-1] == 64


def test_few_values_of_aqat_are_sent_exactly():
    codec, dtype = codecs.AqatCodec(highest=8), np.dtype(np.float32)
    assert codec.level(codec.levels(dtype), 8.5, 1, dtype) == 32
    assert codec.nbytes(1, dtype) == 4
    assert codec.level(codec.levels(dtype), 8.5, 1000, dtype) == 8
    assert codec.nbytes(1000, dtype) == 1008


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lowest": 0}, "lowest"),
        ({"highest": 9}, "highest"),
        ({"lowest": 8, "highest": 4}, "above"),
        ({"margin": 0.6}, "margin"),
    ],
)
def test_bad_options_of_aqat(change, word):
    with pytest.raises(ValueError, match=word):
        codecs.AqatCodec(**change)
