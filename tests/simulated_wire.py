"""Links with a bandwidth and a clock of their own, for executions in one process.

The clock stands still while ranks work, and goes to the next arrival when nobody can do any more.
"""

import heapq
import itertools
from collections import defaultdict, deque


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Network:
    """Each rank sends one message after the other; trace(rank) is a `mpiquant.rate.Trace`."""

    def __init__(self, clock, trace, latency_s=50e-6):
        self.clock, self.trace, self.latency_s = clock, trace, latency_s
        self.free = defaultdict(float)  # by rank: when its wire is free
        self.flying = []
        self.serial = itertools.count()
        self.arrived = defaultdict(deque)
        self.posted = defaultdict(deque)

    def of(self, rank, tag=0):
        """Transport of a rank in the call of this tag."""
        return _Transport(self, rank, tag)

    def leaves(self, rank, begin, nbytes):
        """When the last of some bytes has left."""
        for seconds, bandwidth in self.trace(rank).pieces(begin, float("inf")):
            if nbytes <= seconds * bandwidth:
                return begin + nbytes / bandwidth
            nbytes -= seconds * bandwidth
            begin += seconds
        raise AssertionError("a trace ends never")

    def step(self):
        """Go to the next event; whether there was one."""
        if not self.flying:
            return False
        when, _, key, data, request = heapq.heappop(self.flying)
        self.clock.now = max(self.clock.now, when)
        if request is not None:
            request.done = True
        else:
            self.arrived[key].append(data)
            self.match(key)
        return True

    def match(self, key):
        while self.arrived[key] and self.posted[key]:
            data, request = self.arrived[key].popleft(), self.posted[key].popleft()
            assert len(data) <= len(request.buffer), "a message longer than its receive"
            request.buffer[: len(data)] = data
            request.done = True


class _Request:
    def __init__(self, buffer=None):
        self.buffer, self.done = buffer, False

    def Test(self):
        return self.done


class _Transport:
    def __init__(self, network, rank, tag):
        self.network, self.rank, self.tag = network, rank, tag

    def isend(self, buffer, peer):
        network, request = self.network, _Request()
        begin = max(network.free[self.rank], network.clock.now)
        end = network.leaves(self.rank, begin, len(buffer))
        network.free[self.rank] = end
        serial = network.serial
        heapq.heappush(network.flying, (end, next(serial), None, None, request))
        arrival = (
            end + network.latency_s,
            next(serial),
            (self.rank, peer, self.tag),
            buffer.copy(),
            None,
        )
        heapq.heappush(network.flying, arrival)
        return request

    def irecv(self, buffer, peer):
        request, key = _Request(buffer), (peer, self.rank, self.tag)
        self.network.posted[key].append(request)
        self.network.match(key)
        return request


def run_all(network, executions):
    """Carry all executions out; seconds from now on when each ended."""
    begin = network.clock.now
    ends = {}
    for execution in executions:
        execution.start()
    idle = 0
    for _ in range(1_000_000):
        moved = False
        for i, execution in enumerate(executions):
            if i not in ends and execution.advance():
                ends[i] = network.clock.now - begin
                moved = True
            moved |= execution.has_moved()
        if len(ends) == len(executions):
            return [ends[i] for i in range(len(executions))]
        if moved or network.step():
            idle = 0
        else:  # somebody may wait for a time, not for a message
            network.clock.now += 1e-3
            idle += 1
            assert idle < 1000, "deadlock"
    raise AssertionError("no end")
