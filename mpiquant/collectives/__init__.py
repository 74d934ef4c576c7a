"""Algorithms as schedules: integers only, no MPI and no arrays."""

from mpiquant.collectives import direct, halving_doubling, parameter_server, ring
from mpiquant.collectives.schedule import Algorithm, Step, Transfer, chunk_bounds, own_part, renamed

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "direct": direct,
    "parameter_server": parameter_server,
}
ALIASES = {"hd": "halving_doubling"}
CODED = "cerar"
"""The coded ring, which has a runner of its own (see `mpiquant.coded`)."""

BROADCAST = "broadcast"
"""Whole arrays to everybody: not a schedule of its own, but a direct allgather and a local sum."""

HIERARCHICAL = "hierarchical"
"""A composition over groups of ranks (see `mpiquant.hierarchical`)."""

GATHER, SPLIT = "sparse_allgather", "sparse_reduce_scatter"
"""What sparsifiers with positions of each rank's own need (see `mpiquant.sparse`)."""


NAMES = ("auto", "native", *ALGORITHMS, BROADCAST, HIERARCHICAL, CODED, GATHER, SPLIT)


def canonical(algorithm: str) -> str:
    """Full name of an algorithm; ValueError naming all if there is none."""
    name = ALIASES.get(algorithm, algorithm)
    if name not in NAMES:
        known = ", ".join((*NAMES, *ALIASES))
        raise ValueError(f"unknown algorithm {algorithm!r}; known are {known}")
    return name


__all__ = [
    "ALGORITHMS",
    "ALIASES",
    "BROADCAST",
    "CODED",
    "GATHER",
    "HIERARCHICAL",
    "NAMES",
    "SPLIT",
    "Algorithm",
    "Step",
    "Transfer",
    "canonical",
    "chunk_bounds",
    "own_part",
    "renamed",
]
