"""The error of a sum that is encoded on its way, to be expected of independent normal data.

A partial sum is kept as three numbers, in units of the variance of one term: the sum of the terms'
weights, that of their squares, and the noise.  An encoding by `UniformCodec` or a cast adds noise
of a share e of all the energy.  One by `LowBitCodec`, least squares, keeps 1 - e of the energy,
which is also its inner product with what was encoded: all weights shrink by 1 - e, and so much of
the energy becomes noise that 1 - e of it is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mpiquant.codecs import Codec
from mpiquant.codecs.expected import shrink, squared_error
from mpiquant.sim.schemes import Widths


@dataclass(frozen=True, slots=True)
class Loss:
    """What an encoding does, on average over messages.

    Attributes
    ----------
    shrink : float
        By what weights are multiplied.
    noise : float
        Share of the energy that is added as noise.
    """

    shrink: float
    noise: float

    @classmethod
    def of(cls, codec: Codec) -> Loss:
        """Of one codec."""
        kept = shrink(codec)
        return cls(kept, squared_error(codec) * kept)


def loss_of(widths: Widths, chosen: NDArray[np.intp] | int) -> Loss:
    """Of messages of the widths chosen by some ranks."""
    errors, shrinks = widths.squared_errors[chosen], widths.shrinks[chosen]
    return Loss(float(np.mean(shrinks)), float(np.mean(errors * shrinks)))


@dataclass(frozen=True, slots=True)
class Partial:
    """A partial sum of some terms.

    Attributes
    ----------
    terms : int
    weights, squares : float
        Sums of the terms' weights and of their squares.
    noise : float
    """

    terms: int = 1
    weights: float = 1.0
    squares: float = 1.0
    noise: float = 0.0

    def encoded(self, loss: Loss) -> Partial:
        squares = loss.shrink**2 * self.squares
        noise = loss.shrink**2 * self.noise + loss.noise * (self.squares + self.noise)
        return replace(self, weights=loss.shrink * self.weights, squares=squares, noise=noise)

    def plus(self, other: Partial) -> Partial:
        return Partial(
            self.terms + other.terms,
            self.weights + other.weights,
            self.squares + other.squares,
            self.noise + other.noise,
        )

    def times(self, count: int) -> Partial:
        """The sum of so many that are alike."""
        each = (self.terms, self.weights, self.squares, self.noise)
        terms, *others = (count * number for number in each)
        return Partial(int(terms), *others)

    @property
    def squared_error(self) -> float:
        """Relative to the true sum."""
        return (self.terms - 2 * self.weights + self.squares + self.noise) / self.terms
