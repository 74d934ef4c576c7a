"""What an adaptive call reckons with: its deadline, the bandwidth, and what others expect of it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from mpiquant.rate._numbers import Floats, floats

Number = TypeVar("Number", float, Floats)

UNKNOWN_BITS = 8
"""Bits of a message while nothing is known of the links or the time, if the levels have as many."""

HEADROOM_BITS = 0.25
"""How many more bits than until now the others expect of a call."""


def with_reserve(deadline: ArrayLike, now: ArrayLike, margin: float) -> Floats:
    """A deadline that keeps a part of the time up to it in reserve."""
    return floats(deadline) - margin * np.maximum(floats(deadline) - floats(now), 0.0)


def expected_bits(chosen_bits: Number, chosen_values: Number | float) -> Number:
    """Most bits that others expect of each value of a call, which goes on about as until now.

    Parameters
    ----------
    chosen_bits : float or array
        Of all values that have theirs, together.
    chosen_values : float or array
        How many those are.
    """
    return chosen_bits / chosen_values + HEADROOM_BITS


def remembered(slow: ArrayLike, lowest: ArrayLike) -> Floats:
    """Bandwidth of the slowest link that calls know of, behind one more of them.

    Parameters
    ----------
    slow : array_like
        As known before the call; NaN if it was not.
    lowest : array_like
        As the call found it; NaN if it did not.
    """
    slow, lowest = floats(slow), floats(lowest)
    joined = np.where(np.isnan(slow), lowest, (slow + 3 * lowest) / 4)
    return np.where(np.isnan(lowest), slow, joined)
