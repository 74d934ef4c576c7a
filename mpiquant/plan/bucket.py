"""Which gradients are sent together.

A backward pass yields the last layer's gradient first, and the next forward pass needs the first
layer's sum first.  So buckets are filled from the last parameter to the first one.  The first
bucket is small, that the wire has something to do early; and so is the last one, which is needed as
soon as it is ready, with nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpiquant.codecs import Codec

OPEN_CALLS = 8
"""Calls of one communicator whose messages are under way at once; later ones wait their turn.  So
no rank is further ahead of another one than twice as many."""

SMALLEST_BUCKET = 1 << 20
"""Bytes below which a bucket of its own costs more than it hides."""


@dataclass(frozen=True)
class Parameter:
    """What is known of a gradient before it exists."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    codec: Codec

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def bucket_limits(total: int, asked_for: int | None = None) -> tuple[int, int]:
    """Bytes of a bucket, and of the first and the last one.

    Parameters
    ----------
    total : int
        Bytes of all gradients.
    asked_for : int, optional
        Bytes of a bucket; by default such that about all buckets can be under way at once: there
        may be one more, of what did not fit exactly.
    """
    limit = asked_for or max(-(-total // (OPEN_CALLS - 2)), SMALLEST_BUCKET)
    return limit, min(limit, SMALLEST_BUCKET)


def plan_buckets(parameters: Sequence[Parameter], limit: int, ends: int) -> list[list[Parameter]]:
    """Parameters of each bucket, in the order in which the buckets become full.

    Parameters
    ----------
    parameters : sequence of Parameter
        In the order of the forward pass.
    limit : int
        Bytes of a bucket, unless a single parameter has more.
    ends : int
        Bytes of the first and of the last bucket, likewise.

    Notes
    -----
    Parameters of different dtypes or codecs never share a bucket; all of an undivided codec do.
    """
    backward = list(reversed(parameters))
    place = {parameter.name: i for i, parameter in enumerate(backward)}
    alike: dict[tuple[np.dtype, Codec], list[Parameter]] = {}
    for parameter in backward:
        alike.setdefault((parameter.dtype, parameter.codec), []).append(parameter)
    buckets: list[list[Parameter]] = []
    for (_, codec), group in alike.items():
        buckets += [group] if codec.undivided else _split(group, limit, ends)
    return sorted(buckets, key=lambda bucket: place[bucket[-1].name])


def _split(group: list[Parameter], limit: int, ends: int) -> Iterator[list[Parameter]]:
    head = _fitting(group, ends)
    middle = group[head:]
    tail = _fitting(middle[::-1], ends) if middle else 0
    yield group[:head]
    middle, last = middle[: len(middle) - tail], middle[len(middle) - tail :]
    while middle:
        count = _fitting(middle, limit)
        yield middle[:count]
        middle = middle[count:]
    if last:
        yield last


def _fitting(parameters: Sequence[Parameter], limit: int) -> int:
    """How many of the first ones have no more than so many bytes together; one at least."""
    nbytes = 0
    for count, parameter in enumerate(parameters):
        nbytes += parameter.nbytes
        if nbytes > limit and count:
            return count
    return len(parameters)
