"""What a sparsifier is: a choice of positions whose values are sent, and the others not.

It has no message format of its own (see `mpiquant.codecs.sparse_message`): where its positions are
drawn from a generator that all ranks know, they are not sent at all; where all ranks draw the same
ones, their values are an array like any other, which any algorithm adds up.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from mpiquant.codecs._block import mix_key
from mpiquant.codecs.abc import Codec, WithoutFormat
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.typing import Array

Scope = Literal["layerwise", "global"]


@dataclass(frozen=True, kw_only=True)
class Sparsifier(WithoutFormat):
    """Base of all sparsifiers; a subclass says which positions are sent.

    Parameters
    ----------
    values : Codec
        What the values at these positions are sent in; exact by default.
    scope : {"layerwise", "global"}
        Whether each of several arrays that are sent together keeps its own share, or all of them
        one.
    parts : tuple of int
        Lengths of the arrays that lie one behind the other in the one at hand, each of which keeps
        its share; empty for one.  Filled in where arrays are put together.
    """

    sparse: ClassVar[bool] = True

    values: Codec = field(default_factory=IdentityCodec)
    scope: Scope = "layerwise"
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.values, WithoutFormat):
            raise ValueError(f"values cannot be sent in {self.values.spec!r}")
        if self.scope not in ("layerwise", "global"):
            raise ValueError(f"scope is {self.scope!r}, expected 'layerwise' or 'global'")

    def of_parts(self, lengths: tuple[int, ...]) -> Sparsifier:
        """The sparsifier of arrays of these lengths, put together."""
        parted = self.scope == "layerwise" and len(lengths) > 1
        return replace(self, parts=lengths) if parted else self

    @property
    def undivided(self) -> bool:
        return self.scope == "global"

    # ---- which positions ----

    @property
    def drawn(self) -> bool:
        """Whether positions depend on the key alone, so that who knows it need not be told."""
        return False

    @property
    def shared(self) -> bool:
        """Whether all ranks choose the same positions."""
        return False

    @abstractmethod
    def _choose(self, x: Array, key: int) -> Array:
        """Positions in one part, ascending."""

    @abstractmethod
    def _most(self, count: int) -> int:
        """How many values of one part are sent at most."""

    def positions(self, x: Array, key: int) -> Array:
        """(k,) int64 array: positions of the values of x that are sent, ascending.

        A value that is no number is chosen before all others, where values matter.
        """
        chosen = [
            begin + self._choose(x[begin:end], mix_key(key, number))
            for number, (begin, end) in enumerate(self._bounds(x.size))
        ]
        return chosen[0] if len(chosen) == 1 else np.concatenate(chosen)

    def most(self, count: int) -> int:
        """How many of so many values are sent at most; as many, where positions are drawn."""
        return sum(self._most(end - begin) for begin, end in self._bounds(count))

    def again(self, total: Array, share: int) -> Array:
        """Positions in a sum over ranks that are passed on: its `share` largest, ascending."""
        return largest(total, share)

    def _bounds(self, count: int) -> Iterator[tuple[int, int]]:
        begin = 0
        for length in self.parts or (count,):
            yield begin, begin + length
            begin += length
        if begin != count:
            raise ValueError(f"parts of {begin} values in all, in an array of {count}")

    # ---- as a codec ----

    @property
    def bits(self) -> float:
        """Bits of the values that are sent, for each one of the array."""
        count = 1 << 20
        return 8.0 * self.values.nbytes(self._most(count), np.dtype(np.float32)) / count

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Bytes of the values that are sent, without their positions."""
        return self.values.nbytes(self.most(count), dtype)

    def _spec(self, name: str, **fields: object) -> str:
        shown = [f"{key}={value}" for key, value in fields.items()]
        if self.values != IdentityCodec():
            shown.append(f"values={self.values.spec}")
        if self.scope != "layerwise":
            shown.append(f"scope={self.scope}")
        if self.parts:
            shown.append(f"parts={'+'.join(map(str, self.parts))}")
        return f"{name}({','.join(shown)})"


def share_of(count: int, ratio: float) -> int:
    """How many of so many values a ratio is: one at least, if there are any."""
    return min(count, max(1, math.ceil(ratio * count)))


def check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}, expected more than 0, up to 1")


# ---- the largest values ----

CHUNK = 1 << 15
"""Values that are compared at a time: they and what is made of them shall stay in a cache."""

SAMPLE = 1 << 14
SMALL = 4 * SAMPLE
"""Arrays up to here are sorted as a whole."""


def largest(x: Array, count: int) -> Array:
    """Positions of the `count` values of the largest magnitude, ascending.

    Of equal ones those at the lowest positions; what is no number counts as infinite.

    Notes
    -----
    A sample says above which magnitude there are surely enough, one pass collects what lies above
    it, and only that is sorted: about the time of reading the array a few times.  Where the sample
    misled, the whole array is sorted.
    """
    n = x.size
    if count >= n:
        return np.arange(n)
    found = np.arange(n) if n <= SMALL else _above(np.abs(x[:: n // SAMPLE]), x, count)
    if found.size < count:
        found = np.arange(n)
    return found[_largest(np.abs(x[found]), count)]


def _above(sample: Array, x: Array, count: int) -> Array:
    """Positions of all values that are as large as what the sample promises."""
    expected = count * sample.size / x.size
    kept = min(sample.size, math.ceil(expected + 4 * math.sqrt(expected) + 8))
    bound = np.partition(np.nan_to_num(sample, nan=np.inf), sample.size - kept)[-kept]
    least = np.nextafter(x.dtype.type(0), x.dtype.type(1))
    return not_below(x, max(bound, least))


def not_below(x: Array, bound: float) -> Array:
    """Positions of all values whose magnitude is not below a bound, or is no number; ascending."""
    bound = x.dtype.type(bound)
    magnitudes, below = np.empty(CHUNK, x.dtype), np.empty(CHUNK, bool)
    found = []
    for begin in range(0, x.size, CHUNK):
        part = x[begin : begin + CHUNK]
        np.abs(part, out=magnitudes[: part.size])
        np.less(magnitudes[: part.size], bound, out=below[: part.size])
        np.logical_not(below, out=below)
        found.append(begin + np.flatnonzero(below[: part.size]))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _largest(magnitudes: Array, count: int) -> Array:
    """Positions of the `count` largest, ascending; of equal ones the first."""
    np.nan_to_num(magnitudes, copy=False, nan=np.inf, posinf=np.inf)
    bound = np.partition(magnitudes, magnitudes.size - count)[magnitudes.size - count]
    chosen = magnitudes > bound
    equal = np.flatnonzero(magnitudes == bound)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)
