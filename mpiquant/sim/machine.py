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

_MEMORY = 8e9
"""Bytes per second that one core copies."""


def _of_traffic(wire_nbytes: float) -> KernelCost:
    """Kernels that do no more than move float32 values, and what a value takes on the wire."""
    encode, decode_add = (4 + wire_nbytes) / 2, (8 + wire_nbytes) / 2
    traffic = (encode, encode, decode_add, 1.5 * decode_add)
    return KernelCost(*(nbytes / _MEMORY for nbytes in traffic))


TYPICAL = Machine(
    kernels={
        "exact": KernelCost(encode=4 / _MEMORY, decode_add=6 / _MEMORY, hop=6 / _MEMORY),
        "bf16": _of_traffic(2),
        **{f"q{bits}": _of_traffic(bits / 8) for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16)},
    },
    message_s=10e-6,
)
"""Kernels at the limit of a core's memory, as docs/performance.md finds them, half a copy for each
byte that they read or write; and what Python, MPI and the runner take for a message."""
