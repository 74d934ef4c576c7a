"""Algorithms as schedules: integers only, no MPI and no arrays."""

from mpiquant.collectives import direct, halving_doubling, ring
from mpiquant.collectives.schedule import Algorithm, Step, Transfer, chunk_bounds, own_part

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "direct": direct,
}
ALIASES = {"hd": "halving_doubling"}
BROADCAST = "broadcast"
"""Whole arrays to everybody: not a schedule of its own, but a direct allgather and a local sum."""


def canonical(algorithm: str) -> str:
    """Full name of an algorithm; ValueError naming all if there is none."""
    name = ALIASES.get(algorithm, algorithm)
    if name not in ("auto", "native", *ALGORITHMS, BROADCAST):
        known = ", ".join(("auto", "native", *ALGORITHMS, BROADCAST, *ALIASES))
        raise ValueError(f"unknown algorithm {algorithm!r}; known are {known}")
    return name


__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "BROADCAST",
    "Algorithm",
    "Step",
    "Transfer",
    "canonical",
    "chunk_bounds",
    "own_part",
]
