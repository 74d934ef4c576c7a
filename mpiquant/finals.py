"""Where the final bytes of a call live: each is received or made once, then sent on and decoded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpiquant.pool import pool
from mpiquant.program import Program, Segment
from mpiquant.typing import Array, Bytes


class InOutput:
    """In the output itself, where nothing is compressed."""

    def __init__(self, whole: Bytes) -> None:
        self._whole = whole

    def of(self, segments: tuple[Segment, ...]) -> Bytes:
        """The bytes of neighbouring segments."""
        return self._whole[segments[0].offset : segments[-1].offset + segments[-1].nbytes]

    def used(self, segments: tuple[Segment, ...]) -> None:
        """Note that these segments were decoded, or that a send of them has ended."""

    def end(self) -> None:
        """The call has ended."""


class InOne(InOutput):
    """In one buffer for the whole array, so that any neighbours can be sent together."""

    def end(self) -> None:
        pool.give(self._whole)


class InPieces(InOutput):
    """In a buffer for each segment, from when it comes to when it has been decoded and sent on."""

    def __init__(self, sends: Mapping[int, int]) -> None:
        self._sends = sends
        self._kept: dict[int, tuple[Bytes, int]] = {}  # by offset: the bytes, and uses to come

    def of(self, segments: tuple[Segment, ...]) -> Bytes:
        (segment,) = segments
        kept = self._kept.get(segment.offset)
        if kept is None:
            uses = 1 + self._sends.get(segment.offset, 0)
            kept = self._kept[segment.offset] = (pool.take(segment.nbytes), uses)
        return kept[0]

    def used(self, segments: tuple[Segment, ...]) -> None:
        (segment,) = segments
        buffer, uses = self._kept.pop(segment.offset)
        if uses > 1:
            self._kept[segment.offset] = (buffer, uses - 1)
        else:
            pool.give(buffer)

    def end(self) -> None:
        assert not self._kept


def place_finals(program: Program, out: Array) -> InOutput:
    """Where the final bytes of a run of the program live."""
    if program.exact:
        return InOutput(out.view(np.uint8))
    if program.final_sends is not None:
        return InPieces(program.final_sends)
    return InOne(pool.take(program.final_nbytes))
