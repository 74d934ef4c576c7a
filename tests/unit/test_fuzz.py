"""A short run of the fuzz test on the installed build, and whether it would find anything."""

import numpy as np
import pytest
from fuzz import cases

from mpiquant import _kernels
from mpiquant.codecs import Codec, IdentityCodec, UniformCodec


def test_mutated_messages():
    numbers = range(len(cases.COMBINATIONS) * 8 // 7 + 1)
    assert sum(cases.run(1, number, mutations=4) for number in numbers) > 300


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("codec", cases.CODECS, ids=str)
def test_a_wire_of_another_length_is_refused(codec, dtype):
    x, memory = np.ones(20, dtype), cases.Memory(np.random.default_rng(0))
    right = codec.nbytes(x.size, x.dtype)
    for nbytes in {0, 1, 2, x.itemsize, right - x.itemsize, right - 1, right + 1, 2 * right}:
        cases.Trial(codec, np.zeros(nbytes, np.uint8), x, memory).refused()


class TakesAnyLength(UniformCodec):
    def decode(self, wire, out):
        right = self.nbytes(out.size, out.dtype)
        return super().decode(np.resize(wire, right), out)


class RepeatsOneValue(IdentityCodec):
    """As NumPy does by itself."""

    def decode(self, wire, out):
        try:
            out[...] = wire.view(out.dtype)
        except TypeError as error:
            raise ValueError from error
        return False


class WritesBehind(UniformCodec):
    def decode(self, wire, out):
        flag = super().decode(wire, out)
        if out.base is not None and out.base[-1] == cases.GUARD:
            out.base[-1] = 0
        return flag


class LeavesOneOut(UniformCodec):
    def decode_add(self, wire, addend, out):
        last = out[-1]
        flag = super().decode_add(wire, addend, out)
        out[-1] = last
        return flag


class Varies(UniformCodec):
    def decode(self, wire, out):
        flag = super().decode(wire, out)
        out[-1] += _kernels.isa() != _kernels.available_isas()[0]
        return flag


class HopsWrongly(UniformCodec):
    def hop(self, wire_in, x, wire, *, residual=None, stream=0, index=0):
        super().hop(wire_in, x, wire, residual=residual, stream=stream + 1, index=index)


class Breaks(UniformCodec):
    def decode(self, wire, out):
        if np.any(wire):
            raise KeyError("not a ValueError")
        return super().decode(wire, out)


@pytest.mark.parametrize(
    ("codec", "error", "message"),
    [
        (TakesAnyLength(), cases.Finding, "taken, though of a wrong length"),
        (RepeatsOneValue(), cases.Finding, "taken, though of a wrong length"),
        (WritesBehind(), cases.Finding, "wrote outside of the output"),
        (LeavesOneOut(), cases.Finding, "decode_add is not what its parts give"),
        (HopsWrongly(rounding="stochastic"), cases.Finding, "hop is not what its parts give"),
        (Varies(), cases.Finding, "decode differs on"),
        (Breaks(), KeyError, "not a ValueError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Codec) else "",
)
def test_faults_of_a_codec_are_found(codec, error, message):
    if isinstance(codec, Varies) and len(_kernels.available_isas()) == 1:
        pytest.skip("one instruction set only")
    before = _kernels.isa()
    with pytest.raises(error, match=message):
        cases.check_codec(codec, np.float32, np.random.default_rng(0), mutations=300)
    assert _kernels.isa() == before


@pytest.mark.parametrize("words", ["header", "control"])
def test_errors_of_another_type_are_found(words, monkeypatch):
    def broken(data):
        raise RecursionError

    monkeypatch.setattr(cases._agreement, "read_header", broken)
    monkeypatch.setattr(cases._control, "unpack", broken)
    with pytest.raises(RecursionError):
        getattr(cases, f"check_{words}")(np.random.default_rng(0))
