"""Ways to spoil the bytes of a message."""

from __future__ import annotations

import numpy as np


def _reals(bits: int, fraction: int) -> list[int]:
    """Words of reals with so many bits, so many of them of the fraction: 0, subnormal and normal
    ones at the ends of the range, infinities and NaNs, of both signs."""
    one, sign = 1 << fraction, 1 << (bits - 1)
    infinity = sign - one
    ends = [0, 1, one - 1, one, infinity // 2, infinity - 2 * one, infinity - 1]
    words = [*ends, infinity, infinity + 1, infinity + one // 2, sign - 1]
    return [word + negative for word in words for negative in (0, sign)]


EXTREME = {2: _reals(16, 10) + _reals(16, 7), 4: _reals(32, 23), 8: _reals(64, 52)}
"""Words of so many bytes."""


def flip(wire, rng):
    for bit in rng.integers(8 * len(wire), size=rng.integers(1, 9)):
        wire[bit // 8] ^= 1 << (bit % 8)


def noise(wire, rng):
    wire[:] = rng.integers(256, size=len(wire), dtype=np.uint8)


def patch(wire, rng):
    start, stop = sorted(rng.integers(len(wire) + 1, size=2))
    noise(wire[start:stop], rng)


def fill(wire, rng):
    wire[:] = rng.choice([0x00, 0xFF, 0x55, 0x80])


def rotate(wire, rng):
    wire[:] = np.roll(wire, rng.integers(len(wire)))


def swap_pieces(wire, rng):
    n = int(rng.integers(len(wire) // 2 + 1))
    a, b = rng.integers(len(wire) // 2 - n + 1, size=2)
    b += len(wire) // 2
    wire[a : a + n], wire[b : b + n] = wire[b : b + n].copy(), wire[a : a + n].copy()


def truncate(wire, rng):
    return wire[: rng.choice([len(wire) - 1, len(wire) // 2, rng.integers(len(wire)), 0, 4, 8])]


def behead(wire, rng):
    return wire[rng.integers(1, min(9, len(wire) + 1)) :]


def extend(wire, rng):
    more = rng.integers(256, size=rng.choice([1, 2, 8, 64, len(wire)]), dtype=np.uint8)
    return np.concatenate([wire, more])


ANY = (flip, noise, patch, fill, rotate, swap_pieces, truncate, behead, extend)
"""Functions of bytes and a generator of random numbers; they change the bytes or return others."""


def extreme(wire, rng, first, itemsize):
    """Some of the first reals, which have so many bytes each, become extreme ones."""
    words = wire[: first * itemsize].reshape(first, itemsize)
    for i in rng.integers(first, size=rng.integers(1, 5)):
        word = EXTREME[itemsize][rng.integers(len(EXTREME[itemsize]))]
        words[i] = np.frombuffer(word.to_bytes(itemsize, "little"), np.uint8)
