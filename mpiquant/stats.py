"""What one call did, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Statistics of one call on one rank; of all its buckets together.

    Attributes
    ----------
    algorithm, codec : str
        What ran; several names are joined by "+".
    reason : str
        Why this algorithm and codec.
    messages : int
        Payload messages sent by this rank.
    wire_bytes : int
        Payload bytes sent by this rank, scales included.  For native calls, the bytes of the best
        known algorithm, since MPI does not tell.
    header_bytes : int
        Bytes of headers sent by this rank.
    raw_bytes : int
        What wire_bytes would be if nothing were compressed.
    encode_s, decode_s, wait_s, native_s : float
        Seconds in encoding kernels (fused hops included), in decoding kernels, waiting for the
        wire or for late peers, and in native MPI collectives.
    error : float or None
        With stats="error": 2-norm of the result minus the exact one over the norm of the exact
        one.
    max_error : float or None
        With stats="error": largest absolute difference.
    """

    algorithm: str = ""
    codec: str = ""
    reason: str = ""
    messages: int = 0
    wire_bytes: int = 0
    header_bytes: int = 0
    raw_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    native_s: float = 0.0
    error: float | None = None
    max_error: float | None = None
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0], repr=False)

    @property
    def ratio(self) -> float | None:
        """raw / wire, headers included; above 1 is smaller.  None if nothing was sent."""
        sent = self.wire_bytes + self.header_bytes
        return self.raw_bytes / sent if sent else None

    def chose(self, algorithm: str, codec: str, reason: str) -> None:
        """Note a decision; repeated ones are noted once."""
        for name, value in (("algorithm", algorithm), ("codec", codec), ("reason", reason)):
            known = getattr(self, name)
            if value not in known.split("+"):
                setattr(self, name, f"{known}+{value}" if known else value)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to the field of that name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def compare(self, squared_error: float, squared_exact: float, largest: float) -> None:
        """Add one array's squared errors to the achieved error."""
        self._squares[0] += squared_error
        self._squares[1] += squared_exact
        error, exact = self._squares
        self.error = (error / exact) ** 0.5 if exact else error**0.5
        self.max_error = max(largest, self.max_error or 0.0)
