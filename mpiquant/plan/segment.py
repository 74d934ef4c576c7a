"""How long a segment is, where the user does not say."""

from __future__ import annotations

import numpy as np

from mpiquant.codecs import Codec

LENGTHS = (1025 * 512, 513 * 512)
"""Values of a segment: long enough that Python, MPI's bookkeeping and the kernels' calls
cost little, short enough that the first one is soon on its way.  Odd numbers of blocks of 512, so
that the bit planes of a segment do not fall on the same cache sets, and one block more than a power
of two, so that no chunk of the usual sizes ends in a segment of next to nothing."""

ADAPTIVE_LENGTHS = (2049 * 512, 1025 * 512, 513 * 512, 257 * 512, 129 * 512)
"""The same where messages choose their bits: two for each chunk, if they are not too short, so that
one is on the wire while the bits of the next are chosen."""

ENOUGH = 7
"""Segments of a chunk with which all ranks are busy most of the time."""

SHORT = 257 * 512
"""The same where a chunk has not two of them and its ranks get it at once, as in all schedules but
the ring: then one is on its way while the next is encoded."""

EAGER_NBYTES = 64_000
"""Longest message that Open MPI sends at once over TCP.  For longer ones it asks the receiver
first, leaves gaps on the wire, and exchanges messages with the same peer in one direction at a
time.  Other MPIs do well with long messages, and ill with many short ones (docs/benchmarks.md)."""


def segment_length(
    asked_for: int | None, algorithm: str, codec: Codec, dtype: np.dtype, vendor: str, chunk: int
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
    chunk : int
        Elements of the array over the number of ranks.
    """
    if asked_for is not None:
        return asked_for
    if codec.adaptive:  # messages are divided by the time that they take
        return next((n for n in ADAPTIVE_LENGTHS if chunk >= 1.5 * n), ADAPTIVE_LENGTHS[-1])
    longest = next((n for n in LENGTHS if chunk >= ENOUGH * n), LENGTHS[-1])
    if vendor != "Open MPI":
        return longest if algorithm == "ring" or chunk >= 2 * longest else SHORT
    blocks = longest * EAGER_NBYTES // codec.nbytes(longest, dtype) // 512
    return min(longest, max(1, blocks - (blocks % 2 == 0)) * 512)
