from collections.abc import Sequence

from mpiquant.typing import Array

NEAREST: int
STOCHASTIC: int
LEVELS: int
TERNARY: int
BLOCK_MAX: int
BITS_MAX: int
GROUP: int
MIX_MAX: int
ISAS: tuple[str, ...]

def use_isa(name: str) -> None: ...
def isa() -> str: ...
def available_isas() -> tuple[str, ...]: ...
def segment_nbytes(count: int, kind: int, bits: int, block: int, itemsize: int) -> int: ...
def encode(
    x: Array,
    wire: Array,
    kind: int,
    bits: int,
    block: int,
    key: int = 0,
    index: int = 0,
    residual: Array | None = None,
) -> bool: ...
def decode(
    wire: Array, out: Array, kind: int, bits: int, block: int, addend: Array | None = None
) -> bool: ...
def hop(
    wire_in: Array,
    bits_in: int,
    x: Array,
    wire: Array,
    kind: int,
    bits: int,
    block: int,
    key: int = 0,
    index: int = 0,
    residual: Array | None = None,
) -> bool: ...
def cast_encode(x: Array, wire: Array, bfloat: bool, residual: Array | None = None) -> None: ...
def cast_decode(wire: Array, out: Array, bfloat: bool, addend: Array | None = None) -> bool: ...
def mix(matrix: Array, sources: Sequence[Array], outs: Sequence[Array]) -> None: ...
def add(wire: Array, x: Array) -> None: ...
