"""The runner of adaptive calls: each message chooses its bits when it is sent.

It carries out the same programs as `mpiquant.execute`, with the same sums in the same order, but
for two things.  A message says itself how many bits it has, and comes in parts, so what is received
is put together first.  And what is ready to be sent waits in a queue until its link has room, and
is encoded then: with the bits that the time left allows, and not before the peer is about to take
it.

A partial sum may be cut short between two parts, if the time that was its share is over.  A final
sum is never cut; its owner chooses the bits of each piece when it sends it first, and the others
send on what came.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mpiquant import trace
from mpiquant.codecs import AqatCodec, Codec, UniformCodec
from mpiquant.codecs._mixed import hop_between
from mpiquant.codecs.aqat import EXACT_BITS, codec_of
from mpiquant.codecs.prefix import decode_prefix
from mpiquant.execute import PendingRequest, ProgramRunner, Transport
from mpiquant.links import PART_S, Link, Links
from mpiquant.parts import (
    ACK,
    BUSY,
    GUESS,
    HEADER_NBYTES,
    LAST,
    SILENT,
    Assembly,
    End,
    Header,
    ends_of,
    read_part,
)
from mpiquant.pool import pool
from mpiquant.program import Message, Program, Segment
from mpiquant.rate import UNKNOWN_BITS, expected_bits, share_s, slowest, with_reserve
from mpiquant.stats import Stats
from mpiquant.typing import Array, Bytes

WINDOW = 4
"""Receives posted ahead for each peer."""


@dataclass
class _Stream:
    """What comes from one peer: its messages in order, and acknowledgements between them."""

    expected: deque[tuple[int, Message]] = field(default_factory=deque)
    posted: deque[tuple[PendingRequest, Bytes]] = field(default_factory=deque)
    unacknowledged: int = 0
    longest: int = 0
    number: int = 0
    assembly: Assembly | None = None


@dataclass
class _Final:
    """Bytes of a final segment, until they were sent for the last time."""

    bits: int
    wire: Bytes
    owner: Assembly | Bytes
    uses: int

    def release(self) -> None:
        self.uses -= 1
        if self.uses == 0:
            if isinstance(self.owner, Assembly):
                self.owner.release()
            else:
                pool.give(self.owner)


@dataclass
class _Sum:
    """What a segment is made of: own values, of the input if `fresh`, and what was received."""

    segment: Segment
    fresh: bool
    received: Assembly | None = None


class AdaptiveExecution(ProgramRunner):
    """One adaptive call on one rank; like `mpiquant.execute.Execution`.

    Parameters
    ----------
    program, transport, x, out, rest, stream, stats
        As there.
    codec : AqatCodec
    links : Links
    deadline : float
        On the clock of `time.perf_counter`; NaN if it is not known, which gives `UNKNOWN_BITS`.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        x: Array,
        out: Array,
        rest: Array | None,
        stream: int,
        stats: Stats,
        *,
        codec: AqatCodec,
        links: Links,
        deadline: float,
    ) -> None:
        super().__init__(program, transport, x, out, rest, stream, stats)
        self.codec = codec
        self.levels = codec.levels(out.dtype)
        self.links = links
        self.begun_at = time.perf_counter()
        self.timed = not math.isnan(deadline)
        self.deadline = math.inf
        if self.timed:
            self.deadline = float(with_reserve(deadline, self.begun_at, codec.margin))
        self.values_left = program.raw_nbytes // out.itemsize
        self.values_chosen = self.bits_chosen = 0
        self.heard: dict[int, float] = {}  # bandwidths of slowest links, as peers know them
        self.ended = False
        self.handled = 0
        self.assembled: dict[int, Assembly] = {}  # by number of the receive
        self.streams: dict[int, _Stream] = {}
        for number, message in enumerate(program.recvs):
            stream_in = self._stream(message.peer)
            stream_in.expected.append((number, message))
            stream_in.longest = max(stream_in.longest, message.nbytes)
        self.waiting = 0  # messages in the queues of the links
        self.numbers: dict[int, int] = {}  # of the next message to each peer
        self.used: list[Link] = []  # to those peers
        self.sends = program.sends_by_peer
        self.sending: deque[tuple[PendingRequest, Bytes, bool]] = deque()
        self.finals: dict[int, _Final] = {}
        self.complete: dict[int, _Sum] = {}  # final sums that are to be encoded, by offset

    # ---- state machine ----

    def start(self) -> None:
        """Post the first receives and queue the first sends."""
        least = codec_of(self.codec.lowest).nbytes(self.values_left, self.out.dtype)
        self.links.begin(self, self.deadline, least)
        self.links.expect(self, self.deadline, self.values_left)
        for message in self.program.first_sends:
            self._send(message)
        for peer, stream in self.streams.items():
            self._post(peer, stream)
        self.links.pump(time.perf_counter())

    def advance(self) -> bool:
        """Do all that can be done now; True at the end of the call."""
        self._receive()
        recvs = self.program.recvs
        while self.handled in self.assembled:
            self._handle(recvs[self.handled], self.assembled.pop(self.handled))
            self.handled += 1
            self.moved = True
            self.moved |= self.links.pump(time.perf_counter())
        self.moved |= self.links.pump(time.perf_counter())
        if self.sending:
            self._end_sends()
        if self.handled < len(recvs) or self.waiting or self.sending:
            return False
        if any(stream.unacknowledged for stream in self.streams.values()):
            return False
        if not self.ended:
            self._end()
        return True

    def _end(self) -> None:
        self.ended = True
        self.links.finish(self, self.lowest, self._verdict())
        self.stats.encode_s += self.encode_s
        self.stats.decode_s += self.decode_s

    def _verdict(self) -> int:
        """Whether its bits should have been more, 1, or fewer, -1; 0 if neither.

        Fewer would not have helped a call that was late by its latencies, or by waiting for others.
        """
        if not self.timed or not self.values_chosen:
            return 0
        mean_bits = self.bits_chosen / self.values_chosen
        now = time.perf_counter()
        if now < self.deadline:
            return int(mean_bits < self.codec.highest)
        moved = self.links.bandwidth(self.lowest) * (now - self.begun_at)
        return -int(mean_bits > self.codec.lowest and self.bits_chosen / 8 > moved / 2)

    def abandon(self) -> None:
        """Send nothing more, since the call is over; perhaps it has failed."""
        if not self.ended:
            self.links.forget(self)

    @property
    def lowest(self) -> float:
        """Bandwidth of the slowest link that this call knows of; NaN if it knows none."""
        known = list(self.heard.values())  # no comprehension: behind a kernel, each frame costs
        for link in self.used:
            known.append(link.out.bandwidth)
        return slowest(*known)

    def waits_for(self) -> int | None:
        """The rank whose message is due next, or that has not acknowledged all of ours."""
        if self.handled < len(self.program.recvs):
            return self.program.recvs[self.handled].peer
        return next((p for p, stream in self.streams.items() if stream.unacknowledged), None)

    # ---- receives ----

    def _stream(self, peer: int) -> _Stream:
        return self.streams.setdefault(peer, _Stream())

    def _post(self, peer: int, stream: _Stream) -> None:
        """Post receives for what is certain to come: a part of each message, and each answer.

        To be called whenever one was received, or more became certain.
        """
        certain = min(len(stream.expected) + stream.unacknowledged, WINDOW)
        while len(stream.posted) < certain:
            buffer = pool.take(HEADER_NBYTES + stream.longest)
            stream.posted.append((self.transport.irecv(buffer, peer), buffer))

    def _receive(self) -> None:
        for peer, stream in self.streams.items():
            while stream.posted and stream.posted[0][0].Test():
                _, buffer = stream.posted.popleft()
                self.moved = True
                header, payload = read_part(buffer)
                now = time.perf_counter()
                if header.flags & ACK:
                    stream.unacknowledged -= 1
                    guessed = bool(header.flags & GUESS)
                    self.links.acknowledged(peer, self, now, header.bandwidth, guessed)
                    pool.give(buffer)
                else:
                    self._take(peer, stream, header, payload, buffer, now)
                self._post(peer, stream)

    def _take(
        self, peer: int, stream: _Stream, header: Header, payload: Bytes, buffer: Bytes, now: float
    ) -> None:
        self.links.arrived(now, header.nbytes, bool(header.flags & BUSY))
        self.heard[peer] = header.bandwidth
        if not header.flags & SILENT:
            known = self.links.incoming.bandwidth
            flags = ACK + GUESS if self.links.is_guessing else ACK
            answer = Header(
                flags, 0, 0, header.number, header.start, header.values, 0, known
            ).pack()
            self.sending.append((self.transport.isend(answer, peer), answer, False))
            self.stats.header_bytes += answer.nbytes
        if not stream.expected or header.number != stream.number:
            raise ValueError(f"message {header.number} came from rank {peer}: not expected")
        number, message = stream.expected[0]
        if stream.assembly is None:
            (segment,) = message.segments
            stream.assembly = Assembly(segment.start, segment.count, self.out.dtype)
        if stream.assembly.add(header, payload, buffer):
            self.assembled[number] = stream.assembly
            stream.assembly = None
            stream.number += 1
            stream.expected.popleft()

    # ---- what receives lead to ----

    def _handle(self, message: Message, assembly: Assembly) -> None:
        (segment,) = message.segments
        if message.final:
            assert assembly.header is not None
            final = _Final(assembly.header.bits, assembly.wire, assembly, self._uses(segment))
            self.finals[segment.offset] = final
            for send in message.then:
                self._send(send)
            self._decode(segment, final)
            return
        if message.fused is not None:
            self._queue(message.fused, _Sum(segment, message.fresh, assembly))
        elif message.finalize is not None:
            self.complete[message.finalize.offset] = _Sum(message.finalize, message.fresh, assembly)
        else:
            self._add(segment, message.fresh, assembly)
        for send in message.then:
            self._send(send)

    def _add(self, segment: Segment, fresh: bool, assembly: Assembly) -> None:
        a, b = segment.start, segment.stop
        codec, wire = assembly.format()
        begin = time.perf_counter()
        codec.decode_add(wire, (self.source if fresh else self.out)[a:b], self.out[a:b])
        self._spent("decode", "decode and add", begin)
        assembly.release()

    def _decode(self, segment: Segment, final: _Final) -> None:
        begin = time.perf_counter()
        out = self.out[segment.start : segment.stop]
        self.nonfinite |= codec_of(final.bits).decode(final.wire, out)
        self._spent("decode", "decode", begin)
        final.release()

    # ---- bits ----

    def choose(self, segment: Segment, peer: int, now: float, final: bool) -> tuple[int, float]:
        """Bits for the values of the next message, and its share of the time left in seconds.

        Something of every rank went into a final sum, and word of its links came with it.
        """
        everywhere = final and bool(self.heard)
        bandwidth = self.links.bandwidth(self.lowest, everywhere)
        allowed = self.links.allowed_bits(self, now, peer, bandwidth)
        if allowed != allowed or not self.timed:
            allowed = UNKNOWN_BITS + 1
        bits = self.codec.level(self.levels, allowed, segment.count, self.out.dtype)
        share = share_s(max(self.deadline - now, 0.0), segment.count, self.values_left)
        self.account(segment.count, bits)
        return bits, share

    def account(self, values: int, bits: int) -> None:
        """Note that so many values have their bits; the call will go on about so."""
        self.values_left -= values
        self.values_chosen += values
        self.bits_chosen += bits * values
        most_bits = expected_bits(self.bits_chosen, self.values_chosen)
        self.links.expect(self, self.deadline, self.values_left, most_bits)

    # ---- encoding ----

    def final_of(self, segment: Segment, peer: int, now: float) -> _Final:
        """Bytes of a final segment; encoded now, and decoded, if the sum is this rank's."""
        known = self.finals.get(segment.offset)
        if known is not None:
            self.account(segment.count, known.bits)
            return known
        bits, _ = self.choose(segment, peer, now, final=True)
        codec = codec_of(bits)
        buffer = pool.take(codec.nbytes(segment.count, self.out.dtype))
        self.encode(self.complete.pop(segment.offset), codec, buffer)
        final = _Final(bits, buffer, buffer, self._uses(segment))
        self.finals[segment.offset] = final
        self._decode(segment, final)
        return final

    def _uses(self, segment: Segment) -> int:
        """Of a final segment: its decoding, and its sends."""
        assert self.program.final_sends is not None
        return 1 + self.program.final_sends.get(segment.offset, 0)

    def encode(self, total: _Sum, codec: Codec, wire: Bytes) -> None:
        """Encode own values, plus those that were received if there are any."""
        begin = time.perf_counter()
        segment, received = total.segment, total.received
        x = (self.source if total.fresh else self.out)[segment.start : segment.stop]
        residual = self._residual(segment)
        stream, index = self.stream ^ segment.origin, segment.start - segment.origin
        if received is None:
            codec.encode(x, wire, residual=residual, stream=stream, index=index)
        else:
            came, bytes_in = received.format()
            hop_between(
                came, bytes_in, x, codec, wire, residual=residual, stream=stream, index=index
            )
            received.release()
        self._spent("encode", "encode" if received is None else "hop", begin)

    def keep_rest_of(self, segment: Segment, codec: UniformCodec, wire: Bytes, end: End) -> None:
        """Make the residual that of a message cut short."""
        if self.rest is None:
            return
        count = segment.count
        whole, sent = np.empty((2, count), self.out.dtype)
        codec.decode(wire, whole)
        decode_prefix(codec, wire[: end.stop], sent, end.planes)
        self.rest[segment.start : segment.stop] += whole - sent

    # ---- sends ----

    def _send(self, message: Message) -> None:
        if message.final:
            for segment in message.encode:
                self.complete[segment.offset] = _Sum(segment, message.fresh)
            self._queue(message, None)
        elif message.encode:  # else it is fused with what was received
            (segment,) = message.segments
            self._queue(message, _Sum(segment, message.fresh))

    def _queue(self, message: Message, total: _Sum | None) -> None:
        self._stream(message.peer)
        self.waiting += 1
        self.links.queue(message.peer, _Outgoing(self, message, total))

    def next_number(self, peer: int) -> int:
        number = self.numbers.get(peer, 0)
        if number == 0:
            self.used.append(self.links.to(peer))
        self.numbers[peer] = number + 1
        return number

    def isend(self, buffer: Bytes, peer: int, answered: bool) -> None:
        """Send a part, in a buffer of the pool."""
        self.sending.append((self.transport.isend(buffer, peer), buffer, True))
        if answered:
            self.streams[peer].unacknowledged += 1
            self._post(peer, self.streams[peer])
        self.stats.messages += 1
        self.stats.wire_bytes += buffer.nbytes - HEADER_NBYTES
        self.stats.header_bytes += HEADER_NBYTES

    def _end_sends(self) -> None:
        while self.sending and self.sending[0][0].Test():
            _, buffer, pooled = self.sending.popleft()
            self.moved = True
            if pooled:
                pool.give(buffer)


class _Outgoing:
    """A message on its way out (see `mpiquant.links.Outgoing`)."""

    def __init__(self, execution: AdaptiveExecution, message: Message, total: _Sum | None) -> None:
        self.key = execution
        self.deadline = execution.deadline
        self.message = message
        self.total = total
        self.number = execution.next_number(message.peer)
        self.wire: Bytes | None = None
        self.ends: deque[End] = deque()
        self.begin = 0
        self.bits = 0
        self.planes = 0
        self.until = math.inf
        self.done = False

    def send_part(self, now: float, busy: bool) -> tuple[int, bool]:
        if self.wire is None:
            self._begin(now)
        assert self.wire is not None
        flags = BUSY if busy else 0
        if self.begun() and self._is_late(now):
            self._cut()
            payload = self.wire[:0]
            flags |= LAST
        else:
            end = self.ends.popleft()
            payload = self.wire[self.begin : end.stop]
            self.begin, self.planes = end
            flags |= 0 if self.ends else LAST
        if flags & LAST and self.number == self.key.sends[self.message.peer] - 1:
            flags |= SILENT  # the call need not wait for an answer that nothing depends on
        self._isend(payload, flags)
        if flags & LAST:
            self._finish()
        return HEADER_NBYTES + payload.nbytes, not flags & SILENT

    def begun(self) -> bool:
        return self.begin > 0

    def ended(self) -> bool:
        return self.done

    def _begin(self, now: float) -> None:
        execution, (segment,) = self.key, self.message.segments
        count = segment.count
        if self.total is None:
            final = execution.final_of(segment, self.message.peer, now)
            self.bits, self.wire = final.bits, final.wire
        else:
            self.bits, share = execution.choose(segment, self.message.peer, now, final=False)
            self.until = now + 1.5 * share + PART_S
            self.wire = pool.take(codec_of(self.bits).nbytes(count, execution.out.dtype))
            execution.encode(self.total, codec_of(self.bits), self.wire)
        bandwidth = execution.links.bandwidth(execution.lowest)
        target = execution.links.part_nbytes(bandwidth)
        self.ends = deque(ends_of(codec_of(self.bits), count, execution.out.dtype, target))
        trace.active.count("bits", self.bits)
        execution.stats.sent(self.bits, count, final=self.message.final)

    def _is_late(self, now: float) -> bool:
        """Whether the next part is one too many."""
        if self.message.final or self.bits == EXACT_BITS:
            return False
        bandwidth = self.key.links.bandwidth(self.key.lowest)
        takes_s = (self.ends[0].stop - self.begin) / bandwidth if bandwidth == bandwidth else 0.0
        return now + takes_s > self.until

    def _cut(self) -> None:
        (segment,) = self.message.segments
        codec = codec_of(self.bits)
        assert isinstance(codec, UniformCodec)
        assert self.wire is not None
        self.key.keep_rest_of(segment, codec, self.wire, End(self.begin, self.planes))
        self.key.stats.cut_messages += 1

    def _isend(self, payload: Bytes, flags: int) -> None:
        execution, (segment,) = self.key, self.message.segments
        lowest = execution.lowest
        count = segment.count
        nbytes, planes = payload.nbytes, self.planes
        buffer = pool.take(HEADER_NBYTES + nbytes)
        header = Header(flags, self.bits, planes, self.number, segment.start, count, nbytes, lowest)
        header.pack_into(buffer)
        buffer[HEADER_NBYTES:] = payload
        execution.isend(buffer, self.message.peer, not flags & SILENT)

    def _finish(self) -> None:
        self.done = True
        self.key.waiting -= 1
        (segment,) = self.message.segments
        if self.message.final:
            self.key.finals[segment.offset].release()
        elif self.wire is not None:
            pool.give(self.wire)
        self.wire = None
