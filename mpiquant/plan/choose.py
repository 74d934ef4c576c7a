"""Which algorithm runs a call, and why."""

from __future__ import annotations

from dataclasses import dataclass

from mpiquant.collectives import GATHER, SPLIT

SMALL_WIRE_NBYTES = 64 << 10
"""Below this, a call's time is its number of steps, not its bytes."""

MANY_RANKS = 16
"""Above this, a direct exchange floods the network with small messages."""

FEW_RANKS = 4
"""Up to here, sending all positions to all ranks takes no longer than splitting the array: it has
fewer steps, and chooses once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Algorithm, whether the codec is used, and the reason in words."""

    algorithm: str
    compress: bool
    reason: str


def choose(
    algorithm: str,
    *,
    size: int,
    wire_nbytes: int,
    exact_because: str | None,
    native_because: str | None,
) -> Choice:
    """Choose for one array.

    Parameters
    ----------
    algorithm : str
        What the user asked for, canonical.
    size : int
        Ranks.
    wire_nbytes : int
        Encoded bytes of the whole array.
    exact_because : str or None
        Why nothing may be compressed; None if it may.
    native_because : str or None
        Why only MPI itself can do it; None if the schedules can.

    Notes
    -----
    Pure: the same on all ranks for the same arguments.
    """
    if native_because is not None:
        return Choice("native", False, native_because)
    if algorithm == "native":
        return Choice("native", False, "native was asked for")
    if algorithm != "auto":
        why = f"{algorithm} was asked for"
        return Choice(
            algorithm, exact_because is None, f"{why}; {exact_because}" if exact_because else why
        )
    if exact_because is not None:
        return Choice("native", False, exact_because)
    if wire_nbytes > SMALL_WIRE_NBYTES:
        return Choice("ring", True, "ring has the least traffic")
    if size <= MANY_RANKS:
        return Choice("direct", True, "small: direct has the fewest steps and the smallest error")
    return Choice("halving_doubling", True, "small, many ranks: few steps and few messages")


def choose_across(nodes: int, wire_nbytes: int) -> str:
    """The algorithm among the nodes of a hierarchical call, each of which has so many bytes."""
    choice = choose(
        "auto", size=nodes, wire_nbytes=wire_nbytes, exact_because=None, native_because=None
    )
    return choice.algorithm


def choose_sparse(algorithm: str, *, size: int, drawn: bool) -> Choice:
    """Choose for an array of which each rank sends values at positions of its own.

    Parameters
    ----------
    algorithm : str
        What the user asked for, canonical.
    size : int
        Ranks.
    drawn : bool
        Whether positions need not be sent, if each rank's values go to all ranks.

    Raises
    ------
    ValueError
        If the algorithm cannot add up such arrays.
    """
    if algorithm == "native":
        return Choice("native", False, "native was asked for")
    if algorithm in (GATHER, SPLIT):
        return Choice(algorithm, True, f"{algorithm} was asked for")
    if algorithm != "auto":
        raise ValueError(
            f"algorithm {algorithm!r} cannot add up values at each rank's own positions: "
            f"use 'auto', {GATHER!r} or {SPLIT!r}"
        )
    if drawn:
        return Choice(GATHER, True, "positions are drawn: each rank knows those of all others")
    if size <= FEW_RANKS:
        return Choice(GATHER, True, "few ranks: each gets all values")
    return Choice(SPLIT, True, "its traffic does not grow with the ranks")
