"""Codecs: how values become bytes."""

from mpiquant.codecs.abc import Codec
from mpiquant.codecs.aqat import AqatCodec
from mpiquant.codecs.cast import BFloat16Codec, Float16Codec
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.low_bit import LowBitCodec
from mpiquant.codecs.registry import EXACT, by_name, names, register, resolve
from mpiquant.codecs.ternary import TernaryCodec
from mpiquant.codecs.uniform import UniformCodec

__all__ = [
    "AqatCodec",
    "BFloat16Codec",
    "Codec",
    "EXACT",
    "Float16Codec",
    "IdentityCodec",
    "LowBitCodec",
    "TernaryCodec",
    "UniformCodec",
    "by_name",
    "names",
    "register",
    "resolve",
]
