"""What the block codecs share: the bit-plane wire format and its kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mpiquant import _kernels
from mpiquant.codecs.abc import Codec
from mpiquant.typing import Array, Bytes

Rounding = Literal["nearest", "stochastic"]
_MASK = (1 << 64) - 1


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, expected {low} to {high}")


def mix_key(*words: int) -> int:
    """One 64-bit key from several integers (SplitMix64 steps)."""
    z = 0
    for word in words:
        z = (z ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
        z ^= z >> 31
    return z


@dataclass(frozen=True, kw_only=True)
class BlockCodec(Codec):
    """A codec whose wire is, per segment: block scales, sign plane, magnitude planes."""

    block: int = 0
    """Values that share a scale; 0, the default, becomes `default_block`."""

    def __post_init__(self) -> None:
        if self.block == 0:
            object.__setattr__(self, "block", self.default_block)
        check_range("block", self.block, 1, _kernels.BLOCK_MAX)

    @property
    def default_block(self) -> int:
        return 512

    @property
    def _bits(self) -> int:
        """Planes of the format, the sign plane included."""
        raise TypeError("a subclass says how many")

    @property
    def _seed(self) -> int:
        return 0

    def _kind(self, residual: Array | None) -> int:
        """How blocks are quantized; may depend on whether error feedback is on."""
        raise TypeError("a subclass says how")

    def _kind_and_key(self, residual: Array | None, stream: int) -> tuple[int, int]:
        kind = self._kind(residual)
        return kind, mix_key(self._seed, stream) if kind == _kernels.STOCHASTIC else 0

    @property
    def bits(self) -> float:
        return self._bits

    @property
    def granule(self) -> int:
        # A whole number of blocks, and of the groups that share a word of a plane.
        return math.lcm(self.block, _kernels.GROUP)

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        blocks = -(-count // self.block)
        return blocks * dtype.itemsize + self._bits * -(-count // 8)

    def encode(
        self,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        kind, key = self._kind_and_key(residual, stream)
        _kernels.encode(x, wire, kind, self._bits, self.block, key, index, residual)

    def decode(self, wire: Bytes, out: Array) -> bool:
        return _kernels.decode(wire, out, self._kind(out), self._bits, self.block)

    def decode_add(self, wire: Bytes, addend: Array, out: Array) -> bool:
        return _kernels.decode(wire, out, self._kind(out), self._bits, self.block, addend)

    def hop(
        self,
        wire_in: Bytes,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        kind, key = self._kind_and_key(residual, stream)
        _kernels.hop(
            wire_in, self._bits, x, wire, kind, self._bits, self.block, key, index, residual
        )

    def _spec(self, name: str, **fields: object) -> str:
        shown = [f"{key}={value}" for key, value in fields.items()]
        if self.block != self.default_block:
            shown.insert(0, f"block={self.block}")
        return f"{name}({','.join(shown)})" if shown else name
