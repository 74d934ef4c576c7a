"""`random_k` and `block_random_k`: values at positions that are drawn at random.

The generator is known to all ranks, so positions are never sent.  By default all ranks draw the
same ones, and the values there are an array like any other, which any algorithm adds up, also MPI's
own; else each rank draws its own, and all ranks gather the values of all.

Generator: Philox-4x64 (Salmon et al. 2011) as in NumPy, keyed by the seed, the number of the call
and, for positions of its own, the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpiquant.codecs.sparsifier import Sparsifier, check_ratio, share_of
from mpiquant.typing import Array


@dataclass(frozen=True, kw_only=True)
class RandomKCodec(Sparsifier):
    """k = max(1, ceil(ratio n)) of n values, each set of k equally likely.

    Parameters
    ----------
    ratio : float
        Part of the values that is sent; 1 % by default.
    draw : {"shared", "own"}
        Whether all ranks draw the same positions.
    seed : int
    values, scope, parts
        See `Sparsifier`.

    Notes
    -----
    Values are not scaled by n/k: error feedback sends later what was not sent.
    """

    ratio: float = 0.01
    draw: Literal["shared", "own"] = "shared"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ratio(self.ratio)
        if self.draw not in ("shared", "own"):
            raise ValueError(f"draw is {self.draw!r}, expected 'shared' or 'own'")

    @property
    def spec(self) -> str:
        return self._spec("random_k", ratio=self.ratio, draw=self.draw, seed=self.seed)

    @property
    def drawn(self) -> bool:
        return True

    @property
    def shared(self) -> bool:
        return self.draw == "shared"

    def _generator(self, key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed % (1 << 64), key]))

    def _choose(self, x: Array, key: int) -> Array:
        count = self._most(x.size)
        if count == x.size:
            return np.arange(count)
        at = self._generator(key).choice(x.size, count, replace=False, shuffle=False)
        at.sort()
        return at

    def _most(self, count: int) -> int:
        return share_of(count, self.ratio)


@dataclass(frozen=True, kw_only=True)
class BlockRandomKCodec(RandomKCodec):
    """Whole blocks of neighbours, k values or up to a block more: read at the speed of memory.

    Blocks lie side by side from a random place on, around the end of the array, so that each value
    is as likely to be sent as any other.

    Parameters
    ----------
    block : int
        Values of a block; a shorter one where k is less.
    """

    block: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1:
            raise ValueError(f"block is {self.block}, expected 1 or more")

    @property
    def spec(self) -> str:
        fields = {"ratio": self.ratio, "block": self.block, "draw": self.draw, "seed": self.seed}
        return self._spec("block_random_k", **fields)

    def _choose(self, x: Array, key: int) -> Array:
        count, n = self._most(x.size), x.size
        if count == n:
            return np.arange(n)
        length = self._length(n)
        generator = self._generator(key)
        blocks = generator.choice(n // length, count // length, replace=False, shuffle=False)
        starts = (int(generator.integers(n)) + length * blocks) % n
        starts.sort()
        at = np.add.outer(starts, np.arange(length)).reshape(-1)
        over = int(
            np.searchsorted(at[-length:], n)
        )  # of the last block, what is not behind the end
        if over == length:
            return at
        split = count - length + over
        return np.concatenate([at[split:] - n, at[:split]])

    def _length(self, count: int) -> int:
        return min(self.block, share_of(count, self.ratio))

    def _most(self, count: int) -> int:
        if count == 0:
            return 0
        length = self._length(count)
        blocks = -(-share_of(count, self.ratio) // length)
        return blocks * length if blocks <= count // length else count
