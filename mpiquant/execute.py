"""The runner: carries out a program on arrays, over any transport.

A state machine that `advance` moves as far as it can without blocking: receives are posted a few
messages ahead, handled in order, and each releases the sends that waited for it.  The codec enters
only here.

A partial message is encoded into a buffer of the pool; final bytes are received, decoded and sent
on without a copy (see `finals`).  If nothing is compressed, they are the output itself.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from typing import Literal, NamedTuple, Protocol

import numpy as np

from mpiquant import trace
from mpiquant.codecs import EXACT
from mpiquant.finals import place_finals
from mpiquant.pool import pool
from mpiquant.program import Message, Program, Segment
from mpiquant.stats import Stats
from mpiquant.typing import Array, Bytes

WINDOW, FEWEST, AHEAD = 16, 4, 1 / 8
"""Receives posted ahead: so many, or fewer if their buffers would take more than this part of the
array.  What arrives before its receive is posted, MPI copies, from memory that it takes fresh from
the system."""

CROWD, PATIENCE_S = 0.16, 1e-3
"""With so many times the bytes of the array on their way out in buffers of its own, a rank gives
those that shall receive them so much time before it makes more of them: what piles up takes memory,
and nobody gets it any sooner.  A limit of time, since ranks that wait for each other with no end
would wait for ever."""


TURN_S = 100e-6
"""After so long on a core a rank that begins a call lets others have it, if there are any."""


class PendingRequest(Protocol):
    def Test(self) -> bool: ...


class Transport(Protocol):
    """Nonblocking messages of one call; both methods keep the buffer alive until completion."""

    def isend(self, buffer: Bytes, peer: int) -> PendingRequest: ...

    def irecv(self, buffer: Bytes, peer: int) -> PendingRequest: ...


class _Sending(NamedTuple):
    """A message under way, and the buffer that begins with it."""

    request: PendingRequest
    wire: Bytes
    nbytes: int
    pooled: bool
    final: tuple[Segment, ...]
    peer: int
    begin: float


class Runner:
    """What all ways to carry out a call have: messages, statistics, clocks."""

    def __init__(self, transport: Transport, stats: Stats) -> None:
        self.transport = transport
        self.stats = stats
        self.moved = False
        self.encode_s = self.decode_s = 0.0

    def has_moved(self) -> bool:
        """Whether anything happened since the last time this was asked."""
        moved, self.moved = self.moved, False
        return moved

    def _spent(self, lane: Literal["encode", "decode"], name: str, begin: float) -> None:
        end = time.perf_counter()
        if lane == "encode":
            self.encode_s += end - begin
        else:
            self.decode_s += end - begin
        trace.active.span(lane, name, begin, end)


class ProgramRunner(Runner):
    """What both ways to carry out a program have: its arrays.

    See `Execution` for the parameters.
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
    ) -> None:
        super().__init__(transport, stats)
        self.program = program
        self.source = x if rest is None else rest
        self.out = out
        self.rest = rest
        self.stream = stream
        self.nonfinite = False

    def _residual(self, segment: Segment) -> Array | None:
        return None if self.rest is None else self.rest[segment.start : segment.stop]


class Execution(ProgramRunner):
    """One call on one rank.

    Parameters
    ----------
    program : Program
    transport : Transport
    x : (count,) array
        The input; never written, unless it is `out` or `rest`.
    out : (count,) array
        Gets the result; may be x.
    rest : (count,) array or None
        With error feedback: x plus the old residual on entry, the new residual on return.
    stream : int
        Key of the random numbers of this call on this rank.
    stats : Stats
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
    ) -> None:
        super().__init__(program, transport, x, out, rest, stream, stats)
        self.finals = place_finals(program, out)
        # Exact input can be sent from where it is, if nothing overwrites it meanwhile.
        self.zero_copy = rest is None and not np.may_share_memory(x, out)
        self.mpi_s = 0.0
        self.busy_s = 0.0  # in all that was not waiting
        self.ended = False
        self.handled = 0
        self.posted = 0
        self.ahead_nbytes = 0  # in receives that are posted
        self.receiving: deque[tuple[PendingRequest, Bytes]] = deque()
        self.sending: deque[_Sending] = deque()
        self.sending_nbytes = 0  # in buffers of the pool
        self.crowd_nbytes = CROWD * out.nbytes
        self.crowded_since = math.inf

    # ---- state machine ----

    def start(self) -> None:
        """Post the first receives and issue the first sends.

        On a core that ranks share, one that encoded all of its first sends at once would keep the
        others' wires idle for as long.
        """
        begin = since = time.perf_counter()
        self._post()
        for message in self.program.first_sends:
            self._send(message)
            if time.perf_counter() - since > TURN_S:
                os.sched_yield()
                since = time.perf_counter()
        self.busy_s += time.perf_counter() - begin

    def advance(self) -> bool:
        """Do all that can be done now; True at the end of the call."""
        recvs = self.program.recvs
        first, begin = self.handled, time.perf_counter()
        while self.handled < len(recvs):
            if self.sending_nbytes > self.crowd_nbytes and self._is_crowded(begin):
                return False
            request, buffer = self.receiving[0]
            arrived = request.Test()
            if not arrived and self.handled == first:
                return False  # all of it was waiting
            tested = time.perf_counter()
            self.mpi_s += tested - begin
            if not arrived:
                self.busy_s += tested - begin
                return False
            self.receiving.popleft()
            self.ahead_nbytes -= buffer.nbytes
            self._handle(recvs[self.handled], buffer)
            self.handled += 1
            self.moved = True
            self._post()
            now = time.perf_counter()
            self.busy_s += now - begin
            begin = now
        self._end_sends()
        if self.sending:
            return False
        if not self.ended:
            self._end()
        return True

    def _is_crowded(self, now: float) -> bool:
        """Whether to let others take what is on its way before more is sent."""
        self._end_sends()
        if self.sending_nbytes <= self.crowd_nbytes or now - self.crowded_since > PATIENCE_S:
            self.crowded_since = math.inf
            return False
        self.crowded_since = min(self.crowded_since, now)
        return True

    def _end(self) -> None:
        self.ended = True
        self.finals.end()
        stats = self.stats
        stats.encode_s += self.encode_s
        stats.decode_s += self.decode_s
        stats.mpi_s += self.mpi_s
        stats.python_s += self.busy_s - self.encode_s - self.decode_s - self.mpi_s

    def waits_for(self) -> int | None:
        """The rank whose message is due next, or None if only sends are unfinished."""
        if self.handled < len(self.program.recvs):
            return self.program.recvs[self.handled].peer
        return None

    # ---- receives ----

    def _post(self) -> None:
        recvs = self.program.recvs
        while self.posted < min(len(recvs), self.handled + WINDOW):
            message = recvs[self.posted]
            crowded = self.ahead_nbytes + message.nbytes > AHEAD * self.out.nbytes
            if crowded and self.posted >= self.handled + FEWEST:
                return
            self.ahead_nbytes += message.nbytes
            if message.final:
                buffer = self.finals.of(message.segments)
            else:
                buffer = self._take(message.nbytes)
            begin = time.perf_counter()
            request = self.transport.irecv(buffer, message.peer)
            self.mpi_s += time.perf_counter() - begin
            self.receiving.append((request, buffer))
            self.posted += 1

    def _handle(self, message: Message, buffer: Bytes) -> None:
        if not message.final:
            self._reduce(message, buffer)
            pool.give(buffer)
        # The next rank waits for these; we do not wait for our own result.
        for send in message.then:
            self._send(send)
        if message.final:
            for segment in message.segments:
                self._decode_final(segment)

    def _reduce(self, message: Message, buffer: Bytes) -> None:
        """Add a partial message to our own values.

        What is final then is decoded before it is sent: a codec that fails must do so before all
        others have their results.
        """
        (segment,) = message.segments
        a, b = segment.start, segment.stop
        addend = (self.source if message.fresh else self.out)[a:b]
        if message.fused is not None:
            wire = self._take(segment.nbytes)
            self._hop(segment, buffer, addend, wire)
            self._isend(wire, message.fused.peer, segment.codec.used(wire), pooled=True)
        elif message.finalize is not None:
            final = message.finalize
            self._hop(final, buffer, addend, self.finals.of((final,)))
            self._decode_final(final)
        else:
            begin = time.perf_counter()
            segment.codec.decode_add(buffer, addend, self.out[a:b])
            self._spent("decode", "decode and add", begin)

    def _hop(self, segment: Segment, wire_in: Bytes, x: Array, wire: Bytes) -> None:
        begin = time.perf_counter()
        segment.codec.hop(
            wire_in,
            x,
            wire,
            residual=self._residual(segment),
            stream=self.stream ^ segment.origin,
            index=segment.start - segment.origin,
        )
        self._spent("encode", "hop", begin)

    def _decode_final(self, segment: Segment) -> None:
        if self.program.exact:
            return
        begin = time.perf_counter()
        out = self.out[segment.start : segment.stop]
        self.nonfinite |= segment.codec.decode(self.finals.of((segment,)), out)
        self._spent("decode", "decode", begin)
        self.finals.used((segment,))

    # ---- sends ----

    def _send(self, message: Message) -> None:
        if message.final:
            for segment in message.encode:
                self._encode(segment, message.fresh, self.finals.of((segment,)))
                self._decode_final(segment)
            wire = self.finals.of(message.segments)
            codec = message.segments[0].codec  # a ragged message has one segment
            nbytes = codec.used(wire) if codec.ragged else wire.nbytes
            self._isend(wire, message.peer, nbytes, final=message.segments)
        elif message.encode:
            (segment,) = message.segments
            if segment.codec == EXACT and message.fresh and self.zero_copy:
                wire = self.source[segment.start : segment.stop].view(np.uint8)
                self._isend(wire, message.peer, wire.nbytes)
                return
            wire = self._take(segment.nbytes)
            self._encode(segment, message.fresh, wire)
            self._isend(wire, message.peer, segment.codec.used(wire), pooled=True)

    def _encode(self, segment: Segment, fresh: bool, wire: Bytes) -> None:
        begin = time.perf_counter()
        segment.codec.encode(
            (self.source if fresh else self.out)[segment.start : segment.stop],
            wire,
            residual=self._residual(segment),
            stream=self.stream ^ segment.origin,
            index=segment.start - segment.origin,
        )
        self._spent("encode", "encode", begin)

    def _isend(
        self,
        wire: Bytes,
        peer: int,
        nbytes: int,
        *,
        pooled: bool = False,
        final: tuple[Segment, ...] = (),
    ) -> None:
        """Send the first bytes of a buffer."""
        begin = time.perf_counter()
        request = self.transport.isend(wire[:nbytes], peer)
        self.mpi_s += time.perf_counter() - begin
        if pooled or final:
            self.sending_nbytes += wire.nbytes
        self.sending.append(_Sending(request, wire, nbytes, pooled, final, peer, begin))
        self.stats.messages += 1
        self.stats.wire_bytes += nbytes

    def _end_sends(self) -> None:
        while self.sending and self.sending[0].request.Test():
            sent = self.sending.popleft()
            self.moved = True
            if sent.pooled or sent.final:
                self.sending_nbytes -= sent.wire.nbytes
            if sent.pooled:
                pool.give(sent.wire)
            elif sent.final:
                self.finals.used(sent.final)
            if trace.active.on:
                name, end = f"to rank {sent.peer}", time.perf_counter()
                trace.active.overlapping("wire", name, sent.begin, end, nbytes=sent.nbytes)

    # ---- buffers ----

    def _take(self, nbytes: int) -> Bytes:
        """A buffer of the pool, of a finished send if there is one."""
        begin = time.perf_counter()
        self._end_sends()
        self.mpi_s += time.perf_counter() - begin
        return pool.take(nbytes)
