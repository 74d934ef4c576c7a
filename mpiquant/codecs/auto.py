"""`auto`: whichever of some codecs is fastest, or none at all."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpiquant.codecs.abc import Codec, WithoutFormat
from mpiquant.codecs.uniform import UniformCodec


@dataclass(frozen=True, kw_only=True)
class AutoCodec(WithoutFormat):
    """A choice by measured time among exact values and some codecs.

    Parameters
    ----------
    choices : tuple of Codec
        What values may be sent in beside exactly; 8 bits by default, with which training loses
        nothing that can be told from its noise.  In a name: ``auto(choices=q8+q4)``.

    Notes
    -----
    `mpiquant.plan.Tuner` chooses, and says how.  Which algorithms may run is the call's to say.
    """

    choices: tuple[Codec, ...] = field(default_factory=lambda: (UniformCodec(bits=8),))

    def __post_init__(self) -> None:
        if not self.choices:
            raise ValueError("choices is empty: 'exact' is the codec that never changes a value")
        for codec in self.choices:
            if isinstance(codec, WithoutFormat) or codec.adaptive:
                raise ValueError(f"auto cannot choose {codec.spec!r}: its cost changes by call")

    @property
    def spec(self) -> str:
        return f"auto(choices={'+'.join(codec.spec for codec in self.choices)})"

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Bytes of count values, sent exactly."""
        return count * dtype.itemsize
