"""From what a user writes to a codec.

Names are `exact`, `fp16`, `bf16`, `sign`, `ternary`, `q1` ... `q16`, `aqat`, and whatever third
parties add: by `register`, or by an entry point of the group `mpiquant.codecs` that loads a
function without arguments (a codec class will do).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points

from mpiquant.codecs.abc import Codec
from mpiquant.codecs.aqat import AqatCodec
from mpiquant.codecs.cast import BFloat16Codec, Float16Codec
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.low_bit import LowBitCodec
from mpiquant.codecs.ternary import TernaryCodec
from mpiquant.codecs.uniform import UniformCodec
from mpiquant.typing import CodecLike

EXACT = IdentityCodec()

_makers: dict[str, Callable[[], Codec]] = {
    "exact": IdentityCodec,
    "fp16": Float16Codec,
    "bf16": BFloat16Codec,
    "sign": LowBitCodec,
    "ternary": TernaryCodec,
    "q1": LowBitCodec,
    "q2": partial(LowBitCodec, bits=2),
    **{f"q{bits}": partial(UniformCodec, bits=bits) for bits in range(3, 17)},
    "aqat": AqatCodec,
}


def register(name: str, make: Callable[[], Codec]) -> None:
    """Add a codec under a name; ValueError if the name is taken."""
    if name in _makers:
        raise ValueError(f"codec name {name!r} is taken")
    _makers[name] = make


def names() -> tuple[str, ...]:
    """All known names, those of installed entry points included."""
    return (*_makers, *(name for name in _installed() if name not in _makers))


@cache
def _installed() -> dict[str, Callable[[], Codec]]:
    return {p.name: partial(_load, p) for p in entry_points(group="mpiquant.codecs")}


def _load(point: EntryPoint) -> Codec:
    codec: Codec = point.load()()
    return codec


def by_name(name: str) -> Codec:
    """The codec of a name; ValueError naming all known ones if there is none."""
    make = _makers.get(name) or _installed().get(name)
    if make is None:
        raise ValueError(f"unknown codec {name!r}; known are {', '.join(names())}")
    codec = make()
    if not isinstance(codec, Codec):
        raise TypeError(f"codec {name!r} made a {type(codec).__name__}, expected a Codec")
    return codec


def resolve(codec: CodecLike, name: str, shape: tuple[int, ...]) -> Codec:
    """The codec of an array: a name, a codec, or a policy asked with the array's name and shape.

    None, given or answered, means exact.
    """
    if callable(codec) and not isinstance(codec, Codec):
        codec = codec(name, shape)
    if codec is None:
        return EXACT
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, str):
        return by_name(codec)
    raise TypeError(f"codec is a {type(codec).__name__}, expected a name, a Codec or a policy")
