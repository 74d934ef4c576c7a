"""ROW, the ratio of overlap time to waiting time: how well communication is hidden.

Source: the metric of the AQGB and AQAT papers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from mpiquant.rate._numbers import Floats, floats


def overlap_s(communication_s: ArrayLike, wait_s: ArrayLike) -> Floats:
    """Communication time that computation hid: what the trainer did not wait for."""
    return np.maximum(floats(communication_s) - floats(wait_s), 0.0)


def row(overlap: ArrayLike, wait_s: ArrayLike) -> Floats:
    """Overlap time over waiting time; infinite where nothing waits, NaN where nothing was sent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(floats(overlap), floats(wait_s))


def hidden(overlap: ArrayLike, wait_s: ArrayLike) -> Floats:
    """Share of the communication that computation hid, 0 ... 1; 1 if there was none."""
    total = floats(overlap) + floats(wait_s)
    return np.where(total > 0, floats(overlap) / np.where(total > 0, total, 1.0), 1.0)


def split_waits(ready: Floats, need: Floats, wait_s: Floats) -> tuple[Floats, Floats]:
    """Waiting for the wire, and for the last rank to be ready.

    Parameters
    ----------
    ready, need, wait_s : (ranks, steps) array
        On one clock.
    """
    last = ready.max(axis=0)
    peer_s = np.clip(last - need, 0.0, wait_s)
    return wait_s - peer_s, peer_s
