"""One hop of a ring whose two messages have different formats."""

from __future__ import annotations

import numpy as np

from mpiquant import _kernels
from mpiquant.codecs.abc import Codec
from mpiquant.codecs.uniform import UniformCodec
from mpiquant.typing import Array, Bytes


def hop_between(
    codec_in: Codec,
    wire_in: Bytes,
    x: Array,
    codec: Codec,
    wire: Bytes,
    *,
    residual: Array | None = None,
    stream: int = 0,
    index: int = 0,
) -> None:
    """wire = encode(x + decode(wire_in)); fused where the kernels can."""
    if codec_in == codec:
        codec.hop(wire_in, x, wire, residual=residual, stream=stream, index=index)
    elif _fuses(codec_in, codec):
        assert isinstance(codec_in, UniformCodec)
        assert isinstance(codec, UniformCodec)
        _kernels.hop(
            *(wire_in, codec_in.bits, x, wire, _kernels.NEAREST, codec.bits, codec.block),
            residual=residual,
        )
    else:
        total = np.empty_like(x)
        codec_in.decode_add(wire_in, x, total)
        codec.encode(total, wire, residual=residual, stream=stream, index=index)


def _fuses(codec_in: Codec, codec: Codec) -> bool:
    return (
        isinstance(codec_in, UniformCodec)
        and isinstance(codec, UniformCodec)
        and codec_in.block == codec.block
        and codec.rounding == "nearest"
    )
