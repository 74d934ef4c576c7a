"""The runner of sparse calls: each rank's own positions, and the values there.

`sparse_allgather`: each rank's message goes once around the ring, and all ranks add up what they
got, in the order of the ranks.  Positions that were drawn are not sent, but drawn again.  Cost:
(N-1) (alpha + m beta) for messages of m bytes; traffic grows with the ranks.

`sparse_reduce_scatter`: each rank sends every other one what falls into its range of the array; a
rank adds that up, and sends the largest sums of its range around the ring, a part of 1/N of what
each rank has sent.  What it keeps back stays in its residual.  Cost: 2 (N-1) (alpha + m/N beta):
traffic does not grow with the ranks.  Source: as Li and Hoefler (2022, Ok-Topk) split and select
again, with equal ranges.

Long arrays go in sections, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpiquant._call import Call, Steps
from mpiquant.codecs import Sparsifier
from mpiquant.codecs._block import mix_key
from mpiquant.codecs.sparse_message import decode_message, encode_message
from mpiquant.collectives import SPLIT, own_part
from mpiquant.execute import Runner
from mpiquant.job import Job
from mpiquant.program import cut
from mpiquant.stats import Stats
from mpiquant.typing import Array, Bytes

SECTION = 1 << 27
"""Values of a section: no message of one is longer than MPI can count."""


class _Part(NamedTuple):
    """What of a rank's selection is in a section, begin ... end - 1."""

    begin: int
    end: int
    at: Array
    """Positions, from `begin` on."""
    values: Array
    """A copy, which what the codec loses replaces."""

    def range_of(self, peer: int, size: int) -> slice:
        """Elements whose sums a rank makes."""
        own = own_part(self.end - self.begin, peer, size)
        return slice(self.begin + own.start, self.begin + own.stop)


class SparseExchange(Runner):
    """One sparse call on one rank.

    Parameters
    ----------
    job : Job
        An allreduce.
    call : Call
    codec : Sparsifier
    stats : Stats
    """

    def __init__(self, job: Job, call: Call, codec: Sparsifier, stats: Stats) -> None:
        super().__init__(call, stats)
        self.job, self.call, self.codec = job, call, codec
        self.rank, self.size = call.channel.rank, call.channel.size
        self.sends: list[MPI.Request] = []
        self.nonfinite = False

    def run(self, algorithm: str) -> Steps[bool]:
        """Sum up; True if the result has values that are no numbers."""
        job = self.job
        parts = list(self._select())  # all of it, before the first result is written
        job.out[...] = 0
        for part in parts:
            if algorithm == SPLIT:
                yield from self._split_and_gather(part)
            elif self.codec.drawn:
                yield from self._gather_drawn(part)
            else:
                yield from self._gather_all(part)
        for request in self.sends:
            yield from self.call.until(request)
        self.stats.raw_bytes += round(2 * (self.size - 1) / self.size * job.out.nbytes)
        self.stats.header_bytes += self.call.header_bytes
        self.stats.encode_s += self.encode_s
        self.stats.decode_s += self.decode_s
        return self.nonfinite

    # ---- what is sent ----

    def _select(self) -> Iterator[_Part]:
        begin = time.perf_counter()
        source = self.job.x if self.job.rest is None else self.job.rest
        at = self._positions(source, self.rank)
        values = source[at]
        self._spent("encode", "select", begin)
        for first, end in cut(0, source.size, SECTION):
            inside = _within(at, first, end)
            yield _Part(first, end, at[inside] - first, values[inside])

    def _positions(self, source: Array, rank: int) -> Array:
        return self.codec.positions(source, mix_key(rank, self.call.seq))

    def _encode(self, at: Array, values: Array, place: slice) -> Bytes:
        """A message about a place of the array; what its codec lost is in the values then."""
        begin = time.perf_counter()
        stream = mix_key(self.rank, self.call.seq, place.start)
        total = place.stop - place.start
        wire = encode_message(at, values, total, self.codec.values, stream)
        self._spent("encode", "encode", begin)
        return wire

    def _add(self, wire: Bytes, total: Array) -> bool:
        """total += what a message has; True if that has values that are no numbers."""
        begin = time.perf_counter()
        at, values, nonfinite = decode_message(wire, total.size, self.codec.values, total.dtype)
        _add_at(total, at, values)
        self._spent("decode", "decode", begin)
        return nonfinite

    # ---- the ways ----

    def _gather_all(self, part: _Part) -> Steps[None]:
        job, values = self.job, part.values
        place = slice(part.begin, part.end)
        wire = self._encode(part.at, values, place)
        if job.rest is not None:
            job.rest[place][part.at] = values
        for each in (yield from self._around(wire)):
            self.nonfinite |= self._add(each, job.out[place])

    def _gather_drawn(self, part: _Part) -> Steps[None]:
        """The same without positions: each rank draws those of all others again."""
        job, codec, dtype = self.job, self.codec.values, part.values.dtype
        out = job.out[part.begin : part.end]
        places = []
        for rank in range(self.size):
            at = self._positions(job.x, rank)
            places.append(at[_within(at, part.begin, part.end)] - part.begin)
        lengths = [codec.nbytes(at.size, dtype) for at in places]
        wire, values = np.empty(lengths[self.rank], np.uint8), part.values
        stream = mix_key(self.rank, self.call.seq, part.begin)
        codec.encode(values, wire, residual=values, stream=stream)
        if job.rest is not None:
            job.rest[part.begin : part.end][part.at] = values
        for at, each in zip(places, (yield from self._around(wire, lengths)), strict=True):
            got = np.empty(at.size, dtype)
            self.nonfinite |= codec.decode(each, got)
            _add_at(out, at, got)

    def _split_and_gather(self, part: _Part) -> Steps[None]:
        job, rest = self.job, self.job.rest
        ranges = [part.range_of(peer, self.size) for peer in range(self.size)]
        values, wires = part.values, []
        for place in ranges:
            start = place.start - part.begin
            inside = _within(part.at, start, place.stop - part.begin)
            wires.append(self._encode(part.at[inside] - start, values[inside], place))
        if rest is not None:
            rest[part.begin : part.end][part.at] = values
        own = ranges[self.rank]
        total = np.zeros(own.stop - own.start, job.out.dtype)
        for wire in (yield from self._swap(wires)):
            self._add(wire, total)
        at = self.codec.again(total, max(1, -(-part.at.size // self.size)))
        values = total[at]
        wire = self._encode(at, values, own)
        if rest is not None:
            total[at] = values
            rest[own] += total
        for place, each in zip(ranges, (yield from self._around(wire)), strict=True):
            self.nonfinite |= self._add(each, job.out[place])

    # ---- messages ----

    def _send(self, wire: Bytes, peer: int) -> None:
        self.sends.append(self.call.isend(wire, peer))
        self.stats.messages += 1
        self.stats.wire_bytes += wire.nbytes

    def _lengths(self, mine: list[int]) -> Steps[list[int]]:
        """What each rank has for this one, of numbers that each has for all ranks."""
        found = np.zeros(self.size, np.int64)
        found[self.rank] = mine[self.rank]
        others = [(self.rank + offset) % self.size for offset in range(1, self.size)]
        requests = [
            (peer, self.call.irecv(found[peer : peer + 1].view(np.uint8), peer)) for peer in others
        ]
        for peer in others:
            self.sends.append(self.call.isend(np.array([mine[peer]]).view(np.uint8), peer))
            self.stats.header_bytes += 8
        for peer, request in requests:
            yield from self.call.until_from(request, peer)
        return [int(n) for n in found]

    def _swap(self, wires: list[Bytes]) -> Steps[list[Bytes]]:
        """A message to and from each rank; those that came, by rank."""
        lengths = yield from self._lengths([wire.size for wire in wires])
        found = [np.empty(n, np.uint8) for n in lengths]
        found[self.rank] = wires[self.rank]
        requests = []
        for offset in range(1, self.size):
            left, right = (self.rank - offset) % self.size, (self.rank + offset) % self.size
            requests.append((left, self.call.irecv(found[left], left)))
            self._send(wires[right], right)
        for peer, request in requests:
            yield from self.call.until_from(request, peer)
        return found

    def _around(self, wire: Bytes, lengths: list[int] | None = None) -> Steps[list[Bytes]]:
        """Each rank's message, by rank: all go around the ring, byte for byte."""
        if lengths is None:
            lengths = yield from self._lengths([wire.size] * self.size)
        found = [np.empty(n, np.uint8) for n in lengths]
        found[self.rank] = wire
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        origins = [(self.rank - hop) % self.size for hop in range(self.size)]
        requests = [self.call.irecv(found[origin], left) for origin in origins[1:]]
        for origin, request in zip(origins, requests, strict=False):
            self._send(found[origin], right)
            yield from self.call.until_from(request, left)
        return found


def _within(at: Array, begin: int, end: int) -> slice:
    """Which of some ascending positions are begin ... end - 1."""
    return slice(*np.searchsorted(at, (begin, end)))


def _add_at(total: Array, at: Array, values: Array) -> None:
    """total[at] += values; no position is there twice."""
    with np.errstate(all="ignore"):  # as MPI: who sums infinities sees it in the result
        total[at] += values
