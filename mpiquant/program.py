"""From a schedule to the messages of one rank: the pure half of the runner.

A *segment* is a piece of a chunk or of a partial message, short enough that its neighbours are on
the wire while it is in a kernel.  `compile_program` cuts the transfers of a schedule into messages
of one segment (partial) or of some neighbouring segments (final), fixes the order in which the
receives are handled, and notes for every send behind which receive its data are ready.

Messages between two ranks all travel with one tag, so both ends must post them in one order: that
of the steps.  Receives are handled in that order, and a send is never issued before an earlier
send to the same peer.

Where the next use of a received partial sum is to be sent on whole, the receive and the send become
one fused hop; the sum is never stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from mpiquant.codecs import EXACT, Codec
from mpiquant.collectives import ALGORITHMS, Step, Transfer, chunk_bounds, renamed

Kind = Literal["allreduce", "reduce_scatter", "allgather"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements start ... stop - 1, encoded as one piece."""

    start: int
    stop: int
    origin: int
    """First element of the chunk or partial message, from which blocks and random numbers count."""
    codec: Codec
    nbytes: int
    offset: int
    """Place in the buffer of final bytes; 0 for a partial message."""

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(eq=False, slots=True)
class Message:
    """One MPI message, at its sender or at its receiver."""

    peer: int
    final: bool
    segments: tuple[Segment, ...]
    fresh: bool = False
    """What is encoded, or added to, is still the rank's own input: nothing was received before."""
    encode: tuple[Segment, ...] = ()
    """At the sender: segments to encode now.  At the receiver: none."""
    fused: Message | None = None
    """At the receiver: the send whose bytes the fused hop makes."""
    finalize: Segment | None = None
    """At the receiver: the final segment that the fused hop makes."""
    then: list[Message] = field(default_factory=list)
    """At the receiver: sends that are ready behind this receive."""

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.segments)

    @property
    def offset(self) -> int:
        return self.segments[0].offset


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """All messages of one rank in one call, in order."""

    first_sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    final_nbytes: int
    final_sends: dict[int, int] | None
    """How often each final segment is sent, by offset; None if some are sent together."""
    sends_by_peer: dict[int, int]
    """Messages to each peer."""
    wire_nbytes: int
    """Bytes this rank sends."""
    raw_nbytes: int
    """Bytes it would send if nothing were compressed."""
    bounds: tuple[int, ...]
    never_encoded: tuple[tuple[int, int], ...]
    """Elements whose sum this rank keeps (after a reduce-scatter): they leave no residual."""
    exact: bool
    """Whether nothing is encoded: the final bytes are then those of the output."""
    gate: bool
    """Whether the first sends must wait for the agreement (see `mpiquant._comm`)."""


def cut(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Pieces of start ... stop - 1 of the given length, the last one shorter."""
    for first in range(start, stop, length):
        yield first, min(first + length, stop)


class _Compiler:
    def __init__(
        self, steps: list[Step], bounds: tuple[int, ...], codec: Codec, dtype: np.dtype, length: int
    ) -> None:
        self.steps = steps
        self.bounds = bounds
        self.codec = codec
        self.dtype = dtype
        granule = codec.granule
        self.length = max(granule, length // granule * granule)
        self.final_nbytes = 0
        self.chunks = [self._final_segments(c) for c in range(len(bounds) - 1)]
        # Send messages with the number of receives behind which they are ready, in step order.
        self.sends: list[tuple[int, Message]] = []
        self.recvs: list[Message] = []
        # For each chunk: its last receives so far, as (start, stop, number of the receive).
        self.latest: list[list[tuple[int, int, int]]] = [[] for _ in self.chunks]

    def _codec_for(self, count: int) -> Codec:
        raw = count * self.dtype.itemsize
        varies = self.codec.adaptive or self.codec.ragged
        return self.codec if varies or self.codec.nbytes(count, self.dtype) < raw else EXACT

    def _segments(self, start: int, stop: int, offset: int) -> list[Segment]:
        codec = self._codec_for(stop - start)
        segments = []
        for a, b in cut(start, stop, self.length):
            nbytes = codec.nbytes(b - a, self.dtype)
            segments.append(Segment(a, b, start, codec, nbytes, offset))
            offset += nbytes
        return segments

    def _final_segments(self, chunk: int) -> list[Segment]:
        start, stop = self.bounds[chunk], self.bounds[chunk + 1]
        segments = self._segments(start, stop, self.final_nbytes)
        self.final_nbytes += sum(s.nbytes for s in segments)
        return segments

    def messages(self, transfer: Transfer) -> list[Message]:
        """The messages of a transfer; the same at its two ends."""
        if not transfer.final:
            start, stop = self.bounds[transfer.first], self.bounds[transfer.last]
            return [Message(transfer.peer, False, (s,)) for s in self._segments(start, stop, 0)]
        messages: list[list[Segment]] = []
        room = 0
        for chunk in range(transfer.first, transfer.last):
            for segment in self.chunks[chunk]:
                if segment.count > room:
                    messages.append([])
                    room = 0 if self.codec.adaptive or self.codec.ragged else self.length
                messages[-1].append(segment)
                room -= segment.count
        return [Message(transfer.peer, True, tuple(m)) for m in messages]

    def interleaved(self, transfers: tuple[Transfer, ...]) -> list[tuple[Transfer, Message]]:
        """First messages of all transfers, then second ones, ..., so that no peer waits."""
        columns = [(t, self.messages(t)) for t in transfers]
        longest = max((len(m) for _, m in columns), default=0)
        return [(t, m[i]) for i in range(longest) for t, m in columns if i < len(m)]

    def ready_after(self, transfer: Transfer, message: Message) -> int:
        """Number of receives that must be handled before the message can be made."""
        ready = 0
        for chunk in range(transfer.first, transfer.last):
            for start, stop, number in self.latest[chunk]:
                if start < message.segments[-1].stop and message.segments[0].start < stop:
                    ready = max(ready, number)
        return ready

    def add_step(self, step: Step) -> None:
        for transfer, message in self.interleaved(step.sends):
            message.fresh = not self.latest[transfer.first]
            self.sends.append((self.ready_after(transfer, message), message))
        arrived: dict[int, list[tuple[int, int, int]]] = {}
        for transfer, message in self.interleaved(step.recvs):
            seen = arrived.get(transfer.first, [])
            start, stop = message.segments[0].start, message.segments[-1].stop
            message.fresh = not self.latest[transfer.first] and not any(
                a < stop and start < b for a, b, _ in seen
            )
            self.recvs.append(message)
            for chunk in range(transfer.first, transfer.last):
                arrived.setdefault(chunk, []).append((start, stop, len(self.recvs)))
        for chunk, entries in arrived.items():
            self.latest[chunk] = entries

    def attach(self) -> list[Message]:
        """Hang each send on its receive and choose who encodes; return the first sends."""
        last: dict[int, int] = {}
        ordered: list[tuple[int, int, Message]] = []
        for position, (ready, message) in enumerate(self.sends):
            last[message.peer] = max(ready, last.get(message.peer, 0))
            ordered.append((last[message.peer], position, message))
        ordered.sort(key=lambda item: item[:2])
        # Offsets of the final segments that need no encoding here: received, or encoded before.
        done = {s.offset for m in self.recvs if m.final for s in m.segments}
        reduced = any(not m.final for m in self.recvs)
        first: list[Message] = []
        for ready, _, message in ordered:
            recv = self.recvs[ready - 1] if ready else None
            self._assign(message, recv, done, reduced)
            (recv.then if recv else first).append(message)
        return first

    def _assign(
        self, message: Message, recv: Message | None, done: set[int], reduced: bool
    ) -> None:
        if not message.final:
            (segment,) = message.segments
            if recv is not None and _fits(recv, segment):
                recv.fused = message
            else:
                message.encode = (segment,)
            return
        own = [s for s in message.segments if s.offset not in done]
        done.update(s.offset for s in own)
        message.fresh = not reduced
        if recv is not None and len(own) == 1 and _fits(recv, own[0]):
            recv.finalize = own[0]
        else:
            message.encode = tuple(own)

    def final_sends(self, sent: list[Message]) -> dict[int, int] | None:
        """How often each final segment is sent, by offset; None if some are sent together."""
        final = [m for m in (*sent, *self.recvs) if m.final]
        if any(len(m.segments) > 1 for m in final):
            return None
        return dict(Counter(m.offset for m in sent if m.final))

    def never_encoded(self, sent: list[Message]) -> tuple[tuple[int, int], ...]:
        """What no encoding of this rank covers."""
        encoded = [s for m in sent for s in m.encode]
        encoded += [s for m in self.recvs if m.fused for s in m.fused.segments]
        encoded += [m.finalize for m in self.recvs if m.finalize]
        gaps, end = [], 0
        for start, stop in sorted((s.start, s.stop) for s in encoded):
            if start > end:
                gaps.append((end, start))
            end = max(end, stop)
        if end < self.bounds[-1]:
            gaps.append((end, self.bounds[-1]))
        return tuple(gaps)


def _fits(recv: Message, segment: Segment) -> bool:
    """Whether the receive's sum is just what the segment encodes, with the same blocks."""
    if recv.final or recv.fused is not None or recv.finalize is not None:
        return False
    (got,) = recv.segments
    same = (got.start, got.stop, got.origin) == (segment.start, segment.stop, segment.origin)
    return same and got.codec == segment.codec


def _steps(
    kind: Kind, algorithm: str, rank: int, size: int, count: int
) -> tuple[list[Step], tuple[int, ...]]:
    module = ALGORITHMS[algorithm]
    if kind == "allreduce":
        chunks = module.chunk_count(size)
        steps = module.reduce_steps(rank, size, chunks) + module.gather_steps(rank, size, chunks)
    elif kind == "reduce_scatter":
        chunks = size
        steps = module.reduce_steps(rank, size, chunks) + module.deliver_steps(rank, size)
    else:
        chunks = size
        steps = module.collect_steps(rank, size) + module.gather_steps(rank, size, chunks)
    return steps, chunk_bounds(count, chunks)


@lru_cache(maxsize=256)
def compile_program(
    kind: Kind,
    algorithm: str,
    rank: int,
    size: int,
    count: int,
    codec: Codec,
    dtype: np.dtype,
    length: int,
    ranks: tuple[int, ...] | None = None,
) -> Program:
    """The program of one rank.

    Parameters
    ----------
    kind : {"allreduce", "reduce_scatter", "allgather"}
    algorithm : str
        A key of `mpiquant.collectives.ALGORITHMS`.
    rank, size : int
    count : int
        Elements of the whole array (of all ranks together for an allgather).
    codec : Codec
    dtype : numpy.dtype
    length : int
        Elements of a segment; rounded down to whole granules of the codec, at least one.
    ranks : tuple of int, optional
        What the ranks of this program are called in its messages: those of a group.
    """
    steps, bounds = _steps(kind, algorithm, rank, size, count)
    if ranks is not None:
        steps = [renamed(step, ranks) for step in steps]
    compiler = _Compiler(steps, bounds, codec, dtype, length)
    for step in steps:
        compiler.add_step(step)
    first = compiler.attach()
    sent = [m for _, m in compiler.sends]
    values = sum(s.stop - s.start for m in sent for s in m.segments)
    return Program(
        first_sends=tuple(first),
        recvs=tuple(compiler.recvs),
        final_nbytes=compiler.final_nbytes,
        final_sends=compiler.final_sends(sent),
        sends_by_peer=dict(Counter(m.peer for m in sent)),
        wire_nbytes=sum(m.nbytes for m in sent),
        raw_nbytes=values * dtype.itemsize,
        bounds=bounds,
        never_encoded=compiler.never_encoded(sent),
        exact=all(s.codec == EXACT for c in compiler.chunks for s in c),
        # In an allreduce no rank ends without what others send after they checked; but a chunk that
        # only its first sender could hold back would arrive without this rank's check.
        gate=kind != "allreduce" or len(first) == len(sent) or count < len(bounds) - 1,
    )
