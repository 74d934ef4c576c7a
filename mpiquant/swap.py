"""Native reductions of two ranks that exchange their arrays and add them up themselves.

A swap takes as long over a wire as MPI's own reduction and, with its tags, cannot mix up different
calls.  Within a node it is faster than the reductions of MPICH and Open MPI, but not than Intel's.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import numpy as np
from mpi4py import MPI

from mpiquant._call import Call, Steps
from mpiquant._comm import Channel
from mpiquant.program import cut
from mpiquant.typing import Array

SWAP_NBYTES = 64 << 10
"""Up to this size arrays are swapped whole, over wires too."""

HALVES_NBYTES, HALVES_MAX_NBYTES = 256 << 10, 1 << 31
"""Between these sizes halves are the fastest on MPICH; beyond, they no longer fit a count."""

PIECE_NBYTES = 1 << 20
"""Length of a piece, which caches hold."""


class Swap(Enum):
    """What two ranks exchange."""

    WHOLE = "whole"
    """Each gets the other's array and adds its own to it."""
    HALVES = "halves"
    """Each gets its half of the other's array, and sends the sum of the halves back."""
    PIECES = "pieces"
    """As whole arrays, piece by piece."""


def swap_of(kind: str, op: MPI.Op, nbytes: int, channel: Channel) -> Swap | None:
    """How two ranks swap their arrays; None where MPI's own reduction is called."""
    if channel.size != 2 or kind != "allreduce" or not op.is_predefined:
        return None
    if nbytes <= SWAP_NBYTES:
        return Swap.WHOLE
    if len(channel.nodes) > 1:
        return None
    if channel.vendor == "MPICH" and HALVES_NBYTES <= nbytes <= HALVES_MAX_NBYTES:
        return Swap.HALVES
    if channel.vendor == "MPICH":
        return Swap.WHOLE if nbytes < HALVES_NBYTES else Swap.PIECES
    if channel.vendor == "Open MPI":
        return Swap.WHOLE if nbytes <= PIECE_NBYTES else Swap.PIECES
    return None


def halves(size: int, rank: int) -> tuple[slice, slice]:
    """Our half of an array, and the other rank's."""
    parts = slice(0, size // 2), slice(size // 2, size)
    return parts[rank], parts[1 - rank]


def run_swap(
    call: Call, swap: Swap, x: Array, out: Array, op: MPI.Op, *, in_place: bool
) -> Steps[None]:
    """Swap `x`, which is `out` if the reduction is in place."""
    if swap is Swap.HALVES:
        yield from _run_halves(call, x, out, op, in_place)
    else:
        length = PIECE_NBYTES // x.itemsize if swap is Swap.PIECES else x.size
        yield from _run_pieces(call, x, out, op, in_place, length)


def _run_halves(call: Call, x: Array, out: Array, op: MPI.Op, in_place: bool) -> Steps[None]:
    peer = 1 - call.channel.rank
    ours, theirs = halves(x.size, call.channel.rank)
    got = np.empty_like(out[ours]) if in_place else out[ours]
    receiving = call.irecv(got.view(np.uint8), peer)
    sending = call.isend(x[theirs].view(np.uint8), peer)
    call.opened = True
    yield from call.until_from(receiving, peer)
    op.Reduce_local(*((got, out[ours]) if in_place else (x[ours], got)))
    yield from call.until(sending)  # it reads what comes next if the reduction is in place
    yield from finish_halves(call, out)


def finish_halves(call: Call, out: Array) -> Steps[None]:
    """Exchange the sums of the halves."""
    peer = 1 - call.channel.rank
    ours, theirs = halves(out.size, call.channel.rank)
    receiving = call.irecv(out[theirs].view(np.uint8), peer)
    sending = call.isend(out[ours].view(np.uint8), peer)
    yield from call.until_from(receiving, peer)
    yield from call.until(sending)


def _run_pieces(
    call: Call, x: Array, out: Array, op: MPI.Op, in_place: bool, length: int
) -> Steps[None]:
    peer = 1 - call.channel.rank
    parts = [slice(*ends) for ends in cut(0, x.size, max(length, 1))]
    sends = [call.isend(x[part].view(np.uint8), peer) for part in parts]
    spare = [np.empty_like(out[part]) for part in parts[:2]] if in_place else []

    def receive(i: int) -> tuple[Array, MPI.Request]:
        part = out[parts[i]]
        got = spare[i % 2][: part.size] if in_place else part
        return got, call.irecv(got.view(np.uint8), peer)

    coming = deque(receive(i) for i in range(min(2, len(parts))))
    call.opened = True
    for i, part in enumerate(parts):
        got, request = coming.popleft()
        yield from call.until_from(request, peer)
        if in_place:
            yield from call.until(sends[i])  # it reads what is written to next
        op.Reduce_local(*((got, out[part]) if in_place else (x[part], got)))
        if i + 2 < len(parts):
            coming.append(receive(i + 2))
    for send in sends:
        yield from call.until(send)


def finish_first(call: Call, request: MPI.Request, x: Array, got: Array, op: MPI.Op) -> Steps[None]:
    """Wait for what the other rank sent first, and add ours to it."""
    yield from call.until_from(request, 1 - call.channel.rank)
    op.Reduce_local(x, got)
    for send in call.sends:
        yield from call.until(send)
