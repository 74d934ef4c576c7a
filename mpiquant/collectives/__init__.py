"""Algorithms as schedules: integers only, no MPI and no arrays."""

from mpiquant.collectives import direct, halving_doubling, ring
from mpiquant.collectives.schedule import Algorithm, Step, Transfer, chunk_bounds

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "direct": direct,
}
ALIASES = {"hd": "halving_doubling"}

__all__ = ["ALGORITHMS", "ALIASES", "Algorithm", "Step", "Transfer", "chunk_bounds"]
