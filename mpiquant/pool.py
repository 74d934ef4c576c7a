"""Buffers for bytes on the wire, used again by the next message and the next call.

Memory that comes fresh from the system costs a page fault for each 4 KiB at its first use, which
takes about as long as the kernels take for the same bytes.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort

import numpy as np

from mpiquant.typing import Bytes

GRAIN = 4096
"""Sizes are rounded up to multiples of this."""

WASTE = 8
"""A free buffer serves requests down to this part of its size, and makes room for one that is up to
so many times as large."""

KEEP_S = 10.0
"""What was not used for so long is returned to the system, at the next use of another buffer."""


class Pool:
    """Free buffers, by size.  Not thread-safe: its users hold the lock of the calls."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, float, Bytes]] = []  # size, serial, time; sorted
        self._serial = 0
        self._swept = time.monotonic()

    @property
    def nbytes(self) -> int:
        """Bytes that are free."""
        return sum(entry[0] for entry in self._free)

    def take(self, nbytes: int) -> Bytes:
        """An uninitialized buffer of just so many bytes."""
        place = bisect_left(self._free, (nbytes,))
        if place < len(self._free) and self._free[place][0] <= max(WASTE * nbytes, GRAIN):
            return self._free.pop(place)[-1][:nbytes]
        if place and self._free[place - 1][0] * WASTE >= nbytes:
            del self._free[place - 1]
        return np.empty(-(-max(nbytes, 1) // GRAIN) * GRAIN, np.uint8)[:nbytes]

    def give(self, buffer: Bytes) -> None:
        """Take back what `take` returned, once nobody reads or writes it any more."""
        whole = buffer.base
        assert isinstance(whole, np.ndarray)
        now = time.monotonic()
        self._serial -= 1  # of one size, the last one given is taken first: it may be in a cache
        insort(self._free, (whole.nbytes, self._serial, now, whole))
        if now - self._swept > KEEP_S:
            self._swept = now
            self._free = [entry for entry in self._free if now - entry[2] < KEEP_S]


pool = Pool()
"""That of this process."""
