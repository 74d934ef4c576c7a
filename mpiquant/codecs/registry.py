"""From what a user writes to a codec.

Names are `exact`, `fp16`, `bf16`, `sign`, `ternary`, `q1` ... `q16`, `aqat`, `auto`, `bounded`,
`top_k`, `threshold`, `random_k`, `block_random_k`, and whatever third parties add: by `register`,
or by an entry point of the group `mpiquant.codecs` that loads a function (a codec class will do).
Parameters may follow, as in a codec's `spec`: `q4(block=64)`, `top_k(ratio=0.001,values=q8)`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from mpiquant.codecs.abc import Codec
from mpiquant.codecs.aqat import AqatCodec
from mpiquant.codecs.auto import AutoCodec
from mpiquant.codecs.bounded import BoundedCodec
from mpiquant.codecs.cast import BFloat16Codec, Float16Codec
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.low_bit import LowBitCodec
from mpiquant.codecs.random_k import BlockRandomKCodec, RandomKCodec
from mpiquant.codecs.ternary import TernaryCodec
from mpiquant.codecs.threshold import ThresholdCodec
from mpiquant.codecs.top_k import TopKCodec
from mpiquant.codecs.uniform import UniformCodec
from mpiquant.typing import CodecLike

EXACT = IdentityCodec()

_makers: dict[str, Callable[..., Codec]] = {
    "exact": IdentityCodec,
    "fp16": Float16Codec,
    "bf16": BFloat16Codec,
    "sign": LowBitCodec,
    "ternary": TernaryCodec,
    "q1": LowBitCodec,
    "q2": partial(LowBitCodec, bits=2),
    **{f"q{bits}": partial(UniformCodec, bits=bits) for bits in range(3, 17)},
    "aqat": AqatCodec,
    "auto": AutoCodec,
    "bounded": BoundedCodec,
    "top_k": TopKCodec,
    "threshold": ThresholdCodec,
    "random_k": RandomKCodec,
    "block_random_k": BlockRandomKCodec,
}


def register(name: str, make: Callable[..., Codec]) -> None:
    """Add a codec under a name; ValueError if the name is taken."""
    if name in _makers:
        raise ValueError(f"codec name {name!r} is taken")
    _makers[name] = make


def names() -> tuple[str, ...]:
    """All known names, those of installed entry points included."""
    return (*_makers, *(name for name in _installed() if name not in _makers))


@cache
def _installed() -> dict[str, Callable[..., Codec]]:
    return {p.name: partial(_load, p) for p in entry_points(group="mpiquant.codecs")}


def _load(point: EntryPoint, **parameters: Any) -> Codec:
    codec: Codec = point.load()(**parameters)
    return codec


@lru_cache
def by_name(text: str) -> Codec:
    """The codec of a name, with parameters or without.

    Raises
    ------
    ValueError
        If there is none, naming all known ones, or if it has no such parameters.
    """
    name, parameters = _parse(text)
    make = _makers.get(name) or _installed().get(name)
    if make is None:
        raise ValueError(f"unknown codec {name!r}; known are {', '.join(names())}")
    try:
        codec = make(**parameters)
    except TypeError as error:
        raise ValueError(f"codec {text!r}: {error}") from None
    if not isinstance(codec, Codec):
        raise TypeError(f"codec {name!r} made a {type(codec).__name__}, expected a Codec")
    return codec


def split_names(text: str) -> list[str]:
    """Names between commas, but for those in parentheses."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    """`name(key=value,...)`: numbers as such, a+b+c as tuples, `values` and `choices` as codecs."""
    name, opened, rest = text.partition("(")
    if not opened:
        return text, {}
    if not rest.endswith(")") or "=" not in rest:
        raise ValueError(f"codec {text!r}: expected name(key=value,...)")
    pairs = (part.partition("=") for part in split_names(rest[:-1]))
    return name, {key.strip(): _value(key.strip(), value.strip()) for key, _, value in pairs}


def _value(key: str, text: str) -> Any:
    if key == "values":
        return by_name(text)
    if key == "choices":
        return tuple(by_name(name) for name in text.split("+"))
    if key == "parts":
        return tuple(int(length) for length in text.split("+"))
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


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
