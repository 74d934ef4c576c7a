"""Rate control: how many bits a value gets now.  Pure functions of numbers; no MPI, no clock."""

from mpiquant.rate.budget import Overlap, share_s
from mpiquant.rate.controller import Levels, bits_until, fitting_bits, shared_bits
from mpiquant.rate.oracle import Best, Trace, Window, oracle
from mpiquant.rate.row import hidden, overlap_s, row
from mpiquant.rate.throughput import Throughput, blend, slowest

__all__ = [
    "Best",
    "Levels",
    "Overlap",
    "Throughput",
    "Trace",
    "Window",
    "bits_until",
    "blend",
    "fitting_bits",
    "hidden",
    "oracle",
    "overlap_s",
    "row",
    "share_s",
    "shared_bits",
    "slowest",
]
