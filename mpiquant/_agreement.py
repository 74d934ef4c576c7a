"""What the ranks of a call must agree on, and how they tell each other.

A `Plan` holds it, a *header* its hash.  A header travels in front of the data of a call; a rank
that finds a foreign hash stops the call, all ranks then exchange their whole plans, and each can
say what differs and where.

Header, little-endian, 32 bytes::

    offset  0  magic "MPQ2"                    offset 16  plan hash  (8)
            4  1 if a rank found a foreign             24  0          (8)
               hash, else 0     (4)
            8  call number      (8)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

MAGIC = b"MPQ2"
_HEADER = struct.Struct("<4sIQQ8x")
HEADER_NBYTES = _HEADER.size


@dataclass(frozen=True)
class Plan:
    """What all ranks of a call must agree on.

    Attributes
    ----------
    kind : str
        "allreduce", "reduce_scatter" or "allgather".
    count : int
        Elements of the whole array (of all ranks together for an allgather).
    dtype, op, codec, algorithm : str
    segment : int
    feedback, measured : bool
        Whether residuals are kept, and whether the achieved error will be measured.
    blocking : bool
        Whether it is MPI's own blocking collective: MPI does not match it with a nonblocking one.
    check : str
    name : str
    """

    kind: str
    count: int
    dtype: str
    op: str
    codec: str
    algorithm: str
    segment: int
    feedback: bool
    measured: bool
    blocking: bool
    check: str
    name: str

    @cached_property
    def hash(self) -> int:
        text = json.dumps(self.values())
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")

    def values(self) -> dict[str, Any]:
        return asdict(self)

    def binds(self, size: int) -> bool:
        """Whether every rank needs something from every other, so that neighbours' checks do."""
        return self.count >= (1 if self.kind == "allreduce" else size)

    def header(self, seq: int, foreign: bool = False) -> bytes:
        return _HEADER.pack(MAGIC, foreign, seq, self.hash)


def read_header(header: bytes) -> tuple[bool, int, int]:
    """Whether a rank found a foreign hash, the call number, the plan's hash.

    Raises
    ------
    ValueError
        If it is no header.
    """
    if len(header) != HEADER_NBYTES:
        raise ValueError(f"a header has {HEADER_NBYTES} bytes, not {len(header)}")
    magic, foreign, seq, plan_hash = _HEADER.unpack(header)
    if magic != MAGIC or foreign > 1:
        raise ValueError(f"not a header: {header!r}")
    return bool(foreign), seq, plan_hash


plan_of = lru_cache(maxsize=1024)(Plan)
"""The plan of some fields; the same object, with its hash, for the calls of a loop."""

_SHOWN = {
    "kind": "collective",
    "count": "shape (elements)",
    "check": "option check",
    "measured": "stats='error'",
}


def difference(plans: Mapping[int, Mapping[str, Any]]) -> str | None:
    """The fields in which the plans of some ranks differ, in words; None if there are none.

    The same text on every rank that knows the same plans.
    """
    found = []
    for name in (f.name for f in fields(Plan)):
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(plans):
            ranks_of.setdefault(repr(plans[rank].get(name)), []).append(rank)
        if len(ranks_of) > 1:
            parts = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items()]
            found.append(f"{_SHOWN.get(name, name)} is {' and '.join(parts[:4])}")
    return "; ".join(found) or None


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown}" + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
