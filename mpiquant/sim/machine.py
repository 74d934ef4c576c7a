"""What a simulated rank's processor takes for kernels and messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpiquant.codecs import Codec


@dataclass(frozen=True)
class KernelCost:
    """Seconds per value.

    Attributes
    ----------
    encode, decode, decode_add, hop : float
        Of the codec's four kernels; of "exact": of a copy, of nothing, and of sums.
    """

    encode: float = 0.0
    decode: float = 0.0
    decode_add: float = 0.0
    hop: float = 0.0


@dataclass(frozen=True)
class Machine:
    """A processor.

    Attributes
    ----------
    kernels : dict of str to KernelCost
        By the names of codecs, without parameters.  Where one is missing it takes no time.
    message_s : float
        To post, test and note one message, at either of its ends.
    """

    kernels: dict[str, KernelCost] = field(default_factory=dict)
    message_s: float = 0.0

    def cost(self, codec: Codec) -> KernelCost:
        name = codec.spec.partition("(")[0]
        return self.kernels.get(name, _FREE)


_FREE = KernelCost()
