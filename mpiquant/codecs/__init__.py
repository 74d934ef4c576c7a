"""Codecs: how values become bytes."""

from mpiquant.codecs.abc import Codec, WithoutFormat
from mpiquant.codecs.aqat import AqatCodec
from mpiquant.codecs.auto import AutoCodec
from mpiquant.codecs.bounded import BoundedCodec
from mpiquant.codecs.cast import BFloat16Codec, Float16Codec
from mpiquant.codecs.identity import IdentityCodec
from mpiquant.codecs.low_bit import LowBitCodec
from mpiquant.codecs.random_k import BlockRandomKCodec, RandomKCodec
from mpiquant.codecs.registry import EXACT, by_name, names, register, resolve, split_names
from mpiquant.codecs.sparsifier import Sparsifier
from mpiquant.codecs.ternary import TernaryCodec
from mpiquant.codecs.threshold import ThresholdCodec
from mpiquant.codecs.top_k import TopKCodec
from mpiquant.codecs.uniform import UniformCodec

__all__ = [
    "AqatCodec",
    "AutoCodec",
    "BFloat16Codec",
    "BlockRandomKCodec",
    "BoundedCodec",
    "Codec",
    "EXACT",
    "Float16Codec",
    "IdentityCodec",
    "LowBitCodec",
    "RandomKCodec",
    "Sparsifier",
    "TernaryCodec",
    "ThresholdCodec",
    "TopKCodec",
    "UniformCodec",
    "WithoutFormat",
    "by_name",
    "names",
    "register",
    "resolve",
    "split_names",
]
