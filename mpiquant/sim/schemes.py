"""Ways to sum gradients, by name: an algorithm and a codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiquant.codecs import AqatCodec, Codec, by_name
from mpiquant.codecs.aqat import codec_of
from mpiquant.codecs.expected import shrink, squared_error
from mpiquant.collectives import BROADCAST, CODED, HIERARCHICAL, canonical
from mpiquant.links import PART_S
from mpiquant.plan import segment_length
from mpiquant.rate import UNKNOWN_BITS, Levels
from mpiquant.sim.machine import Machine

FLOAT32 = np.dtype(np.float32)

NAMED = {
    "fp32": ("exact", "ring"),
    "aqgb": ("aqat", BROADCAST),
    "cerar": ("exact", CODED),
    "hierarchical": ("aqat", HIERARCHICAL),
}
"""Codec and algorithm of schemes that have names of their own."""

SIMULATED = ("ring", "halving_doubling", BROADCAST, CODED, HIERARCHICAL)

CODED_ERROR = 1.7e-4
"""Relative error of the coded ring with twice as many components as ranks, in float32, as measured
on eight ranks (docs/coded-ring.md)."""


@dataclass(frozen=True)
class Scheme:
    """What one simulation runs.

    Attributes
    ----------
    name : str
    algorithm : str
        One of `SIMULATED`.
    codec : Codec
    """

    name: str
    algorithm: str
    codec: Codec

    @property
    def adaptive(self) -> bool:
        return self.codec.adaptive


def scheme_of(name: str) -> Scheme:
    """The scheme of a name.

    Parameters
    ----------
    name : str
        "fp32", "aqgb", "cerar", "hierarchical", a codec, which goes around a ring, or
        "codec@algorithm", as "aqat@halving_doubling".

    Raises
    ------
    ValueError
        If there is no such codec or algorithm, or they do not go together.
    """
    codec_name, algorithm = NAMED.get(name, (name, "ring"))
    if "@" in name:
        codec_name, _, algorithm = name.partition("@")
    algorithm = canonical(algorithm)
    if algorithm not in SIMULATED:
        raise ValueError(f"no training is simulated with {algorithm!r}, but with {SIMULATED}")
    codec = by_name(NAMED.get(codec_name, (codec_name,))[0])
    if algorithm == CODED and codec.lossy:
        raise ValueError(f"{name!r}: the coded ring sends floats only")
    if not codec.adaptive:
        squared_error(codec)  # which knows what can be simulated
    return Scheme(name, algorithm, codec)


class Widths:
    """What values take at each width that a scheme can choose: one if it is fixed.

    Parameters
    ----------
    scheme : Scheme
    machine : Machine

    Attributes
    ----------
    bits, squared_errors, shrinks : array
        At each width; errors are those of one encoding, relative, and values shrink by the last.
    other_error : float
        Squared relative error of the algorithm itself.
    """

    def __init__(self, scheme: Scheme, machine: Machine) -> None:
        codec = scheme.codec
        self.codec = codec
        if isinstance(codec, AqatCodec):
            self.levels: Levels | None = codec.levels(FLOAT32)
            self.codecs: tuple[Codec, ...] = tuple(codec_of(b) for b in self.levels.bits)
        else:
            self.levels, self.codecs = None, (codec,)
        self.bits = np.array([c.bits if c.lossy else 32.0 for c in self.codecs])
        self.squared_errors = np.array([squared_error(c) for c in self.codecs])
        self.shrinks = np.array([shrink(c) for c in self.codecs])
        self.other_error = CODED_ERROR**2 if scheme.algorithm == CODED else 0.0
        self._costs = [machine.cost(c) for c in self.codecs]
        self._nbytes: dict[int, NDArray[np.float64]] = {}

    @property
    def unknown(self) -> int:
        """The width while nothing is known, of an adaptive scheme."""
        return 0 if self.levels is None else int(self.levels.index(UNKNOWN_BITS + 1.0))

    def nbytes(self, values: int) -> NDArray[np.float64]:
        """Bytes of a message of so many values, at each width."""
        known = self._nbytes.get(values)
        if known is None:
            found = [min(c.nbytes(values, FLOAT32), 4 * values) for c in self.codecs]
            known = self._nbytes[values] = np.array(found, np.float64)
        return known

    def seconds(self, work: Mapping[str, float]) -> NDArray[np.float64]:
        """Of kernels, by the values that each of them handles, at each width."""
        total = np.zeros(len(self.codecs))
        for i, (cost, codec) in enumerate(zip(self._costs, self.codecs, strict=True)):
            for kernel, values in work.items():
                if kernel == "decode" and not codec.lossy:
                    continue  # final bytes are the output
                total[i] += getattr(cost, kernel) * values
        return total

    def lane(self, algorithm: str, chunk: int, bandwidth: float) -> int:
        """Values of a message, about, as the real runners divide chunks.

        Where bits are chosen, messages go in parts that take a given time each, and those of calls
        that are due earlier go between them; a lane is such a part at four bits.
        """
        length = segment_length(None, algorithm, self.codec, FLOAT32, "", chunk)
        if self.levels is not None:
            length = min(length, int(PART_S * bandwidth * 2))
        return max(length, 512)
