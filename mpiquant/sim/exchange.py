"""The calls of one iteration's buckets, on links and processors that they share.

Each rank has a link and a processor for all its calls.  Legs are taken one by one, in an order that
is the same on all ranks: of those that can begin by the time the link is free, that of the call
which is due first.  So a call under way makes room for an urgent one between two messages, as in
the real runner.  Times are recurrences on arrays over the ranks; what is the same for all ranks is
only the order, decided by the means of when legs could begin.

Some steps that are taken together end with the last of three: the way of a message around the ring,
hop behind hop with their latencies, the links' work, and the processors'.  Late or slow ranks hold
up those that their messages can reach within the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mpiquant.sim.control import Control
from mpiquant.sim.legs import Course, Leg
from mpiquant.sim.machine import Machine
from mpiquant.sim.noise import Partial, loss_of
from mpiquant.sim.schemes import Widths
from mpiquant.sim.wires import Cluster, Route, ahead, behind, window_mean, windowed

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class Call:
    """A bucket's call on all ranks.

    Attributes
    ----------
    ready, done : (ranks,) array
        When its gradients are ready, and its sums there.
    bits : dict of str to float
        Means over ranks and values of each phase's messages; what one rank encoded for all counts
        each time it is sent.
    sent : float
        Bytes of a rank, the mean.
    squared_error : float
        Relative, to be expected of normal data; of pieces of a step, the last one's width counts.
    """

    def __init__(self, index: int, course: Course, ready: Floats) -> None:
        self.index, self.course, self.ready = index, course, ready
        self.done = ready
        self.position = 0
        self.gone = ready  # when the last message had been sent
        self.front = [ready] * course.lanes  # when what the next leg of each lane needs is there
        self.arrived = ready  # of the pieces of a step, and of what was spread
        self.width: list[Indices | int] = [0] * course.lanes  # as last chosen
        self.wire: list[Floats | float] = [0.0] * course.lanes  # bytes per value of final sums
        self.start = float(ready.mean())
        self.sent = 0.0
        self.sums = [Partial()] * course.lanes  # that a rank holds
        self.bit_sums = {"partial": 0.0, "final": 0.0}
        self.partial_bits = np.zeros(len(ready))
        self._values = {"partial": 0, "final": 0}
        for leg in course.legs:
            self._values[leg.phase] += leg.values * leg.steps

    @property
    def leg(self) -> Leg | None:
        """The next one."""
        legs = self.course.legs
        return legs[self.position] if self.position < len(legs) else None

    @property
    def squared_error(self) -> float:
        return sum(each.squared_error for each in self.sums) / len(self.sums)

    @property
    def bits(self) -> dict[str, float]:
        pairs = self._values.items()
        return {phase: self.bit_sums[phase] / n if n else float("nan") for phase, n in pairs}

    def share(self, leg: Leg) -> float:
        """Part of its phase's values that a leg holds."""
        return leg.values * leg.steps / self._values[leg.phase]

    def advance(self) -> None:
        self.position += 1
        if self.leg is not None:
            self.start = float(self.front[self.leg.lane].mean())


class Exchange:
    """Links and processors of all ranks, from one iteration to the next.

    Parameters
    ----------
    cluster : Cluster
    machine : Machine
    widths : Widths
    control : Control or None
        Of an adaptive scheme.
    order : {"deadline", "arrival"}
        Whether the call that is due first goes first, or the one that was ready first.
    processors : int
        Of each rank's kernels, which share the work evenly.
    """

    def __init__(
        self,
        cluster: Cluster,
        machine: Machine,
        widths: Widths,
        control: Control | None = None,
        *,
        order: Literal["deadline", "arrival"] = "deadline",
        processors: int = 1,
    ) -> None:
        self.cluster, self.machine, self.widths, self.control = cluster, machine, widths, control
        self.order, self.processors = order, processors
        self.link, self.processor, self.incoming = np.full((3, cluster.ranks), -np.inf)
        self.busy_until = -np.inf  # mean of when links are free
        self._routes: dict[tuple[str, int], Route] = {}
        self._seconds: dict[tuple[int, str], NDArray[np.float64]] = {}

    def run(self, calls: Sequence[Call]) -> None:
        """Carry out all legs of some calls, which are in the order in which they are ready."""
        waiting = [call for call in calls if call.leg is not None]
        begun = set()
        while waiting:
            call = self._next(waiting)
            if self.control is not None and call.index not in begun:
                begun.add(call.index)
                self.control.begin_call(call.index, call.ready)
            self._carry_out(call)
            if call.leg is None:
                self._finish(call)
                waiting.remove(call)

    def _next(self, waiting: list[Call]) -> Call:
        """The call whose leg is next: buckets that are ready later are due earlier."""
        horizon = max(self.busy_until, min(call.start for call in waiting))
        able = [call for call in waiting if call.start <= horizon]
        return able[-1] if self.order == "deadline" else able[0]

    # ---- a leg ----

    def _carry_out(self, call: Call) -> None:
        leg = call.leg
        assert leg is not None
        front = call.front[leg.lane]
        begin = np.maximum(front, self.processor)
        self._choose(call, leg, np.maximum(begin, self.link))
        nbytes = self._nbytes(call, leg)
        before = self._cost(call, leg, "before") + leg.ends * self.machine.message_s
        after = self._cost(call, leg, "after")
        self.processor = begin + leg.steps * (before + after)
        route = self._route(leg)
        start = np.maximum(begin + before, self.link)
        self.link = route.end(start, leg.steps * nbytes)
        wire_s = self.link - start
        each_s = wire_s / leg.steps
        worked = begin + leg.steps * (before + after) - after + each_s
        done = np.maximum(self.link, worked) + route.latency_s
        if leg.exchange == "chain":
            hop_s = before + each_s + route.latency_s
            in_turn = behind(begin, leg.steps) + leg.steps * window_mean(hop_s, 1, leg.steps)
            call.front[leg.lane] = np.maximum(windowed(done, 1, leg.steps), in_turn)
        else:
            self._arrive(call, leg, route, done, start, nbytes)
        self._measure(call, leg, route, leg.steps * nbytes, wire_s)
        call.sent += leg.steps * float(np.mean(nbytes))
        call.gone = self.link
        call.advance()
        self.busy_until = float(self.link.mean())

    def _route(self, leg: Leg) -> Route:
        key = leg.exchange, leg.distance if leg.exchange == "pair" else 1
        if key not in self._routes:
            size, local = self.cluster.ranks, self.cluster.ranks_per_node
            if leg.exchange == "chain":
                route = Route(self.cluster, ahead(size, 1))
            elif leg.exchange == "pair":
                far = leg.distance >= local
                targets = np.arange(size) ^ leg.distance
                route = Route(self.cluster, targets, local if far else 1)
            else:
                # To all in turn; what receivers' interfaces take is counted by `_arrive`.
                route = Route(self.cluster, None, local)
            self._routes[key] = route
        return self._routes[key]

    def _arrive(
        self, call: Call, leg: Leg, route: Route, done: Floats, start: Floats, nbytes: Floats
    ) -> None:
        """What the leg's messages make possible at those who get them, if not around a ring."""
        if leg.exchange == "pair":
            call.arrived = np.maximum(call.arrived, done[route.targets])
            if leg.last:
                call.front[0] = call.arrived
        else:
            sources = windowed(done, leg.distance, leg.steps)
            came = window_mean(np.broadcast_to(nbytes, done.shape), leg.distance, leg.steps)
            first = np.maximum(self.incoming, windowed(start, leg.distance, leg.steps, np.minimum))
            self.incoming = route.end(first, leg.steps * came)
            here = np.maximum(sources, self.incoming + route.latency_s)
            call.arrived = np.maximum(call.arrived, here)

    # ---- bits ----

    def _choose(self, call: Call, leg: Leg, now: Floats) -> None:
        """Width of each rank's messages: of partial sums each time, of final ones once."""
        if leg.phase == "partial" or leg.first == 0:
            if self.control is not None:
                final = leg.phase == "final" and leg.exchange != "spread"
                call.width[leg.lane] = self.control.choose(call.index, now, final=final)
            self._note_error(call, leg)
            if leg.phase == "final":
                self._own_final(call, leg)

    def _own_final(self, call: Call, leg: Leg) -> None:
        """Bytes for each value, and bits, of what this rank encodes for all."""
        width = call.width[leg.lane]
        per_value = self.widths.nbytes(leg.values)[width] / leg.values
        call.wire[leg.lane] = np.asarray(per_value, np.float64)

    def _nbytes(self, call: Call, leg: Leg) -> Floats:
        """Bytes of each rank's messages; the mean of several steps."""
        width = call.width[leg.lane]
        if leg.phase == "partial":
            self._account(call, leg, self.widths.bits[width])
            return np.asarray(self.widths.nbytes(leg.values)[width])
        own = np.asarray(call.wire[leg.lane])
        if own.ndim == 0 or leg.exchange == "spread":
            sent = own
        elif leg.exchange == "chain":
            sent = window_mean(own, leg.first, leg.steps)
        else:
            sent = own
            if leg.last:  # from here on each rank sends on what its peer has as well
                peers = np.arange(len(own)) ^ leg.distance
                call.wire[leg.lane] = (own + own[peers]) / 2
        self._account(call, leg, self._bits_of(sent, leg.values))
        return np.asarray(sent * leg.values)

    def _bits_of(self, per_value: Floats, values: int) -> Floats:
        """Bits of final sums by what they take on the wire, scales left out."""
        nbytes = self.widths.nbytes(values) / values
        return np.asarray(np.interp(per_value, nbytes, self.widths.bits))

    def _account(self, call: Call, leg: Leg, bits: Floats | float) -> None:
        count = leg.values * leg.steps
        call.bit_sums[leg.phase] += float(np.mean(bits)) * count
        if leg.phase == "partial":
            call.partial_bits = call.partial_bits + bits * call.share(leg)
        if self.control is not None:
            self.control.account(call.index, count, bits)

    def _note_error(self, call: Call, leg: Leg) -> None:
        """What the encoding of a leg's messages does to the sums that they hold."""
        loss = loss_of(self.widths, call.width[leg.lane])
        partial = call.sums[leg.lane]
        if leg.exchange == "spread":
            partial = Partial().encoded(loss).times(self.cluster.ranks - 1).plus(Partial())
        elif leg.phase == "final":
            partial = partial.encoded(loss) if leg.last else partial
        elif leg.exchange == "pair":
            partial = partial.encoded(loss).plus(partial) if leg.last else partial
        else:
            for _ in range(leg.steps):
                partial = partial.encoded(loss).plus(Partial())
        call.sums[leg.lane] = partial

    def _measure(self, call: Call, leg: Leg, route: Route, nbytes: Floats, wire_s: Floats) -> None:
        """What ranks learn of the links: from what came, and from what it says of those behind."""
        control = self.control
        if control is None:
            return
        known = np.fmin(control.lowest[call.index], control.estimate)
        sizes = np.broadcast_to(nbytes, wire_s.shape)
        if leg.exchange == "pair":
            control.measured(sizes[route.targets], wire_s[route.targets])
            heard = known[route.targets]
        else:
            control.measured(behind(sizes, 1), behind(wire_s, 1))
            heard = windowed(known, leg.distance, leg.steps, np.fmin)
        control.lowest[call.index] = np.fmin(np.fmin(known, heard), control.estimate)

    # ---- time ----

    def _cost(self, call: Call, leg: Leg, when: str) -> Floats | float:
        """Seconds in kernels at each step of a leg."""
        work = leg.before if when == "before" else leg.after
        if not work:
            return 0.0
        key = id(leg), when
        if key not in self._seconds:
            self._seconds[key] = self.widths.seconds(work) / self.processors
        found: Floats = self._seconds[key][call.width[leg.lane]]
        return found

    def _finish(self, call: Call) -> None:
        """What is left to do when the last messages are there."""
        there = call.arrived
        for front in call.front:
            there = np.maximum(there, front)
        width = call.width[-1]
        tail = self.widths.seconds(call.course.tail)[width] / self.processors
        tail = tail + self.machine.message_s
        call.done = np.maximum(np.maximum(there, self.processor) + tail, call.gone)
        self.processor = self.processor + tail
        if self.control is not None:
            self.control.end_call(call.index, call.partial_bits)
