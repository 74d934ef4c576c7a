"""Bandwidth and overlap, and how far a result may be from the exact one; pure."""

from __future__ import annotations

import math

import numpy as np

from mpiquant.codecs import (
    BFloat16Codec,
    Codec,
    Float16Codec,
    LowBitCodec,
    Sparsifier,
    TernaryCodec,
    UniformCodec,
)
from mpiquant.codecs.expected import LEAST_SQUARES_ERROR
from mpiquant.typing import Array

FEW = 256
"""Below this many values, sums of normal data are too different to judge an error of the whole."""


def bus_factor(kind: str, ranks: int) -> float:
    """busbw / algbw of nccl-tests: bytes over a rank's link for each byte of the array."""
    return (2 if kind == "allreduce" else 1) * (ranks - 1) / ranks


def overlap_percent(alone: Array, compute: Array, together: Array) -> Array:
    """How much of the communication the computation hides, as osu_iallreduce defines it."""
    return np.maximum(0.0, 100 * (1 - (together - compute) / alone))


def tolerance(
    codec: Codec | None, terms: int, dtype: np.dtype, magnitudes: Array, peaks: Array
) -> Array:
    """Largest possible error of each value of a sum (or other reduction).

    Parameters
    ----------
    codec : Codec or None
        None if nothing was compressed.
    terms : int
        Summands.
    dtype : numpy.dtype
        Of the result.
    magnitudes : array
        Sums of the summands' magnitudes (0 if the reduction cannot round).
    peaks : array
        Largest magnitude of any summand in the block of a value.

    Notes
    -----
    Infinite for codecs that are not of this package.
    """
    info = np.finfo(dtype)
    rounding = 2 * terms * float(info.eps) * magnitudes + float(info.smallest_subnormal)
    if codec is None or not codec.lossy:
        return rounding
    if isinstance(codec, (UniformCodec, TernaryCodec)):
        # Nearest rounding errs by half a step of the block's scale, random rounding by a step.
        levels = 2 ** (codec.bits - 1) - 1
        steps = 0.5 if getattr(codec, "rounding", "stochastic") == "nearest" else 1.0
        growth = terms * (terms + 1) / 2  # partial sums of 1 ... terms summands are encoded
        return peaks * (steps * growth / levels + 2 * terms**2 * float(info.eps)) + rounding
    if isinstance(codec, (Float16Codec, BFloat16Codec)):
        half = isinstance(codec, Float16Codec)
        unit = (2.0**-11 if half else 2.0**-8) + 2.0**-24
        return terms * (unit * (1 + unit) ** terms * magnitudes + 2.0**-25 * half) + rounding
    if isinstance(codec, LowBitCodec):
        return peaks * _least_squares_reach(terms) + rounding
    return np.full_like(magnitudes, np.inf)


def _least_squares_reach(terms: int) -> float:
    """Error of a sum of magnitudes up to 1: encoding turns no magnitude A into more than 2.5 A."""
    partial = error = 0.0
    for _ in range(terms):
        partial = 2.5 * partial + 1
        error += 1.5 * partial
    return error


def plausible(
    codec: Codec | None, terms: int, count: int, squared: float, size: float, product: float
) -> bool:
    """Whether a sum of normal data is as near to the exact one as the codec should bring it.

    The fewer the bits, the less the bounds of single values tell.  squared and size are the
    squared 2-norms of the error and of the exact sum, product is their inner product.
    """
    if codec is None or isinstance(codec, (Float16Codec, BFloat16Codec)):
        return True
    if not np.isfinite(squared) or count < FEW or not size:
        return bool(np.isfinite(squared))
    error, noise = (squared / size) ** 0.5, count**-0.5
    if isinstance(codec, TernaryCodec):  # unbiased, but perhaps with an error of many times 1
        return bool(abs(product / size) <= 8 * error * noise)
    if isinstance(codec, Sparsifier):  # without feedback: what was not sent, and no more
        return bool(error <= 1 + 8 * noise)
    expected = expected_error(codec, terms)
    limit = (1 + expected) / 2 if expected <= 1 else 1.25 * expected
    return bool(error <= limit + 8 * noise)


def expected_error(codec: Codec, terms: int) -> float:
    """About the largest relative error of a sum that is encoded at each of its terms.

    Encoding by `LowBitCodec` keeps the part 1 - e of the energy V of a partial sum, which is also
    its inner product with what the sum should be: V <- (1 - e) V + 1 for each term.  That by
    `UniformCodec` adds noise of a twelfth of the squared step (a sixth, if it is random).
    """
    if isinstance(codec, LowBitCodec):
        kept = 1 - LEAST_SQUARES_ERROR[int(codec.bits)]
        energy = sum(kept**k for k in range(terms))
        return float((1 - kept * energy / terms) ** 0.5)
    if isinstance(codec, UniformCodec):
        largest = (2 * math.log(2 * codec.block)) ** 0.5  # of the normal values of a block
        step = largest / (2 ** (codec.bits - 1) - 1)
        noise = step**2 / (12 if codec.rounding == "nearest" else 6)
        return float((noise * (terms + 1) / 2) ** 0.5)
    return 1.0
