"""Messages in parts: the wire format of adaptive calls.

A message of an adaptive call says what it is, and may come in several parts, the most significant
bit planes first.  Each part is an MPI message of its own: a header, then a run of the message's
bytes, behind those of the part before.  The receiver acknowledges each part with a header alone,
but for the last one that it gets in a call.

Header, little-endian, 40 bytes::

    offset  0  magic 0xA7       (1)     offset  8  first element      (8)
            1  kind and flags   (1)            16  elements           (8)
            2  bits             (1)            24  bytes that follow  (8)
            3  planes so far    (1)            32  bandwidth          (8)
            4  number           (4)

The number counts the messages of a call between two ranks.  The bandwidth, in bytes per second, is
the lowest that the sender knows of in this call, or NaN; in an acknowledgement, that of the link
the part came by.  A message that ends behind fewer planes than it has bits was cut short.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mpiquant.codecs import Codec, UniformCodec
from mpiquant.codecs.aqat import LEVELS, codec_of
from mpiquant.codecs.prefix import FEWEST, WIDE_MOST, expand, prefix_nbytes
from mpiquant.pool import pool
from mpiquant.typing import Bytes

MAGIC = 0xA7
_HEADER = struct.Struct("<BBBBIQQQd")
HEADER_NBYTES = _HEADER.size

ACK, LAST, BUSY, SILENT = 1, 2, 4, 8
"""Flags: an acknowledgement; the last part of its message; it had to wait for the link, or for the
part before; it is not to be acknowledged."""

GUESS = BUSY
"""In an acknowledgement: its bandwidth is a guess, since no full link was seen of late."""

GRAIN_NBYTES = 64 << 10
"""Parts are not made shorter than this, but for the last one."""


class Header(NamedTuple):
    """What a part says of itself and of its message."""

    flags: int
    bits: int
    planes: int
    number: int
    start: int
    values: int
    nbytes: int
    bandwidth: float

    def pack_into(self, buffer: Bytes) -> None:
        """Write it to the front of a buffer."""
        _HEADER.pack_into(buffer.data, 0, MAGIC, *self)

    def pack(self) -> Bytes:
        """It alone, as a message."""
        return np.frombuffer(bytearray(_HEADER.pack(MAGIC, *self)), np.uint8)


def read_part(buffer: Bytes) -> tuple[Header, Bytes]:
    """Header and bytes of a part, from a buffer that may be longer.

    Raises
    ------
    ValueError
        If it is no part.
    """
    if buffer.nbytes < HEADER_NBYTES:
        raise ValueError(f"a part has {HEADER_NBYTES} bytes or more, not {buffer.nbytes}")
    magic, *fields = _HEADER.unpack_from(buffer.data)
    header = Header(*fields)
    payload = buffer[HEADER_NBYTES : HEADER_NBYTES + header.nbytes]
    right = magic == MAGIC and header.flags <= ACK + LAST + BUSY + SILENT
    if right and not header.flags & ACK:
        right = header.bits in LEVELS and header.planes <= header.bits
        right = right and payload.nbytes == header.nbytes
    if not right:
        raise ValueError(f"not a part: {buffer[:HEADER_NBYTES].tobytes()!r}")
    return header, payload


# ---- where messages are divided, and where they may be cut ----


class End(NamedTuple):
    """Where a part of a message ends, and how many planes it has then."""

    stop: int
    planes: int


def ends_of(codec: Codec, count: int, dtype: np.dtype, target_nbytes: float) -> list[End]:
    """Ends of the parts of a message, each of about target_nbytes.

    Planes stay whole, and the first part has as many as a message needs.
    """
    whole = End(codec.nbytes(count, dtype), round(codec.bits))
    if not isinstance(codec, UniformCodec):
        return [whole] if codec.lossy else list(_exact_ends(whole, target_nbytes))
    parts = max(1, round(whole.stop / max(target_nbytes, 1.0)))
    # Of about the same length: a short one would leave the link nothing to do until it is answered.
    stops = {max(FEWEST, round(codec.bits * k / parts)) for k in range(1, parts)}
    found = []
    for planes in sorted(stops):
        if planes < codec.bits and planes <= WIDE_MOST:  # of 16 bits the last four go together
            found.append(End(prefix_nbytes(codec, count, dtype, planes), planes))
    return [*found, whole]


def _exact_ends(whole: End, target_nbytes: float) -> Iterator[End]:
    step = max(GRAIN_NBYTES, -(-int(min(target_nbytes, whole.stop)) // 8) * 8)
    for stop in range(step, whole.stop, step):
        yield End(stop, whole.planes)
    yield whole


# ---- the receiver's side ----


class Assembly:
    """A message as its parts come.

    Attributes
    ----------
    header : Header or None
        That of the last part.
    wire : (n,) uint8 array
        All bytes so far.
    """

    def __init__(self, start: int, count: int, dtype: np.dtype) -> None:
        self.start = start
        self.count = count
        self.dtype = dtype
        self.header: Header | None = None
        self.wire: Bytes = np.empty(0, np.uint8)
        self._buffers: list[Bytes] = []
        self._got = 0

    def add(self, header: Header, payload: Bytes, buffer: Bytes) -> bool:
        """Take in a part, with the pool's buffer that it lies in; whether it was the last.

        Raises
        ------
        ValueError
            If it does not belong here.
        """
        first = self.header is None
        if (header.start, header.values) != (self.start, self.count) or not (
            self.header is None or header.bits == self.header.bits
        ):
            raise ValueError(
                f"a part of elements {header.start} + {header.values} came, expected "
                f"{self.start} + {self.count}"
            )
        self.header = header
        last = bool(header.flags & LAST)
        if first and last:
            self.wire, self._buffers = payload, [buffer]
            return True
        if first:
            whole = pool.take(codec_of(header.bits).nbytes(self.count, self.dtype))
            self._buffers = [whole]
        whole = self._buffers[0]
        if self._got + payload.nbytes > whole.nbytes:
            raise ValueError(f"{self._got + payload.nbytes} bytes came, expected {whole.nbytes}")
        whole[self._got : self._got + payload.nbytes] = payload
        self._got += payload.nbytes
        self.wire = whole[: self._got]
        pool.give(buffer)
        return last

    def format(self) -> tuple[Codec, Bytes]:
        """Codec and bytes to decode, once the last part is here."""
        assert self.header is not None
        codec = codec_of(self.header.bits)
        if isinstance(codec, UniformCodec):
            return expand(codec, self.wire, self.count, self.dtype, self.header.planes)
        return codec, self.wire

    def release(self) -> None:
        """Give the buffers back."""
        for buffer in self._buffers:
            pool.give(buffer)
        self._buffers = []
