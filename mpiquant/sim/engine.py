"""One call on all ranks, event by event: the programs that real calls run, on simulated wires.

Each rank's processor does one thing at a time, in the order of `mpiquant.execute.Execution`: it
encodes and posts the first sends, then handles receives in the order of its program; what a receive
releases goes out before final values are decoded.  Kernels and messages take what the `Machine`
says, transfers what the `Network` says.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from mpiquant.codecs import Codec
from mpiquant.program import Kind, Message, Program, Segment, compile_program
from mpiquant.sim.machine import Machine
from mpiquant.sim.network import Network, Wires


@dataclass(frozen=True)
class Outcome:
    """What a simulated call did.

    Attributes
    ----------
    ends : tuple of float
        When each rank had its result and its last message was gone, in seconds.
    kernel_s : tuple of float
        Seconds in kernels, of each rank.
    sent : tuple of int
        Payload bytes of each rank.
    messages : tuple of int
    """

    ends: tuple[float, ...]
    kernel_s: tuple[float, ...]
    sent: tuple[int, ...]
    messages: tuple[int, ...]

    @property
    def time_s(self) -> float:
        """When the last rank ended."""
        return max(self.ends)


class _Rank:
    """A rank's processor and its place in the program."""

    def __init__(self, program: Program, ready: float) -> None:
        self.program = program
        self.free = ready
        self.kernel_s = 0.0
        self.handled = 0
        self.arrivals: dict[int, deque[float]] = defaultdict(deque)
        self.last_sent = ready
        self.sent = self.messages = 0

    def next_arrival(self) -> float | None:
        """When the message that is due next arrives; None if that is not known yet."""
        recvs = self.program.recvs
        if self.handled == len(recvs):
            return None
        known = self.arrivals[recvs[self.handled].peer]
        return known.popleft() if known else None


class Engine:
    """One call.

    Parameters
    ----------
    programs : sequence of Program
        Of each rank.
    network : Network
    machine : Machine or sequence of Machine
        Of all ranks, or of each.
    ready : sequence of float, optional
        When each rank begins, in seconds; 0 by default.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        network: Network,
        machine: Machine | Sequence[Machine],
        ready: Sequence[float] | None = None,
    ) -> None:
        size = len(programs)
        if network.size != size:
            raise ValueError(f"the network has {network.size} ranks, the call {size}")
        self.machines = [machine] * size if isinstance(machine, Machine) else list(machine)
        begin = [0.0] * size if ready is None else list(ready)
        self.ranks = [_Rank(p, b) for p, b in zip(programs, begin, strict=True)]
        self.wires = Wires(network)
        self._events: list[tuple[float, int, int, Message]] = []
        self._numbers = count()
        self._lanes: dict[tuple[str, int], deque[tuple[int, Message]]] = defaultdict(deque)
        self._idle: dict[tuple[str, int], bool] = defaultdict(lambda: True)

    def run(self) -> Outcome:
        """Simulate the call to its end."""
        for rank, state in enumerate(self.ranks):
            for message in state.program.first_sends:
                self._send(rank, message)
        while self._events:
            now, _, rank, message = heapq.heappop(self._events)
            if rank >= 0:
                self._queue(now, rank, message)
            else:
                self._serve(now, self.wires.lane(-1 - rank, message.peer))
        behind = [r for r, s in enumerate(self.ranks) if s.handled < len(s.program.recvs)]
        if behind:
            raise RuntimeError(f"ranks {behind} wait for ever")
        return Outcome(
            ends=tuple(max(s.free, s.last_sent) for s in self.ranks),
            kernel_s=tuple(s.kernel_s for s in self.ranks),
            sent=tuple(s.sent for s in self.ranks),
            messages=tuple(s.messages for s in self.ranks),
        )

    # ---- wires ----

    def _queue(self, now: float, rank: int, message: Message) -> None:
        lane = self.wires.lane(rank, message.peer)
        self._lanes[lane].append((rank, message))
        if self._idle[lane]:
            self._serve(now, lane)

    def _serve(self, now: float, lane: tuple[str, int]) -> None:
        """Put the next message of a free lane on its way."""
        waiting = self._lanes[lane]
        self._idle[lane] = not waiting
        if not waiting:
            return
        rank, message = waiting.popleft()
        state = self.ranks[rank]
        free, arrival = self.wires.move(now, rank, message.peer, message.nbytes)
        state.last_sent = max(state.last_sent, free)
        state.sent += message.nbytes
        state.messages += 1
        # A negative rank says that the lane of its message is free again.
        heapq.heappush(self._events, (free, next(self._numbers), -1 - rank, message))
        self.ranks[message.peer].arrivals[rank].append(arrival)
        self._advance(message.peer)

    # ---- processors ----

    def _advance(self, rank: int) -> None:
        """Handle all receives whose arrival is known: their order is fixed."""
        state, machine = self.ranks[rank], self.machines[rank]
        while (arrival := state.next_arrival()) is not None:
            message = state.program.recvs[state.handled]
            state.handled += 1
            state.free = max(state.free, arrival) + machine.message_s
            if not message.final:
                self._reduce(rank, message)
            for send in message.then:
                self._send(rank, send)
            if message.final:
                for segment in message.segments:
                    self._spend(rank, segment, "decode")

    def _reduce(self, rank: int, message: Message) -> None:
        (segment,) = message.segments
        if message.fused is not None:
            self._spend(rank, segment, "hop")
            self._post(rank, message.fused)
        elif message.finalize is not None:
            self._spend(rank, segment, "hop")
            self._spend(rank, segment, "decode")
        else:
            self._spend(rank, segment, "decode_add")

    def _send(self, rank: int, message: Message) -> None:
        for segment in message.encode:
            self._spend(rank, segment, "encode")
            if message.final:
                self._spend(rank, segment, "decode")
        if message.final or message.encode:  # fused ones went out with their hop
            self._post(rank, message)

    def _post(self, rank: int, message: Message) -> None:
        state = self.ranks[rank]
        state.free += self.machines[rank].message_s
        heapq.heappush(self._events, (state.free, next(self._numbers), rank, message))

    def _spend(self, rank: int, segment: Segment, kernel: str) -> None:
        state = self.ranks[rank]
        if kernel == "decode" and state.program.exact:
            return  # final bytes are the output
        cost = getattr(self.machines[rank].cost(segment.codec), kernel) * segment.count
        state.free += cost
        state.kernel_s += cost


def simulate(
    algorithm: str,
    elements: int,
    codec: Codec,
    network: Network,
    machine: Machine | Sequence[Machine],
    *,
    kind: Kind = "allreduce",
    dtype: np.dtype | None = None,
    segment: int | None = None,
    ready: Sequence[float] | None = None,
) -> Outcome:
    """Simulate one call of one array.

    Parameters
    ----------
    algorithm : str
        A key of `mpiquant.collectives.ALGORITHMS`.
    elements : int
        Of the array; of an allgather, of all ranks together.
    codec : Codec
    network : Network
    machine : Machine or sequence of Machine
    kind : {"allreduce", "reduce_scatter", "allgather"}
    dtype : numpy.dtype, optional
        float32 by default.
    segment : int, optional
        Elements of a pipelined segment; by default chunks are sent whole.
    ready : sequence of float, optional
        When each rank begins, in seconds.
    """
    dtype = np.dtype(np.float32) if dtype is None else dtype
    length = max(elements, 1) if segment is None else segment
    programs = [
        compile_program(kind, algorithm, rank, network.size, elements, codec, dtype, length)
        for rank in range(network.size)
    ]
    return Engine(programs, network, machine, ready).run()
