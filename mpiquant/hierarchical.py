"""Sums within nodes, where ranks share memory, on both sides of an allreduce across nodes.

The array is cut into *lanes*, as many as the smallest node has ranks.  On each node, one rank owns
each lane: it gets the others' parts of it and adds them up, exactly; then the owners of a lane on
all nodes sum it across the network; then each sends it to the other ranks of its node.  So what
crosses a node's network does not depend on how many ranks it has, and all of them have a share in
the work.

Cost: 2 (1 - 1/m) d within a node of m ranks, and the allreduce of d / lanes on each of its lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpiquant._call import Call, Steps
from mpiquant._comm import Nodes
from mpiquant.collectives import own_part
from mpiquant.pool import pool
from mpiquant.stats import Stats
from mpiquant.typing import Array

AHEAD = 2
"""Lanes of other ranks that are received while one is added."""


class Place(NamedTuple):
    """Where a rank is."""

    node: tuple[int, ...]
    """Ranks of its node."""
    local: int
    """Its place among them."""
    lanes: int
    across: tuple[int, ...]
    """Owners of its lane, by node; none if it owns none."""


def place_of(rank: int, nodes: Nodes) -> Place:
    node = next(node for node in nodes if rank in node)
    local, lanes = node.index(rank), min(map(len, nodes))
    across = tuple(node[local] for node in nodes) if local < lanes else ()
    return Place(node, local, lanes, across)


def runs(size: int, length: int) -> Nodes:
    """Nodes that are runs of so many ranks."""
    starts = range(0, size, length)
    return tuple(tuple(range(start, min(start + length, size))) for start in starts)


def run_hierarchical(
    call: Call,
    place: Place,
    source: Array,
    out: Array,
    stats: Stats,
    across: Callable[[Array, slice], Steps[None]],
) -> Steps[None]:
    """Sum `source` over all ranks into `out`, which may be the same memory.

    `across` sums this rank's lane, given as an array and as its place in `out`, over the nodes.
    """
    rank, others = call.channel.rank, [r for r in place.node if r != call.channel.rank]
    lanes = [own_part(out.size, lane, place.lanes) for lane in range(place.lanes)]
    foreign = [(lane, o) for lane, o in zip(lanes, place.node, strict=False) if o != rank]
    sends = [_send(call, source[lane], owner, stats) for lane, owner in foreign]
    total = None
    if place.across:
        total = yield from _sum_of_node(call, others, source[lanes[place.local]])
    for send in sends:
        yield from call.until(send)  # what they read may be written to from here on
    receives = [(o, call.irecv(out[lane].view(np.uint8), o)) for lane, o in foreign]
    if total is not None:
        own = lanes[place.local]
        yield from across(total, own)
        sends = [_send(call, out[own], peer, stats) for peer in others]
    for owner, receive in receives:
        yield from call.until_from(receive, owner)
    for send in sends:
        yield from call.until(send)


def _send(call: Call, values: Array, peer: int, stats: Stats) -> MPI.Request:
    stats.messages += 1
    stats.node_bytes += values.nbytes
    return call.isend(values.view(np.uint8), peer)


def _sum_of_node(call: Call, others: list[int], mine: Array) -> Steps[Array]:
    """The sum of a lane over the ranks of this node."""
    total = mine.copy()
    buffers = [pool.take(mine.nbytes) for _ in others[:AHEAD]]
    requests = [call.irecv(b, peer) for b, peer in zip(buffers, others, strict=False)]
    for i, peer in enumerate(others):
        buffer = buffers[i % AHEAD]
        yield from call.until_from(requests[i], peer)
        with np.errstate(all="ignore"):  # as MPI: who sums infinities sees it in the result
            np.add(total, buffer.view(mine.dtype), out=total)
        if i + AHEAD < len(others):
            requests.append(call.irecv(buffer, others[i + AHEAD]))
    for buffer in buffers:
        pool.give(buffer)
    return total
