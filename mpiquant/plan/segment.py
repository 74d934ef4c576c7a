"""How long a segment is, where the user does not say."""

from __future__ import annotations

import numpy as np

from mpiquant.codecs import Codec

LONGEST = 511 * 512
"""Values of a segment of a ring: long enough that Python and the kernels' calls cost little, short
enough that the first one is soon on its way.  An odd number of blocks of 512, so that the bit
planes of a segment do not fall on the same cache sets."""

EAGER_NBYTES = 64_000
"""Longest message that MPIs send at once over TCP.  For longer ones the receiver is asked first:
Open MPI then leaves gaps on the wire, and Open MPI and UCX exchange messages with the same peer in
one direction at a time (see docs/benchmarks.md)."""


def segment_length(
    asked_for: int | None, algorithm: str, codec: Codec, dtype: np.dtype, vendor: str
) -> int:
    """Elements of a segment.

    Parameters
    ----------
    asked_for : int or None
        What the user asked for.
    algorithm : str
    codec : Codec
        That of the messages; its bytes are taken to grow with the elements.
    dtype : numpy.dtype
    vendor : str
        Name of the MPI, as of `MPI.get_vendor`.
    """
    if asked_for is not None:
        return asked_for
    if algorithm == "ring" and vendor != "Open MPI":
        return LONGEST
    blocks = LONGEST * EAGER_NBYTES // codec.nbytes(LONGEST, dtype) // 512
    return min(LONGEST, max(1, blocks - (blocks % 2 == 0)) * 512)
