from typing_extensions import Buffer

NEAREST: int
STOCHASTIC: int
LEVELS: int
TERNARY: int
BLOCK_MAX: int
BITS_MAX: int
GROUP: int
ISAS: tuple[str, ...]

def use_isa(name: str) -> None: ...
def isa() -> str: ...
def available_isas() -> tuple[str, ...]: ...
def segment_nbytes(count: int, kind: int, bits: int, block: int, itemsize: int) -> int: ...
def encode(
    x: Buffer,
    wire: Buffer,
    kind: int,
    bits: int,
    block: int,
    key: int = 0,
    index: int = 0,
    residual: Buffer | None = None,
) -> bool: ...
def decode(
    wire: Buffer, out: Buffer, kind: int, bits: int, block: int, addend: Buffer | None = None
) -> bool: ...
def hop(
    wire_in: Buffer,
    bits_in: int,
    x: Buffer,
    wire: Buffer,
    kind: int,
    bits: int,
    block: int,
    key: int = 0,
    index: int = 0,
    residual: Buffer | None = None,
) -> bool: ...
def cast_encode(x: Buffer, wire: Buffer, bfloat: bool, residual: Buffer | None = None) -> None: ...
def cast_decode(
    wire: Buffer, out: Buffer, bfloat: bool, addend: Buffer | None = None
) -> bool: ...
