"""Algorithms as schedules: integers only, no MPI and no arrays."""

from mpiquant.collectives import direct, halving_doubling, ring
from mpiquant.collectives.schedule import Algorithm, Step, Transfer, chunk_bounds, own_part

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "direct": direct,
}
ALIASES = {"hd": "halving_doubling"}


def canonical(algorithm: str) -> str:
    """Full name of an algorithm; ValueError naming all if there is none."""
    name = ALIASES.get(algorithm, algorithm)
    if name not in ("auto", "native", *ALGORITHMS):
        known = ", ".join(("auto", "native", *ALGORITHMS, *ALIASES))
        raise ValueError(f"unknown algorithm {algorithm!r}; known are {known}")
    return name


__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "Algorithm",
    "Step",
    "Transfer",
    "canonical",
    "chunk_bounds",
    "own_part",
]
