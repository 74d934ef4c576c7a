"""Buckets: gradients that are sent together, in one flat buffer (see `mpiquant.plan.bucket`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mpiquant.codecs import Codec, Sparsifier
from mpiquant.plan import Parameter
from mpiquant.rate import Overlap
from mpiquant.request import Request
from mpiquant.stats import Stats
from mpiquant.typing import Array


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
    overlap: Overlap[float] = field(default_factory=Overlap)
    until_need: Overlap[float] = field(default_factory=Overlap)
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
    def full(self) -> bool:
        """Whether all gradients of this step are there."""
        return len(self.ready) == len(self.parameters)

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
