"""The runner of the coded ring: tokens on the wire, encoding before and decoding behind them.

The components of a token lie in the output array.  They are first replaced by what is added on
each visit, one block for each, and one more beside the array; when the token comes, it is added to
the visit's block, which is then both what is sent on and the equation that is kept.  So a hop is
one addition, and the memory is that of c + N components and of the receives that are posted.
Encoding and decoding are done piece by piece, while other pieces are on the wire.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from mpiquant import _kernels, trace
from mpiquant.collectives.coded_ring import Layout, Visit, visits
from mpiquant.collectives.coding import Perturbed
from mpiquant.execute import AHEAD, FEWEST, WINDOW, PendingRequest, Runner, Transport
from mpiquant.pool import pool
from mpiquant.program import cut
from mpiquant.stats import Stats
from mpiquant.typing import Array, Bytes


class _Piece(NamedTuple):
    """Values start ... stop - 1 of a token, on one of its visits."""

    visit: Visit
    start: int
    stop: int


class _Token:
    """A token's blocks: views, or memory of their own where the array ends before them.

    There is one for each component, and one more where the token comes once more than it has
    components: anywhere but at the greatest distance behind its start.
    """

    def __init__(
        self, x: Array, out: Array, layout: Layout, token: int, distance: int, code: Perturbed
    ) -> None:
        n, count = layout.token_length(token), code.per_token
        self.distance = distance
        self.first_equation = int(distance < code.size - 1)
        self.sources: list[Array] = []
        self.blocks: list[Array] = []
        self.short: list[tuple[Array, Array]] = []  # what is copied to the output in the end
        for component in range(token, token + count * code.size, code.size):
            part = layout.present(component)
            if part.stop - part.start == n:
                self.sources.append(x[part])
                self.blocks.append(out[part])
                continue
            block = np.zeros(n, out.dtype)
            block[: part.stop - part.start] = x[part]
            self.sources.append(block)
            self.blocks.append(block)
            self.short.append((out[part], block[: part.stop - part.start]))
        if self.first_equation:
            self.blocks.append(np.empty_like(self.blocks[0]))


def hop(values: Array, token: Bytes) -> None:
    """Add a token that came to what is added on this visit."""
    with np.errstate(all="ignore"):  # as MPI: who sums infinities sees it in the result
        np.add(values, token.view(values.dtype), out=values)


class CodedExecution(Runner):
    """One call on one rank, as `mpiquant.execute.Execution` for the coded ring.

    Parameters
    ----------
    code : Perturbed
    rank : int
    transport : Transport
    x : (n,) array
        Never written, unless it is `out`.
    out : (n,) array
        Gets the sum.
    length : int
        Values of a segment.
    stats : Stats
    """

    def __init__(
        self,
        code: Perturbed,
        rank: int,
        transport: Transport,
        x: Array,
        out: Array,
        length: int,
        stats: Stats,
    ) -> None:
        super().__init__(transport, stats)
        self.code = code
        self.itemsize = out.itemsize
        self.right, self.left = (rank + 1) % code.size, (rank - 1) % code.size
        layout = Layout(out.size, code.size, code.components)
        self.tokens = [
            _Token(x, out, layout, token, (rank - token) % code.size, code)
            for token in range(code.size)
        ]
        self.pieces = [
            _Piece(visit, start, stop)
            for visit in visits(rank, code.size, code.components)
            for start, stop in cut(0, layout.token_length(visit.token), length)
        ]
        # How many of its visits, and of its sends, a piece of a token still has before it.
        self.open: dict[tuple[int, int], int] = {}
        for piece in self.pieces:
            key = piece.visit.token, piece.start
            self.open[key] = self.open.get(key, 0) + 1 + piece.visit.sent
        self.incoming = deque(piece for piece in self.pieces if piece.visit.received)
        self.posting = deque(self.incoming)
        self.receiving: deque[tuple[PendingRequest, Bytes]] = deque()
        self.sending: deque[tuple[PendingRequest, _Piece, float]] = deque()
        self.ahead_nbytes = 0
        self.most_ahead_nbytes = AHEAD * out.nbytes
        self.ended = False

    # ---- state machine ----

    def start(self) -> None:
        """Post the first receives and send the token that starts here."""
        self._post()
        for piece in self.pieces:
            if not piece.visit.received:
                self._visit(piece)

    def advance(self) -> bool:
        """Do all that can be done now; True at the end of the call."""
        while self.receiving and self.receiving[0][0].Test():
            _, buffer = self.receiving.popleft()
            piece = self.incoming.popleft()
            self.ahead_nbytes -= buffer.nbytes
            self.moved = True
            self._visit(piece, buffer)
            pool.give(buffer)
            self._post()
        self._end_sends()
        if self.incoming or self.sending:
            return False
        if not self.ended:
            self._end()
        return True

    def _end(self) -> None:
        self.ended = True
        for token in self.tokens:
            for target, block in token.short:
                target[...] = block
        self.stats.encode_s += self.encode_s
        self.stats.decode_s += self.decode_s

    def waits_for(self) -> int | None:
        """The rank whose message is due next, or None if only sends are unfinished."""
        return self.left if self.incoming else None

    # ---- messages ----

    def _post(self) -> None:
        while self.posting and len(self.receiving) < WINDOW:
            piece = self.posting[0]
            nbytes = (piece.stop - piece.start) * self.itemsize
            crowded = self.ahead_nbytes + nbytes > self.most_ahead_nbytes
            if crowded and len(self.receiving) >= FEWEST:
                return
            self.posting.popleft()
            self.ahead_nbytes += nbytes
            buffer = pool.take(nbytes)
            self.receiving.append((self.transport.irecv(buffer, self.left), buffer))

    def _send(self, piece: _Piece, values: Array) -> None:
        wire = values.view(np.uint8)
        begin = time.perf_counter()
        self.sending.append((self.transport.isend(wire, self.right), piece, begin))
        self.stats.messages += 1
        self.stats.wire_bytes += wire.nbytes

    def _end_sends(self) -> None:
        while self.sending and self.sending[0][0].Test():
            _, piece, begin = self.sending.popleft()
            self.moved = True
            if trace.active.on:
                nbytes = (piece.stop - piece.start) * self.itemsize
                end = time.perf_counter()
                trace.active.overlapping("wire", f"to rank {self.right}", begin, end, nbytes=nbytes)
            self._close(piece)

    # ---- what a visit does ----

    def _visit(self, piece: _Piece, buffer: Bytes | None = None) -> None:
        """Add the token to what this rank has for its visit, and pass it on."""
        token = self.tokens[piece.visit.token]
        if piece.visit.number == 0:
            self._encode(token, piece)
        values = token.blocks[piece.visit.number][piece.start : piece.stop]
        if buffer is not None:
            hop(values, buffer)
        if piece.visit.sent:
            self._send(piece, values)
        self._close(piece)

    def _encode(self, token: _Token, piece: _Piece) -> None:
        begin = time.perf_counter()
        matrix = self.code.encoding(token.distance)[: len(token.blocks)]
        part = slice(piece.start, piece.stop)
        _kernels.mix(
            np.ascontiguousarray(matrix),
            [block[part] for block in token.sources],
            [block[part] for block in token.blocks],
        )
        self._spent("encode", "encode token", begin)

    def _close(self, piece: _Piece) -> None:
        """Note that a visit or a send of a piece is over; behind the last one it is decoded."""
        key = piece.visit.token, piece.start
        self.open[key] -= 1
        if self.open[key]:
            return
        begin = time.perf_counter()
        token = self.tokens[piece.visit.token]
        part = slice(piece.start, piece.stop)
        blocks = [block[part] for block in token.blocks]
        solved = blocks[: self.code.per_token]
        _kernels.mix(self.code.decoding(token.distance), blocks[token.first_equation :], solved)
        self._spent("decode", "decode token", begin)
