"""Wires between simulated hosts: what a message waits for, and how long it takes.

A message holds the outgoing side of its host's network interface, the incoming side of the other
host's and, if there is one, a switch that all hosts share, for as long as the slowest of them takes
to move it; behind that it needs the latency to arrive.  The outgoing side serves messages in the
order in which they are ready, and one that waits for its receiver holds up those behind it, as in a
socket.  What limits an interface may be a token bucket, as for virtual machines: what was not used
before, up to its depth, is moved at once.  Ranks of one host have memory between them instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mpiquant.rate import Trace

Bandwidth = float | Trace
"""Bytes per second, steady or over time."""


def bandwidth_at(bandwidth: Bandwidth, time: float) -> tuple[float, float]:
    """Bytes per second at a time, and until when."""
    if not isinstance(bandwidth, Trace):
        return bandwidth, math.inf
    for start, stop, value in zip(
        bandwidth.times, [*bandwidth.times[1:], math.inf], bandwidth.bandwidths, strict=True
    ):
        if time < start:
            return 0.0, start
        if time < stop:
            return value, stop
    raise AssertionError("a trace has no end")


def end_of(nbytes: float, begin: float, bandwidths: Sequence[Bandwidth]) -> float:
    """When the slowest of some wires has moved so many bytes.

    Parameters
    ----------
    nbytes : float
    begin : float
        Seconds.
    bandwidths : sequence of float or Trace
        Of all that the bytes pass at the same time.
    """
    now, left = begin, float(nbytes)
    while left > 0:
        found = [bandwidth_at(b, now) for b in bandwidths]
        rate, until = min(rate for rate, _ in found), min(until for _, until in found)
        if rate * (until - now) >= left or math.isinf(until):
            return now + left / rate
        left -= rate * (until - now)
        now = until
    return now


@dataclass(frozen=True)
class Network:
    """Hosts and what is between them.

    Attributes
    ----------
    hosts : tuple of int
        Host of each rank.
    bandwidth : float or Trace, or tuple of one for each host
        Of an interface, in each direction.
    latency_s : float
        From when a message has been sent until it is there.
    switch : float or Trace, optional
        What the switch moves in all; None: as much as comes.
    memory : float
        Bandwidth between ranks of a host.
    memory_latency_s : float
    burst_s : float
        Depth of the interfaces' token buckets, as the time in which they move as much.  They are
        empty when a call begins: an interface that is in use has used them up.
    """

    hosts: tuple[int, ...]
    bandwidth: Bandwidth | tuple[Bandwidth, ...]
    latency_s: float = 0.0
    switch: Bandwidth | None = None
    memory: float = 5e9
    memory_latency_s: float = 1e-6
    burst_s: float = 0.0

    @classmethod
    def of(
        cls,
        ranks: int,
        bandwidth: Bandwidth | tuple[Bandwidth, ...],
        latency_s: float = 0.0,
        switch: Bandwidth | None = None,
    ) -> Network:
        """Hosts of one rank each."""
        return cls(tuple(range(ranks)), bandwidth, latency_s, switch)

    @property
    def size(self) -> int:
        return len(self.hosts)

    def interface(self, host: int) -> Bandwidth:
        """Bandwidth of a host."""
        return self.bandwidth[host] if isinstance(self.bandwidth, tuple) else self.bandwidth


@dataclass
class Wires:
    """The state of a network: until when its parts are taken, if nothing were ever saved up.

    Attributes
    ----------
    sent : dict of int to float
        Bytes that left each host.
    """

    network: Network
    sent: dict[int, float] = field(default_factory=dict)
    _outgoing: dict[int, float] = field(default_factory=dict)
    _incoming: dict[int, float] = field(default_factory=dict)
    _switch: float = 0.0

    def lane(self, source: int, target: int) -> tuple[str, int]:
        """What messages of a rank to another one queue for: an interface, or a core's memory."""
        hosts = self.network.hosts
        if hosts[source] == hosts[target]:
            return "memory", source
        return "interface", hosts[source]

    def move(self, now: float, source: int, target: int, nbytes: int) -> tuple[float, float]:
        """Move a message whose lane is free: when the lane is free again, and when it arrives."""
        network = self.network
        here, there = network.hosts[source], network.hosts[target]
        if here == there:
            end = now + nbytes / network.memory
            return end, end + network.memory_latency_s
        # What holds the incoming side ends there later by the latency, as this will: no need to
        # count it twice.
        taken = max(self._outgoing.get(here, 0.0), self._incoming.get(there, 0.0))
        begin = max(now - network.burst_s, taken)
        wires = [network.interface(here), network.interface(there)]
        if network.switch is not None:
            begin = max(begin, self._switch)
            self._switch = end_of(nbytes, begin, [network.switch])
            wires.append(network.switch)
        end = end_of(nbytes, begin, wires)
        self._outgoing[here] = self._incoming[there] = end
        end = max(end, now)
        self.sent[here] = self.sent.get(here, 0.0) + nbytes
        return end, end + network.latency_s
