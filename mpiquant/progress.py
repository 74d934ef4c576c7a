"""What moves the calls in flight: whoever waits, or a thread of its own.

There is one `engine` for all communicators of the process, so that a rank that waits for one call
serves all others too: another rank may need them first.  Whoever waits moves everything on; between
calls, with `progress="thread"`, a thread does, and sleeps as soon as nothing is in flight or
somebody waits.  It never holds the interpreter's lock for longer than a few messages take.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpi4py import MPI

from mpiquant import trace
from mpiquant._call import Call
from mpiquant._comm import channels, in_flight, lock, logger
from mpiquant.errors import CallTimeoutError, LifecycleError

POLL_S = 1e-3
"""How often a waiting rank looks for control messages and at the time."""

ASK_S = 1.0
"""Waiting time after which a rank asks the others where they are, and time for their answers."""

SHORTEST_NAP_S, LONGEST_NAP_S = 20e-6, 5e-3
"""Bounds of the progress thread's sleeps (see `Naps`)."""

UNTIL_WOKEN = -1.0
"""Such a nap has no end of its own."""

CROWDED_S = 20e-6
"""A core that was not given back for so long has others to serve."""

CROWDED_NAP_S, CROWDED_FOR_S = 30e-6, 20e-3
"""Waits on such a core are naps, for so long before they are looks again."""

THREAD_POLL_S = 20e-3
"""How often the progress thread looks for control messages."""


class Engine:
    """All calls in flight in this process."""

    def __init__(self) -> None:
        self.lock = lock
        self.waiting = 0  # threads that wait, and so move everything on themselves
        self.thread: threading.Thread | None = None
        self._stopping = False
        self._asleep = threading.Lock()  # whoever releases it wakes the thread, also from a nap
        self._asleep.acquire()

    def advance(self) -> bool:
        """Move everything in flight on, once; whether anything happened."""
        with self.lock:
            moved = False
            for channel in tuple(channels.values()):
                if channel.busy:
                    moved |= channel.advance()
            return moved

    def poll(self) -> None:
        """Take in control messages."""
        with self.lock:
            for channel in tuple(channels.values()):
                if channel.broken is None:
                    channel.poll()

    def wait(
        self,
        call: Call,
        waited: Waited,
        timeout: float | None = None,
        stall_s: float | None = None,
    ) -> None:
        """Move everything on until a call is done; adds the time in which nothing happened.

        Gives up after `timeout` seconds and reports after `stall_s`.
        """
        with self._taking_over():
            now = begin = time.perf_counter()
            next_poll = begin + POLL_S
            watch = Watch(timeout, stall_s)
            while True:
                moved = self.advance()
                call.do()
                if moved or call.done:
                    waited.end(now)
                    if call.done:
                        return
                    now = time.perf_counter()
                    continue
                waited.begin(now)
                now = waited.leave_core()
                if now >= next_poll:
                    self.poll()
                    with self.lock:
                        watch.look(call, now - begin)
                    now = time.perf_counter()
                    next_poll = now + POLL_S

    @contextmanager
    def _taking_over(self) -> Iterator[None]:
        with self.lock:
            self.waiting += 1
        try:
            yield
        finally:
            with self.lock:
                self.waiting -= 1
            self.wake()

    # ---- the thread ----

    def begin(self) -> None:
        """Let what was just launched begin: in the thread, so that the program goes on at once."""
        if self.thread is None:
            self.advance()
        else:
            self.wake()

    def wake(self) -> None:
        """Let the thread see to what was just started."""
        if self.thread is not None and self.waiting == 0 and in_flight:
            self._ring()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # it is awake already
            self._asleep.release()

    def start_thread(self) -> None:
        """Make sure that the progress thread runs.

        Raises
        ------
        LifecycleError
            If MPI was not started for several threads.
        """
        if self.thread is not None and self.thread.is_alive():
            return
        level = MPI.Query_thread()
        if level < MPI.THREAD_MULTIPLE:
            names = {
                MPI.THREAD_SINGLE: "single",
                MPI.THREAD_FUNNELED: "funneled",
                MPI.THREAD_SERIALIZED: "serialized",
            }
            raise LifecycleError(
                "progress='thread' needs MPI's thread level 'multiple', it runs with "
                f"{names.get(level, level)!r}: set mpi4py.rc.thread_level, or progress='manual'"
            )
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name="mpiquant-progress", daemon=True)
        self.thread.start()
        # No MPI call at exit: the thread only has to be out of MPI before MPI ends.
        atexit.register(self.stop_thread)

    def stop_thread(self) -> None:
        thread, self.thread = self.thread, None
        if thread is not None:
            self._stopping = True
            self._ring()
            thread.join(5)

    def _run(self) -> None:
        _want_exact_naps()
        naps, next_poll, nap_s = Naps(), 0.0, UNTIL_WOKEN
        while not self._stopping:
            self._asleep.acquire(timeout=nap_s)
            with self.lock:
                if self.waiting or not in_flight:
                    naps.rest()
                    nap_s = UNTIL_WOKEN
                    continue
                moved = self.advance()
                now = time.monotonic()
                if now >= next_poll:
                    self.poll()
                    next_poll = now + THREAD_POLL_S
            nap_s = naps.after(moved, now)

    def drain(self, limit_s: float) -> None:
        """Bring what is in flight to its end, as far as that is possible in the time."""
        deadline = time.monotonic() + limit_s
        while in_flight and time.monotonic() < deadline:
            if not self.advance():
                os.sched_yield()
                self.poll()


class Waited:
    """Seconds in which waits found nothing to do, and those of them that went to others."""

    def __init__(self) -> None:
        self.wall_s = self.idle_s = 0.0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def leave_core(self) -> float:
        """Let others use the core, if there are any; returns the time."""
        begin = time.perf_counter()
        core.leave(begin)
        end = time.perf_counter()
        self.idle_s += end - begin
        return end

    def end(self, now: float) -> None:
        if self._since is not None:
            since, self._since = self._since, None
            self.wall_s += now - since
            trace.active.span("wait", "wait", since, now)


class Core:
    """The core that a waiting thread runs on.

    One that looks all the time sees a message at once.  Where others want the core it must not: the
    scheduler lets them end their turns before one that looks, but stops them for one that wakes.
    """

    def __init__(self) -> None:
        self.crowded_until = 0.0

    def leave(self, now: float) -> None:
        """Let others use it, if there are any."""
        if now < self.crowded_until:
            time.sleep(CROWDED_NAP_S)
            return
        os.sched_yield()
        end = time.perf_counter()
        if end - now > CROWDED_S:
            self.crowded_until = end + CROWDED_FOR_S


class Naps:
    """How long the progress thread sleeps.

    On a slow wire something happens every few milliseconds, on a fast one every few microseconds,
    and each look costs some 50 us of the core that the program computes on.  So a nap is an eighth
    of the time that lay between the last events, or a quarter of the time that nothing has happened
    for, if that is longer: what happens is seen before a quarter more has gone by.
    """

    def __init__(self) -> None:
        self.gap_s = 0.0
        self.began: float | None = None

    def rest(self) -> None:
        """Nothing is in flight, or somebody else looks: that time does not count."""
        self.began = None

    def after(self, moved: bool, now: float) -> float:
        """Seconds to sleep behind a look at the time `now`."""
        if self.began is None:
            self.began = now
        waited_s = now - self.began
        if moved:
            if waited_s > SHORTEST_NAP_S:
                self.gap_s += 0.25 * (waited_s - self.gap_s)
            self.began, waited_s = now, 0.0
        nap_s = max(self.gap_s / 8, waited_s / 4)
        return min(max(nap_s, SHORTEST_NAP_S), LONGEST_NAP_S)


class Watch:
    """Looks at the time during one wait: asks the others, reports, gives up."""

    def __init__(self, timeout: float | None, stall_s: float | None) -> None:
        self.timeout = timeout
        alarms = [(ASK_S, "ask"), (stall_s, "report"), (timeout, "give up")]
        self.alarms = sorted((at, what) for at, what in alarms if at is not None)
        self.asked: tuple[Call, float] | None = None

    def look(self, waited_for: Call, waited: float) -> None:
        if not self.alarms or waited < self.alarms[0][0] or waited_for.done:
            return
        call = waited_for.channel.oldest()
        if not isinstance(call, Call) or call.failing:
            return
        if self.asked is None or self.asked[0] is not call:
            self.asked = (call, waited)
            call.ask()
        answered = len(call.answers) == call.channel.size - 1
        if answered or waited > self.asked[1] + ASK_S:
            asked_at = self.asked[1]
            self.asked = None
            while self.alarms and self.alarms[0][0] <= asked_at and not call.done:
                self._act(self.alarms.pop(0)[1], call, waited)

    def _act(self, what: str, call: Call, waited: float) -> None:
        if what == "report":
            logger.warning("%s has been waited for for %.0f s: %s", call, waited, call.situation())
        elif what == "give up":
            call.throw(
                CallTimeoutError(f"{call} did not end within {self.timeout} s: {call.situation()}")
            )


def _want_exact_naps() -> None:
    """Sleep as long as asked, not 50 us more; only Linux knows, and nothing depends on it."""
    set_timer_slack = 29
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_timer_slack, 1000, 0, 0, 0)


engine = Engine()
core = Core()

_keyvals: list[int] = []


def drain_at_finalize() -> None:
    """See that MPI_Finalize first ends what the program never waited for."""
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_finalize))
        MPI.COMM_SELF.Set_attr(_keyvals[0], engine)


def _finalize(comm: MPI.Comm, keyval: int, engine: Engine) -> None:
    engine.stop_thread()
    engine.drain(5.0)
    channels.clear()
