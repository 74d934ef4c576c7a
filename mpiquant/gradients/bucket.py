"""Buckets: gradients that are sent together, in one flat buffer.

A backward pass yields the last layer's gradient first, and the next forward pass needs the first
layer's sum first.  So buckets are filled from the last parameter to the first one.  The first
bucket is small, that the wire has something to do early; and so is the last one, which is needed as
soon as it is ready, with nothing to hide behind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mpiquant.codecs import Codec, Sparsifier
from mpiquant.rate import Overlap
from mpiquant.request import Request
from mpiquant.stats import Stats
from mpiquant.typing import Array


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


@dataclass
class Turn:
    """One step of a bucket; times are those of `time.perf_counter`."""

    ready: float
    waited_before: float
    """Seconds that the trainer had waited until then."""
    waited_between: float = 0.0
    """Seconds that it waited for other buckets from then to the need of this one."""
    done: float = float("nan")
    need: float = float("nan")
    wait_s: float = 0.0
    stats: Stats | None = None

    def end(self) -> None:
        """Note that the sum is there."""
        self.done = time.perf_counter()


@dataclass
class Bucket:
    """A flat buffer of gradients, and where it is in the current step.

    Attributes
    ----------
    index : int
        Place in the order in which buckets are sent.
    parameters : list of Parameter
    flat : (n,) array
        Gradients on their way in, sums on the way out.
    views : dict of str to array
        Each parameter's part of it.
    ready : set of str
        Parameters whose gradient of this step is there.
    begun : set of str
        Parameters of which something was accumulated.
    request : Request or None
        From the start of its call to the end of the step.
    taken : bool
        Whether the sum was waited for, in this step.
    overlap, until_need : Overlap
        Times from when it is ready, and from the beginning of the step, to when it is needed.
    turns : list of Turn
        What was measured in the latest steps.
    """

    index: int
    parameters: list[Parameter]
    flat: Array = field(init=False)
    views: dict[str, Array] = field(init=False)
    ready: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    request: Request | None = None
    taken: bool = False
    overlap: Overlap = field(default_factory=Overlap)
    until_need: Overlap = field(default_factory=Overlap)
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flat = np.zeros(sum(p.size for p in self.parameters), self.parameters[0].dtype)
        self.views = self.split(self.flat)

    @property
    def name(self) -> str:
        """For messages to the user."""
        first, last = self.parameters[0].name, self.parameters[-1].name
        return first if first == last else f"{first} to {last}"

    @cached_property
    def codec(self) -> Codec:
        codec = self.parameters[0].codec
        if isinstance(codec, Sparsifier):
            return codec.of_parts(tuple(p.size for p in self.parameters))
        return codec

    @property
    def most_bits(self) -> float:
        """What to expect of it in the coming step: as many as in the last one."""
        stats = self.turns[-1].stats if self.turns else None
        return math.inf if stats is None or stats.partial_bits is None else stats.partial_bits

    @property
    def missing(self) -> list[str]:
        """Parameters whose gradient of this step is not there."""
        return [p.name for p in self.parameters if p.name not in self.ready]

    def split(self, flat: Array) -> dict[str, Array]:
        """Parts of an array like the flat buffer, by parameter."""
        parts, begin = {}, 0
        for parameter in self.parameters:
            part = flat[begin : begin + parameter.size]
            parts[parameter.name] = part.reshape(parameter.shape)
            begin += parameter.size
        return parts

    def join(self, parts: Mapping[str, Array], dtype: np.dtype) -> Array:
        """The flat array of these parts; zeros where there is none."""
        flat = np.zeros(self.flat.size, dtype)
        for name, view in self.split(flat).items():
            if name in parts:
                view[...] = parts[name]
        return flat

    def take(self, name: str, gradient: Array | None) -> None:
        """Put a gradient in its place, on top of what was accumulated."""
        view = self.views[name]
        if gradient is None or gradient is view:
            return
        if name in self.begun:
            np.add(view, gradient, out=view)
        else:
            np.copyto(view, gradient)

    def protect(self, flag: bool) -> None:
        """Make the views read-only while a call writes to them, or writable again."""
        for view in self.views.values():
            view.flags.writeable = not flag

    def begin_step(self) -> None:
        """Forget the step before."""
        self.ready.clear()
        self.begun.clear()
        self.request, self.taken = None, False
