"""What a simulated rank's processor takes for kernels and messages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
    eager_nbytes : float
        Longest message that is sent at once.
    ask_s : float
        Before a longer one the receiver is asked, which takes so long and nobody's time.
    """

    kernels: dict[str, KernelCost] = field(default_factory=dict)
    message_s: float = 0.0
    eager_nbytes: float = math.inf
    ask_s: float = 0.0

    def asking(self, nbytes: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """Seconds between the end of the processor's work for a message and its way out."""
        if self.ask_s == 0:
            return 0.0
        return np.where(np.greater(nbytes, self.eager_nbytes), self.ask_s, 0.0)

    def cost(self, codec: Codec) -> KernelCost:
        name = codec.spec.partition("(")[0]
        return self.kernels.get(name, _FREE)


_FREE = KernelCost()
