"""What a codec loses of normal data, to be expected before anything is encoded."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from mpiquant.codecs.abc import Codec
from mpiquant.codecs.cast import BFloat16Codec, Float16Codec
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.low_bit import LowBitCodec
from mpiquant.codecs.uniform import UniformCodec

LEAST_SQUARES_ERROR = {1: 0.363, 2: 0.119}
"""Of one encoding by the least-squares codec of so many bits: squared, relative."""


def squared_error(codec: Codec) -> float:
    """Squared relative error of one encoding of N(0, 1) data.

    Parameters
    ----------
    codec : Codec
        Uniform, with a scale for each block of values; of one or two bits; float16, bfloat16 or
        exact.

    Raises
    ------
    ValueError
        For other codecs.

    Notes
    -----
    A uniform quantiser errs by a twelfth of the squared step (a sixth, if it rounds at random), and
    its step is the largest magnitude of the block over the number of positive levels.  The steps of
    half floats follow the power of two below each value.
    """
    if isinstance(codec, IdentityCodec):
        return 0.0
    if isinstance(codec, LowBitCodec):
        return LEAST_SQUARES_ERROR[int(codec.bits)]
    if isinstance(codec, UniformCodec):
        parts = 12 if codec.rounding == "nearest" else 6
        levels: int = 2 ** (codec.bits - 1) - 1
        return squared_peak(codec.block) / levels**2 / parts
    if isinstance(codec, (BFloat16Codec, Float16Codec)):
        step = 2.0**-7 if isinstance(codec, BFloat16Codec) else 2.0**-10
        return step**2 / 12 * _squared_power()
    raise ValueError(f"nothing is known of the error of {codec.spec}")


def shrink(codec: Codec) -> float:
    """By what one encoding of N(0, 1) data multiplies it, but for the noise.

    Least squares keeps 1 - e of the energy, which is also its inner product with what was encoded.
    """
    return 1.0 - squared_error(codec) if isinstance(codec, LowBitCodec) else 1.0


@lru_cache
def squared_peak(count: int) -> float:
    """Mean square of the largest magnitude among so many N(0, 1) values.

    The integral of 2 m P(peak > m) over m.
    """
    step = 0.01
    magnitudes = np.arange(step / 2, 10.0, step)
    below = np.array([_below(m) for m in magnitudes])
    return float(np.sum(2 * magnitudes * (1 - below**count)) * step)


def _squared_power() -> float:
    """Mean square of the largest power of two below the magnitude of an N(0, 1) value."""
    chances = ((e, _below(2.0 ** (e + 1)) - _below(2.0**e)) for e in range(-30, 4))
    return sum(4.0**e * chance for e, chance in chances)


def _below(magnitude: float) -> float:
    """Chance of an N(0, 1) value to have less than a magnitude."""
    return math.erf(magnitude / math.sqrt(2))
