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
from typing import NamedTuple, Protocol

from mpiquant.rate import Throughput, bits_until, remembered, slowest

UNACKNOWLEDGED = 2
"""Parts that may be under way to a peer whose link is not known yet, and before a further part of a
message: a link that collapses in the middle of one holds no more of it."""

PART_S = 3.5e-3
"""A part takes about so much time."""

ROOM_S = 6e-3
"""Another part may be sent while less is under way: the link must not rest while parts are
acknowledged, and the answers themselves wait behind what their sender sends."""

SAMPLE_S, SHORTEST_S = 15e-3, 5e-3
"""Time of a sample of the bandwidth, and the least one: arrivals are noted late while a kernel
runs or the thread sleeps."""

LATE_S = 3e-3
"""Where the bandwidth is a guess, a part that is not acknowledged so long after its time shows that
the link is full."""

SURE_S = 50e-3
"""For so long a link is taken to move, at least, what round trips have shown.  Arrivals are noted
late where ranks share cores, which shows in acknowledgements too, but not in the quickest."""

BURST_S = 4e-3
"""Shorter round trips count as if they had taken so long: after a pause, many links let a burst of
a millisecond or so pass at once."""

DUE_S, HOLD_S = 2e-3, 30e-3
"""A short call that is due so soon, or was due so short a time ago, holds up all that are due
later."""

LEAST_ROOM_S = 0.5e-3
"""What may be under way, at least, before the part of a call that is due later than others."""

LOOK_S = 0.5e-3
"""So often it is looked whether time alone has made room; what comes makes some at once."""

LEAST_NBYTES = 4096
"""Shorter parts tell nothing of the bandwidth."""

UNSURE_CALLS = 16
"""After so many calls without a sample, the link may well be faster than it once was."""

FIRST_GROWTH = 1.5
"""By what it is raised with each call, as long as no full link was ever seen."""

GROWTH = 1.25
"""What its bandwidth is then raised by, with each further call: more bits fill the link sooner or
later, and then it is measured."""


class Outgoing(Protocol):
    """A message that waits to be sent, or of which parts are to come."""

    deadline: float

    @property
    def key(self) -> Hashable:
        """Of its call."""

    def send_part(self, now: float, busy: bool) -> tuple[int, bool]:
        """Send the next part; its bytes, and whether it will be acknowledged."""

    def begun(self) -> bool:
        """Whether a part of it was sent."""

    def ended(self) -> bool:
        """Whether all was sent."""


class _Part(NamedTuple):
    """A part under way."""

    key: Hashable
    nbytes: int
    sent_at: float
    expected_at: float
    """When it should have arrived; NaN if nothing is known of the link."""
    answered: bool
    """Whether the peer will tell when it has."""
    since: float
    """When the first was sent of those that were under way then and are answered; else itself."""
    behind: int
    """Bytes of all those and its own."""

    def least(self, now: float, in_order: bool) -> float:
        """Bytes per second that the link has moved at least, as its answer comes.

        Those that were sent before have come as well, if their answers did.
        """
        own = self.nbytes / max(now - self.sent_at, BURST_S)
        return max(own, self.behind / max(now - self.since, BURST_S)) if in_order else own


class Link:
    """To one peer."""

    def __init__(self) -> None:
        self.queue: list[tuple[float, int, Outgoing]] = []
        self.under_way: list[_Part] = []
        self.nbytes = 0  # under way
        self.blocked = False  # whether the next part had to wait for the link
        self.guessed = False  # whether the peer has seen no full link of late
        self.out = Throughput()  # as the peer measures it, or better known by round trips
        self._least, self._least_until = 0.0, -math.inf

    def is_full(self, now: float) -> bool:
        """Whether a part sent now will come behind others."""
        if self.blocked or not (self.guessed and self.under_way):
            return self.blocked
        return now > self.under_way[0].expected_at + LATE_S

    def sent(self, key: Hashable, nbytes: int, answered: bool, now: float) -> None:
        """Note a part on its way."""
        begin = max(now, self.under_way[-1].expected_at) if self.under_way else now
        expected_at = begin + nbytes / self.out.bandwidth
        before = [part for part in self.under_way if part.answered]
        since = before[0].sent_at if before else now
        behind = nbytes + sum(part.nbytes for part in before)
        self.under_way.append(_Part(key, nbytes, now, expected_at, answered, since, behind))
        self.nbytes += nbytes

    def arrived(self, part: _Part) -> None:
        """Note that a part is under way no more."""
        self.under_way.remove(part)
        self.nbytes -= part.nbytes

    def measured(self, part: _Part, now: float, bandwidth: float) -> None:
        """Note what the peer measured; NaN if it has seen too little yet."""
        before = next((p.sent_at for p in self.under_way if p.answered), math.inf)
        least = part.least(now, before >= part.sent_at)
        if least >= self._least or now > self._least_until:
            self._least, self._least_until = least, now + SURE_S
        if bandwidth == bandwidth:
            self.out.bandwidth = max(bandwidth, self._least)
        else:
            # The time of the round trip tells a lower bound.  That of a short part is latency,
            # which longer ones have as well.
            self.out.add(max(part.nbytes, LEAST_NBYTES), now - part.sent_at, idle=True)

    def expire(self, now: float) -> None:
        """Forget parts that should have arrived, of those that are not acknowledged."""
        while self.under_way and not self.under_way[0].answered:
            if now < self.under_way[0].expected_at:
                break
            self.arrived(self.under_way[0])

    def is_open(self, room_s: float) -> bool:
        """Whether another part may be sent, where so much may be before it on the way."""
        if not self.under_way or room_s <= 0:
            return room_s > 0
        bandwidth = self.out.bandwidth
        if bandwidth != bandwidth:
            return len(self.under_way) < UNACKNOWLEDGED
        return self.nbytes < room_s * bandwidth


class _Due(NamedTuple):
    """What is due first."""

    urgent: float
    """Of the short calls: they need the links at each of their steps."""
    first: float
    """Of all calls that will send more."""

    def room_s(self, deadline: float, now: float) -> float:
        """How much may be on the way when a part is sent of a call with this deadline.

        Less and less as a call is due that needs the links before, and for a while nothing when it
        is due now: what others sent would be in its way at each of its steps.  Not for ever: that
        call may wait for a rank that waits for this part.
        """
        if self.urgent < min(deadline, now + DUE_S):
            return 0.0
        if self.first >= deadline:
            return ROOM_S
        return min(ROOM_S, max((self.first - now) / 4, LEAST_ROOM_S))


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
        self._volumes: dict[Hashable, tuple[float, int, float]] = {}  # deadline, values, most bits
        self._calls: dict[Hashable, tuple[float, bool]] = {}
        # Calls that have not ended: deadline, and whether it takes next to no time.
        self._since = self._last = math.nan
        self._arrived = 0
        self._calls_unsure = 0  # that ended since a sample was taken
        self._changed = False  # whether anything was queued or came since the last look
        self._look_at = 0.0

    def to(self, peer: int) -> Link:
        """The link to a peer."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link()
        return link

    def bandwidths(self) -> dict[int, float]:
        """Bytes per second to each peer, as it measured them; NaN if it did not."""
        return {peer: link.out.bandwidth for peer, link in self._links.items()}

    def part_nbytes(self, bandwidth: float) -> float:
        """About how long a part should be."""
        return PART_S * bandwidth if bandwidth == bandwidth else math.inf

    # ---- bits ----

    def expect(
        self, key: Hashable, deadline: float, values: int, most_bits: float = math.inf
    ) -> None:
        """Note how many values of a call are still to be sent, by when, and how wide at most.

        No values end it.
        """
        if values > 0:
            self._volumes[key] = (deadline, values, most_bits)
        else:
            self._volumes.pop(key, None)
            self._changed = True

    def begin(self, key: Hashable, deadline: float, least_nbytes: int) -> None:
        """Note that a call has begun, and how few bytes it may send."""
        self._calls[key] = deadline, least_nbytes < LEAST_ROOM_S * self.slow

    def bandwidth(self, lowest: float, everywhere: bool = False) -> float:
        """Bytes per second to reckon with; NaN if nothing is known.

        `lowest` is that of the slowest link which the call knows of; unless it has heard of those
        everywhere, what earlier calls knew counts too.
        """
        return lowest if everywhere else slowest(lowest, self.slow)

    def allowed_bits(self, key: Hashable, now: float, peer: int, bandwidth: float) -> float:
        """Bits that each value of a call may have; NaN if nothing is known of the links.

        What is under way to the peer must get there first.
        """
        if bandwidth != bandwidth:
            return math.nan
        begin = now + self.to(peer).nbytes / bandwidth
        deadline, values, _ = self._volumes[key]
        if len(self._volumes) == 1:
            return 8.0 * bandwidth * max(deadline - begin, 0.0) / values
        arrays = [volume for other, volume in self._volumes.items() if other != key]
        arrays.append((deadline, values, math.inf))
        return bits_until(deadline, begin, arrays, bandwidth)

    def finish(self, key: Hashable, lowest: float, sign: int) -> None:
        """Take in the slowest link that a call knew of at its end.

        sign: 1 if it ended early and might have had more bits, -1 if it ended late and might have
        had fewer, else 0.
        """
        self._end(key)
        self._calls_unsure += 1
        if self.is_guessing:
            self.incoming.bandwidth *= GROWTH**sign
        if self.incoming.samples == 0:
            for link in self._links.values():
                link.out.bandwidth *= FIRST_GROWTH**sign
        self.slow = float(remembered(self.slow, lowest))

    def _end(self, key: Hashable) -> None:
        self._volumes.pop(key, None)
        self._calls.pop(key, None)
        self._changed = True

    # ---- sending ----

    def queue(self, peer: int, message: Outgoing) -> None:
        """Put a message behind those of its deadline."""
        self._changed = True
        self._serial += 1
        heapq.heappush(self.to(peer).queue, (message.deadline, self._serial, message))

    def pump(self, now: float) -> bool:
        """Send what may be sent; whether anything was.

        To be called often: it costs next to nothing while there is nothing to do.
        """
        if not self._changed and now < self._look_at:
            return False
        self._changed, self._look_at = False, now + LOOK_S
        moved, due = False, None
        for link in self._links.values():
            room_s = 0.0
            link.expire(now)
            while link.queue:
                due = due or self._due(now)
                message = link.queue[0][2]
                room_s = due.room_s(message.deadline, now)
                if not link.is_open(room_s):
                    break
                if message.begun() and len(link.under_way) >= UNACKNOWLEDGED:
                    break
                nbytes, answered = message.send_part(now, link.is_full(now))
                link.sent(message.key, nbytes, answered, now)
                link.blocked = moved = True
                if message.ended():
                    heapq.heappop(link.queue)
            link.blocked = bool(link.queue) and room_s >= ROOM_S
        return moved

    def _due(self, now: float) -> _Due:
        urgent = (end for end, short in self._calls.values() if short and now - end < HOLD_S)
        ends = (end for end, _, _ in self._volumes.values())
        return _Due(min(urgent, default=math.inf), min(ends, default=math.inf))

    @property
    def is_guessing(self) -> bool:
        """Whether no full link was seen for so long that what is known of it may be out of date."""
        return self._calls_unsure > UNSURE_CALLS

    def acknowledged(
        self, peer: int, key: Hashable, now: float, bandwidth: float, guessed: bool = False
    ) -> None:
        """The next part of a call has come to a peer, which measured so many bytes per second."""
        link = self.to(peer)
        link.guessed = guessed
        part = next(part for part in link.under_way if part.key == key)
        link.arrived(part)
        self._changed = True
        link.measured(part, now, bandwidth)

    # ---- measuring ----

    def arrived(self, now: float, nbytes: int, busy: bool) -> None:
        """Note a part that has come; busy: it had to wait for the link, or for the part before.

        What came in a row of such parts, behind the first, shows what the link can move.
        """
        if busy and nbytes < LEAST_NBYTES:
            return
        if busy:
            self._arrived += nbytes
            self._last = now
        seconds = self._last - self._since
        if seconds >= (SAMPLE_S if busy else SHORTEST_S):
            self.incoming.add(self._arrived, seconds)
            self._calls_unsure = 0
        if not busy or seconds >= SAMPLE_S:
            self._since = self._last = now
            self._arrived = 0

    def forget(self, key: Hashable) -> None:
        """Drop all messages of a call that has failed."""
        self._end(key)
        for link in self._links.values():
            link.queue = [entry for entry in link.queue if entry[2].key != key]
            heapq.heapify(link.queue)
            for part in [part for part in link.under_way if part.key == key]:
                link.arrived(part)
