"""What a codec is.

A codec turns a run of float32 or float64 values into bytes (*wire*) of a length that depends only
on the count and the dtype, and back.  It keeps no state: what varies from call to call (random
numbers) comes as `stream` and `index`.  Two codecs with equal fields are equal, hash alike and
give the same bytes on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from mpiquant.typing import Array, Bytes


class Codec(ABC):
    """Base of all codecs; a subclass is a frozen dataclass.

    Only `spec`, `nbytes`, `encode` and `decode` are required.  The other methods have defaults that
    compose the last three; a codec with fused kernels overrides them.

    Attributes
    ----------
    lossy : bool
        Whether `decode(encode(x))` may differ from x.
    adaptive : bool
        Whether each message chooses a codec of its own: then `encode` and `decode` do not exist.
    sparse : bool
        Whether it is a `Sparsifier`, which has messages of its own: nor do they then.
    ragged : bool
        Whether messages may be shorter than `nbytes`: only the first `used` bytes of them count.
    """

    lossy: ClassVar[bool] = True
    adaptive: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    ragged: ClassVar[bool] = False

    @property
    @abstractmethod
    def spec(self) -> str:
        """Short text that names the codec with all its parameters, equal on all ranks."""

    @property
    def bits(self) -> float:
        """Bits per value on the wire, without scales."""
        return 8.0 * self.nbytes(1 << 20, np.dtype(np.float32)) / (1 << 20)

    @property
    def undivided(self) -> bool:
        """Whether all arrays of a call go together, however long they are."""
        return False

    @property
    def granule(self) -> int:
        """Values whose multiples a message may be cut at without any change of a bit."""
        return 1

    @abstractmethod
    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Bytes on the wire of count values of a dtype; the most, if it is ragged."""

    def used(self, wire: Bytes) -> int:
        """Bytes of an encoded message."""
        return wire.size

    @abstractmethod
    def encode(
        self,
        x: Array,
        wire: Bytes,
        *,
        residual: Array | None = None,
        stream: int = 0,
        index: int = 0,
    ) -> None:
        """Write x to wire.

        Parameters
        ----------
        x : (n,) float32 or float64 array
        wire : (nbytes(n),) uint8 array
        residual : (n,) array, optional
            Gets x minus what wire decodes to; may be x itself.
        stream, index : int
            Key of the random numbers of the message that x is a part of, and the position of x in
            it (a multiple of `granule`).
        """

    @abstractmethod
    def decode(self, wire: Bytes, out: Array) -> bool:
        """Write the decoded values to out; True if a non-finite value was met."""

    def decode_add(self, wire: Bytes, addend: Array, out: Array) -> bool:
        """out = addend + decoded values; out may be addend itself."""
        values = np.empty_like(out)
        flag = self.decode(wire, values)
        np.add(addend, values, out=out)
        return flag

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
        """wire = encode(x + decode(wire_in)): one step of a ring."""
        total = np.empty_like(x)
        self.decode_add(wire_in, x, total)
        self.encode(total, wire, residual=residual, stream=stream, index=index)

    def __str__(self) -> str:
        return self.spec


class WithoutFormat(Codec):
    """A codec that chooses: other codecs, positions or a step.  Its messages are not its own."""

    def encode(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{self.spec!r} has no format of its own")

    def decode(self, wire: Bytes, out: Array) -> bool:
        raise TypeError(f"{self.spec!r} has no format of its own")
