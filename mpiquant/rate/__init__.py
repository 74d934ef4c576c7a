"""Rate control: how many bits a value gets now.  Pure functions of numbers; no MPI, no clock."""

from mpiquant.rate.budget import Overlap, share_s
from mpiquant.rate.call import UNKNOWN_BITS, expected_bits, remembered, with_reserve
from mpiquant.rate.controller import (
    ROUND_UP_BITS,
    Levels,
    bits_until,
    fitting_bits,
    shared_bits,
    shared_bits_of,
)
from mpiquant.rate.oracle import Best, Trace, Window, oracle
from mpiquant.rate.row import hidden, overlap_s, row, split_waits
from mpiquant.rate.throughput import Throughput, blend, slowest

__all__ = [
    "ROUND_UP_BITS",
    "UNKNOWN_BITS",
    "Best",
    "Levels",
    "Overlap",
    "Throughput",
    "Trace",
    "Window",
    "bits_until",
    "blend",
    "expected_bits",
    "fitting_bits",
    "hidden",
    "oracle",
    "overlap_s",
    "remembered",
    "row",
    "share_s",
    "shared_bits",
    "shared_bits_of",
    "slowest",
    "split_waits",
    "with_reserve",
]
