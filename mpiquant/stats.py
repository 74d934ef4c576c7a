"""What one call did, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mpiquant.typing import Array


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
    node_bytes : int
        Payload bytes sent to ranks of the same node, by "hierarchical".
    raw_bytes : int
        What wire_bytes would be if nothing were compressed.
    encode_s, decode_s, native_s : float
        Seconds in encoding kernels (fused hops included), in decoding kernels, and in native MPI
        collectives.
    mpi_s, python_s : float
        Seconds in MPI to send and receive messages, and in Python between all these.
    wait_s, idle_s : float
        Seconds waiting for the wire or for late peers, and the part of them during which the core
        did other work or rested.
    partial_bits, final_bits : float or None
        Of adaptive calls: mean bits of the values sent in partial and in final sums.
    cut_messages : int
        Messages of adaptive calls that were cut short.
    error : float or None
        With stats="error": 2-norm of the result minus the exact one over the norm of the exact
        one.
    max_error : float or None
        With stats="error": largest absolute difference.
    error_bound : float or None
        With the codec "bounded": what max_error cannot exceed, from what each rank's rounding has
        lost; at most the bound that was asked for.
    """

    algorithm: str = ""
    codec: str = ""
    reason: str = ""
    messages: int = 0
    wire_bytes: int = 0
    header_bytes: int = 0
    node_bytes: int = 0
    raw_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    native_s: float = 0.0
    mpi_s: float = 0.0
    python_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    cut_messages: int = 0
    error: float | None = None
    max_error: float | None = None
    error_bound: float | None = None
    _squares: list[float] = field(default_factory=lambda: [0.0, 0.0], repr=False)
    _sent: dict[bool, tuple[int, int]] = field(default_factory=dict, repr=False)

    @property
    def partial_bits(self) -> float | None:
        return self._mean_bits(final=False)

    @property
    def final_bits(self) -> float | None:
        return self._mean_bits(final=True)

    def _mean_bits(self, final: bool) -> float | None:
        bits, values = self._sent.get(final, (0, 0))
        return bits / values if values else None

    def sent(self, bits: int, values: int, *, final: bool) -> None:
        """Note the bits of a message of an adaptive call."""
        sum_bits, sum_values = self._sent.get(final, (0, 0))
        self._sent[final] = sum_bits + bits * values, sum_values + values

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

    def compare(self, result: Array, exact: Array) -> None:
        """Add one array's error to the achieved one."""
        exact = exact.astype(np.result_type(exact.dtype, np.float64), copy=False)
        difference = np.abs(result - exact)
        self._squares[0] += float(np.sum(difference**2))
        self._squares[1] += float(np.sum(np.abs(exact) ** 2))
        squared, total = self._squares
        self.error = (squared / total) ** 0.5 if total else squared**0.5
        self.max_error = max(float(difference.max(initial=0)), self.max_error or 0.0)
