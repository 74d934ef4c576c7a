"""What a rank knows of its links, and what waits to be sent over them.

One `Links` serves all adaptive calls of a channel: they share the wires.  Each peer has a queue of
messages, served by deadline, and at most a few parts under way, of which the peer has not said that
they came: so whatever is sent has been chosen a short time before, and a link that collapses holds
no more than that.  Times are those of `time.perf_counter`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Protocol

from mpiquant.rate import Throughput, bits_until, slowest

UNACKNOWLEDGED = 2
"""Parts that may be under way to a peer."""

WINDOW_S = 2e-3
"""More parts may be under way if the link moves them in so much time: their acknowledgements take
as long as the peer is in a kernel."""

PART_S = 4e-3
"""A part takes about so much time."""

SAMPLE_S = 5e-3
"""Least time of a sample of the bandwidth: arrivals are noted late while a kernel runs."""


class Outgoing(Protocol):
    """A message that waits to be sent, or of which parts are to come."""

    deadline: float

    @property
    def key(self) -> Hashable:
        """Of its call."""

    def send_part(self, now: float, busy: bool) -> int:
        """Send the next part; its bytes."""

    def ended(self) -> bool:
        """Whether all was sent."""


class Link:
    """To one peer."""

    def __init__(self) -> None:
        self.queue: list[tuple[float, int, Outgoing]] = []
        self.under_way: list[tuple[Hashable, int, float, bool]] = []  # call, bytes, when, busy
        self.out = Throughput()  # as the peer measures it

    @property
    def nbytes(self) -> int:
        """Bytes under way."""
        return sum(entry[1] for entry in self.under_way)

    def is_open(self) -> bool:
        """Whether another part may be sent."""
        if len(self.under_way) < UNACKNOWLEDGED:
            return True
        bandwidth = self.out.bandwidth
        return bandwidth == bandwidth and self.nbytes < WINDOW_S * bandwidth


class Links:
    """All links of a rank.

    Attributes
    ----------
    incoming : rate.Throughput
        What arrives, from all peers together.
    slow : float
        Bytes per second of the slowest link of all ranks, as earlier calls found; NaN if none did.
    """

    def __init__(self) -> None:
        self.incoming = Throughput()
        self.slow = math.nan
        self._links: dict[int, Link] = {}
        self._serial = 0
        self._volumes: dict[Hashable, tuple[float, int]] = {}  # deadline, values left
        self._since = math.nan
        self._arrived = 0

    def to(self, peer: int) -> Link:
        """The link to a peer."""
        return self._links.setdefault(peer, Link())

    def bandwidths(self) -> dict[int, float]:
        """Bytes per second to each peer, as it measured them; NaN if it did not."""
        return {peer: link.out.bandwidth for peer, link in self._links.items()}

    # ---- bits ----

    def expect(self, key: Hashable, deadline: float, values: int) -> None:
        """Note how many values of a call are still to be sent, and by when; none ends it."""
        if values > 0:
            self._volumes[key] = (deadline, values)
        else:
            self._volumes.pop(key, None)

    def bandwidth(self, peer: int, lowest: float) -> float:
        """Bytes per second to reckon with; NaN if nothing is known.

        `lowest` is that of the slowest link which the call has heard of.
        """
        return slowest(self.to(peer).out.bandwidth, lowest, self.slow)

    def allowed_bits(self, key: Hashable, now: float, peer: int, bandwidth: float) -> float:
        """Bits that each value of a call may have; NaN if nothing is known of the links.

        What is under way to the peer must get there first.
        """
        if bandwidth != bandwidth:
            return math.nan
        begin = now + self.to(peer).nbytes / bandwidth
        deadline, _ = self._volumes[key]
        return bits_until(deadline, begin, self._volumes.values(), bandwidth)

    def finish(self, key: Hashable, lowest: float) -> None:
        """Take in the slowest link that a call knew of at its end."""
        self._volumes.pop(key, None)
        if lowest == lowest:
            self.slow = lowest

    # ---- sending ----

    def queue(self, peer: int, message: Outgoing) -> None:
        """Put a message behind those of its deadline."""
        self._serial += 1
        heapq.heappush(self.to(peer).queue, (message.deadline, self._serial, message))

    def pump(self, now: float) -> bool:
        """Send what may be sent; whether anything was."""
        moved = False
        for link in self._links.values():
            while link.queue and link.is_open():
                message = link.queue[0][2]
                busy = bool(link.under_way)
                nbytes = message.send_part(now, busy)
                link.under_way.append((message.key, nbytes, now, busy))
                moved = True
                if message.ended():
                    heapq.heappop(link.queue)
        return moved

    def acknowledged(self, peer: int, key: Hashable, now: float, bandwidth: float) -> None:
        """The next part of a call has come to a peer, which measured so many bytes per second."""
        link = self.to(peer)
        entry = next(entry for entry in link.under_way if entry[0] == key)
        link.under_way.remove(entry)
        _, nbytes, sent_at, busy = entry
        if bandwidth == bandwidth:
            link.out.bandwidth = bandwidth
        elif not busy:
            # The peer has seen too little yet; the time of the round trip tells a lower bound.
            link.out.add(nbytes, now - sent_at, idle=True)

    # ---- measuring ----

    def arrived(self, now: float, nbytes: int, busy: bool) -> None:
        """Note a part that has come; busy: its sender had an earlier one under way."""
        if math.isnan(self._since):
            self._since = now
        elif not busy:
            self.incoming.add(self._arrived + nbytes, now - self._since, idle=True)
            self._since, self._arrived = now, 0
        else:
            self._arrived += nbytes
            if now - self._since >= SAMPLE_S:
                self.incoming.add(self._arrived, now - self._since)
                self._since, self._arrived = now, 0

    def forget(self, key: Hashable) -> None:
        """Drop all messages of a call that has failed."""
        self._volumes.pop(key, None)
        for link in self._links.values():
            link.queue = [entry for entry in link.queue if entry[2].key != key]
            heapq.heapify(link.queue)
            link.under_way = [entry for entry in link.under_way if entry[0] != key]
