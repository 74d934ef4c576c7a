"""The runner of the coded ring: tokens on the wire, encoding before and decoding behind them.

The components of a group (those of one token, or all) lie in the output array.  They are first
replaced by what is added on each visit, one block for each, and what there are more of beside the
array; when the token comes, it is added to the visit's block, which is then both what is sent on
and the equation that is kept.  So a hop is one addition, and the memory is that of c + N components
and of the receives that are posted.  Encoding and decoding are done piece by piece, while other
pieces are on the wire.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import numpy as np

from mpiquant import _kernels, trace
from mpiquant.collectives.coded_ring import Layout, Visit, visits
from mpiquant.collectives.coding import Code
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


class _Group:
    """Blocks of a group: views, or memory of their own where the array ends before them.

    There is one for each visit: first those of the components, and then the ones beside the array.
    """

    def __init__(
        self, x: Array, out: Array, layout: Layout, group: int, distance: int, code: Code
    ) -> None:
        n = layout.group_length(group)
        self.encoding, self.decoding = code.encoding(distance), code.decoding(distance)
        self.sources: list[Array] = []
        self.blocks: list[Array] = []
        self.short: list[tuple[Array, Array]] = []  # what is copied to the output in the end
        for component in range(group, code.components, code.groups):
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
        self.blocks.extend(np.empty((len(self.encoding) - len(self.blocks), n), out.dtype))

    def encode(self, part: slice) -> None:
        """Components to what is added on each visit."""
        mix(self.encoding, [b[part] for b in self.sources], [b[part] for b in self.blocks])

    def decode(self, part: slice) -> None:
        """What was seen on the last visits to components."""
        blocks, count = [b[part] for b in self.blocks], len(self.sources)
        mix(self.decoding, blocks[-count:], blocks[:count])


MIX_NBYTES = 256 << 10
"""Values that are multiplied by a large or complex matrix at a time: they shall stay in a cache."""


def mix(matrix: Array, sources: list[Array], outs: list[Array]) -> None:
    """outs[p] = sum over q of matrix[p, q] * sources[q], in doubles; outputs may be sources.

    For a complex matrix, each two values of a block are the parts of a complex number.
    """
    kind = matrix.dtype
    if kind.kind == "f" and len(sources) <= _kernels.MIX_MAX:
        _kernels.mix(np.ascontiguousarray(matrix), sources, outs)
        return
    seen = np.result_type(sources[0], np.complex64) if kind.kind == "c" else sources[0].dtype
    inputs, results = ([block.view(seen) for block in blocks] for blocks in (sources, outs))
    with np.errstate(all="ignore"):
        for begin, end in cut(0, inputs[0].size, MIX_NBYTES // (kind.itemsize * len(inputs))):
            values = matrix @ np.array([block[begin:end] for block in inputs], kind)
            for block, row in zip(results, values, strict=True):
                block[begin:end] = row


class CodedExecution(Runner):
    """One call on one rank, as `mpiquant.execute.Execution` for the coded ring.

    Parameters
    ----------
    code : Code
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
        code: Code,
        rank: int,
        transport: Transport,
        x: Array,
        out: Array,
        length: int,
        stats: Stats,
    ) -> None:
        super().__init__(transport, stats)
        self.itemsize = out.itemsize
        self.right, self.left = (rank + 1) % code.size, (rank - 1) % code.size
        layout = Layout(out.size, code.components, code.groups, code.width)
        self.groups = [
            _Group(x, out, layout, group, (rank - group) % code.size, code)
            for group in range(code.groups)
        ]
        length = max(length // code.width, 1) * code.width
        self.pieces = [
            _Piece(visit, start, stop)
            for visit in visits(rank, code.size, code.components, code.groups)
            for start, stop in cut(0, layout.group_length(visit.group), length)
        ]
        # How many of its visits, and of its sends, a piece of a group still has before it.
        self.open: dict[tuple[int, int], int] = {}
        for piece in self.pieces:
            key = piece.visit.group, piece.start
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
        for group in self.groups:
            for target, block in group.short:
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
        group = self.groups[piece.visit.group]
        part = slice(piece.start, piece.stop)
        if piece.visit.number == 0:
            begin = time.perf_counter()
            group.encode(part)
            self._spent("encode", "encode token", begin)
        values = group.blocks[piece.visit.number][part]
        if buffer is not None:
            _kernels.add(buffer, values)
        if piece.visit.sent:
            self._send(piece, values)
        self._close(piece)

    def _close(self, piece: _Piece) -> None:
        """Note that a visit or a send of a piece is over; behind the last one it is decoded."""
        key = piece.visit.group, piece.start
        self.open[key] -= 1
        if self.open[key]:
            return
        begin = time.perf_counter()
        self.groups[piece.visit.group].decode(slice(piece.start, piece.stop))
        self._spent("decode", "decode token", begin)
