"""One call on very many ranks at a time: the engine's recurrences on arrays over the ranks.

On a network whose hosts are alike but for the speed of their links, all ranks of a ring and of a
direct exchange run one program, with peers at the same distance.  So do those of halving and
doubling, if they are a power of two and send whole ranges: of segments, some are needed sooner on
one rank than on another.  So the program of rank 0 is carried out once, and each of its times is an
array over all ranks.  Where messages of two ranks meet at a third one, they are served in the order
of its program rather than in that of time: the same, unless ranks are far apart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiquant.codecs import Codec
from mpiquant.program import Message, Program, Segment, compile_program
from mpiquant.rate import Trace
from mpiquant.sim.engine import Outcome
from mpiquant.sim.machine import Machine
from mpiquant.sim.network import Bandwidth

Times = NDArray[np.float64]


class Links:
    """Interfaces of hosts of one rank each, steady or all alike over time.

    Parameters
    ----------
    ranks : int
    bandwidth : float, Trace, or (ranks,) array
        Bytes per second.
    latency_s : float
    burst_s : float
        Depth of their token buckets, as of `mpiquant.sim.Network`.
    """

    def __init__(
        self,
        ranks: int,
        bandwidth: Bandwidth | Sequence[float] | Times,
        latency_s: float = 0.0,
        burst_s: float = 0.0,
    ) -> None:
        self.ranks, self.latency_s, self.burst_s = ranks, latency_s, burst_s
        self._trace: tuple[Times, Times] | None = None
        if isinstance(bandwidth, Trace):
            self._trace = _moved(bandwidth)
            self._last = bandwidth.bandwidths[-1]
        else:
            self.bandwidth = np.broadcast_to(np.asarray(bandwidth, float), (ranks,))

    def end(self, begin: Times, nbytes: float | Times, targets: NDArray[np.intp]) -> Times:
        """When messages to each rank's target have been sent."""
        if self._trace is None:
            slower = np.minimum(self.bandwidth, self.bandwidth[targets])
            return np.asarray(begin + nbytes / slower)
        times, moved = self._trace
        until = np.interp(begin, times, moved) + np.maximum(begin - times[-1], 0.0) * self._last
        until += nbytes
        inside = np.interp(until, moved, times)
        behind = times[-1] + (until - moved[-1]) / self._last
        return np.asarray(np.where(until > moved[-1], behind, inside))


def _moved(trace: Trace) -> tuple[Times, Times]:
    """When a trace's bandwidths change, and what it has moved by then."""
    times = np.asarray(trace.times, float)
    moved = np.concatenate([[0.0], np.cumsum(np.diff(times) * trace.bandwidths[:-1])])
    return times, moved


@dataclass
class Chosen:
    """What some ranks send of a segment: one value, or one for each rank."""

    nbytes: float | Times
    encode_s: float | Times = 0.0
    hop_s: float | Times = 0.0
    decode_s: float | Times = 0.0
    decode_add_s: float | Times = 0.0


Chooser = Callable[[Segment, Times], Chosen]
"""What a segment is sent as at some times; not asked about final segments that are passed on."""


def fixed(machine: Machine) -> Chooser:
    """Segments as their programs have them."""

    def choose(segment: Segment, now: Times) -> Chosen:
        cost, values = machine.cost(segment.codec), segment.count
        kernels = (cost.encode, cost.hop, cost.decode, cost.decode_add)
        return Chosen(segment.nbytes, *(each * values for each in kernels))

    return choose


class FastCall:
    """One call.

    Parameters
    ----------
    program : Program
        Of rank 0.
    links : Links
    exchange : {"shift", "xor"}
        How a peer's number follows from a rank's and from that of rank 0's peer.
    choose : callable
    message_s : float
        Of the machine.
    ready : (ranks,) array
        When each rank begins.
    """

    def __init__(
        self,
        program: Program,
        links: Links,
        exchange: str,
        choose: Chooser,
        message_s: float,
        ready: Times,
    ) -> None:
        self.program, self.links, self.choose = program, links, choose
        self.exchange, self.message_s = exchange, message_s
        self.free = ready.copy()
        self.kernel_s = np.zeros(links.ranks)
        self.outgoing, self.incoming = np.zeros((2, links.ranks))
        self.last_sent = ready.copy()
        self.sent, self.messages = np.zeros(links.ranks), 0
        self._numbers = np.arange(links.ranks)
        self._arrivals: dict[int, deque[tuple[Times, list[Chosen]]]] = defaultdict(deque)
        self._finals: dict[int, Chosen] = {}  # by offset: as they came, or were made here

    def run(self) -> Outcome:
        """Simulate the call to its end."""
        for message in self.program.first_sends:
            self._send(message)
        for message in self.program.recvs:
            self._handle(message)
        ends = np.maximum(self.free, self.last_sent)
        size = self.links.ranks
        return Outcome(tuple(ends), tuple(self.kernel_s), tuple(self.sent), (self.messages,) * size)

    # ---- wires ----

    def _targets(self, peer: int) -> NDArray[np.intp]:
        if self.exchange == "xor":
            return self._numbers ^ peer
        return (self._numbers + peer) % self.links.ranks

    def _post(self, message: Message, parts: list[Chosen]) -> None:
        self.free = self.free + self.message_s
        targets = self._targets(message.peer)
        taken = np.maximum(self.outgoing, self.incoming[targets])
        begin = np.maximum(self.free - self.links.burst_s, taken)
        nbytes = sum(part.nbytes for part in parts)
        end = self.links.end(begin, nbytes, targets)
        self.outgoing = end
        self.incoming[targets] = end
        end = np.maximum(end, self.free)
        self.last_sent = np.maximum(self.last_sent, end)
        self.sent += nbytes
        self.messages += 1
        arrival = np.empty_like(end)
        arrival[targets] = end + self.links.latency_s
        source = message.peer if self.exchange == "xor" else -message.peer % self.links.ranks
        self._arrivals[source].append((arrival, [_at(part, targets) for part in parts]))

    # ---- processors ----

    def _spend(self, seconds: float | Times) -> None:
        self.free = self.free + seconds
        self.kernel_s += seconds

    def _decode(self, chosen: Chosen) -> None:
        if not self.program.exact:
            self._spend(chosen.decode_s)

    def _handle(self, message: Message) -> None:
        arrival, parts = self._arrivals[message.peer].popleft()
        self.free = np.maximum(self.free, arrival) + self.message_s
        if message.final:
            for segment, part in zip(message.segments, parts, strict=True):
                self._finals[segment.offset] = part
        else:
            self._reduce(message, parts[0])
        for send in message.then:
            self._send(send)
        if message.final:
            for part in parts:
                self._decode(part)

    def _reduce(self, message: Message, came: Chosen) -> None:
        (segment,) = message.segments
        if message.fused is not None:
            made = self.choose(segment, self.free)
            self._spend(made.hop_s)
            self._post(message.fused, [made])
        elif message.finalize is not None:
            made = self.choose(message.finalize, self.free)
            self._spend(made.hop_s)
            self._decode(made)
            self._finals[message.finalize.offset] = made
        else:
            self._spend(came.decode_add_s)

    def _send(self, message: Message) -> None:
        made = []
        for segment in message.encode:
            chosen = self.choose(segment, self.free)
            self._spend(chosen.encode_s)
            if message.final:
                self._decode(chosen)
                self._finals[segment.offset] = chosen
            made.append(chosen)
        if message.final:
            made = [self._finals[segment.offset] for segment in message.segments]
        if made:
            self._post(message, made)


def _at(chosen: Chosen, targets: NDArray[np.intp]) -> Chosen:
    """What was sent to each rank, in the order of those who get it."""

    def moved(value: float | Times) -> float | Times:
        if not isinstance(value, np.ndarray):
            return value
        found = np.empty_like(value)
        found[targets] = value
        return found

    return Chosen(*(moved(value) for value in vars(chosen).values()))


EXCHANGES = {"ring": "shift", "direct": "shift", "halving_doubling": "xor"}


def simulate_fast(
    algorithm: str,
    elements: int,
    codec: Codec,
    links: Links,
    machine: Machine,
    *,
    dtype: np.dtype | None = None,
    segment: int | None = None,
    ready: Sequence[float] | Times | None = None,
    choose: Chooser | None = None,
) -> Outcome:
    """Simulate an allreduce of one array.

    Parameters
    ----------
    algorithm : {"ring", "direct", "halving_doubling"}
        The last one on a power of two of ranks only, and without segments.
    elements : int
        Rounded up to a multiple of the ranks, so that all chunks are alike.
    codec : Codec
    links : Links
    machine : Machine
    dtype : numpy.dtype, optional
        float32 by default.
    segment : int, optional
        Elements of a pipelined segment; by default chunks are sent whole.
    ready : (ranks,) sequence of float, optional
        When each rank begins, in seconds.
    choose : callable, optional
        What each segment is sent as; by default as the codec has it.

    Raises
    ------
    ValueError
        If ranks of the algorithm do not all run one program.
    """
    ranks = links.ranks
    exchange = EXCHANGES.get(algorithm)
    if exchange is None or (exchange == "xor" and (ranks & (ranks - 1) or segment is not None)):
        raise ValueError(f"{algorithm} on {ranks} ranks is not the same for all of them")
    elements = -(-elements // ranks) * ranks
    dtype = np.dtype(np.float32) if dtype is None else dtype
    length = max(elements, 1) if segment is None else segment
    program = compile_program("allreduce", algorithm, 0, ranks, elements, codec, dtype, length)
    begin = np.zeros(ranks) if ready is None else np.asarray(ready, float)
    chooser = fixed(machine) if choose is None else choose
    return FastCall(program, links, exchange, chooser, machine.message_s, begin).run()
