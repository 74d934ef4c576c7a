"""The private channel behind a communicator: duplicates, call numbers, tags, calls in flight.

A `Channel` holds two private duplicates of the user's communicator, cached on it as an attribute,
so that none of our messages can meet one of the user's: one for messages, one for MPI's own
collectives.  It numbers the calls as the program makes them, and opens them in that order, so that
the n-th call of one rank is the n-th of every other, whatever happens to those before it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
from mpi4py import MPI

from mpiquant import _control, trace
from mpiquant._control import Answer, Fault, Question
from mpiquant.errors import CallTimeoutError, LifecycleError, RankLostError
from mpiquant.links import Links
from mpiquant.plan import OPEN_CALLS

ROUNDS = 4 * OPEN_CALLS
CONTROL_TAG, HEADER_TAG, DATA_TAG, PLANS = 1, 16, 16 + ROUNDS, 1022
"""Tags: one for control messages; HEADER_TAG + k mod ROUNDS for the headers of call k; and for its
data DATA_TAG + (p mod PLANS) ROUNDS + k mod ROUNDS, where p is the number of its plan.  None is
above the least bound that MPI guarantees, 32767.

Data of different plans thus never meet: a message longer than its receive is an error in MPI, but
Open MPI 5 writes all of it through shared memory, behind the end of the buffer."""

TURN_S = 0.5e-3
"""After so much work for other calls it is looked at the one that is due first."""

LOST = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
"""Classes of errors by which MPI tells that a rank has died."""

logger = logging.getLogger("mpiquant")


def data_tag(plan: int, seq: int) -> int:
    """Tag of the data of a call, by the numbers of its plan and of itself."""
    return DATA_TAG + plan % PLANS * ROUNDS + seq % ROUNDS


_deadline = attrgetter("deadline")


class CallLike(Protocol):
    """What a channel knows of a call (see `mpiquant._call.Call`)."""

    seq: int
    deadline: float
    done: bool
    opened: bool
    alone: bool

    def step(self) -> bool: ...

    def fail(self, error: BaseException) -> None: ...

    def hear(self, sender: int, message: Question | Answer) -> None: ...


Nodes: TypeAlias = tuple[tuple[int, ...], ...]
"""Ranks by node, in ascending order."""


class Channel:
    """Private duplicates of a communicator and the state of its calls."""

    def __init__(self, comm: MPI.Intracomm, native: MPI.Intracomm, nodes: Nodes) -> None:
        self.comm = comm
        self.native = native
        self.nodes = nodes
        self.rank = comm.rank
        self.size = comm.size
        self.vendor = MPI.get_vendor()[0]
        self.forks = forks[0]
        self.seq = 0  # number of the next call
        self.queue: deque[CallLike] = deque()  # not yet opened
        self.running: list[CallLike] = []  # opened, in order
        self.recovering = 0  # calls that wait for all ranks after a fault: no other is opened
        self.void: list[range] = []  # native calls that went down with an earlier one
        # What adaptive calls know of the wires.
        self.links = Links()
        self.agreed: dict[int, int] = {}  # hash of a known plan: its number, alike on all ranks
        self.quick: dict[Any, Any] = {}  # what small native calls were found to need
        self.tuners: dict[Any, Any] = {}  # of calls with the codec "auto", by their kind
        self.faults: dict[int, dict[int, Fault]] = {}  # call number: rank: what it said
        self.told: list[tuple[MPI.Request, bytes]] = []
        self.abandoned: list[object] = []  # keeps the buffers of what never ended
        self.broken: str | None = None  # why no further call is possible
        self.lost: list[int] | None = None  # ranks whose death broke it
        self.lock = threading.Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One thread at a time: two would pair up wrongly with other ranks' threads."""
        if not self.lock.acquire(blocking=False):
            raise LifecycleError("another thread is in a call on this communicator")
        try:
            if self.broken is not None:
                raise self._unusable()
            yield
        finally:
            self.lock.release()

    # ---- calls in flight ----

    @property
    def busy(self) -> bool:
        return bool(self.running or self.queue)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Number of each rank's node."""
        found = {rank: i for i, ranks in enumerate(self.nodes) for rank in ranks}
        return tuple(found[rank] for rank in range(self.size))

    @property
    def next_to_open(self) -> int:
        return self.queue[0].seq if self.queue else self.seq

    def oldest(self) -> CallLike | None:
        """The call that must end first for the others to come on."""
        return self.running[0] if self.running else self.queue[0] if self.queue else None

    def advance(self) -> bool:
        """Move calls on as far as they can, by deadline; whether anything happened.

        When that has taken a while, what is due first is looked at in between.
        """
        moved = False
        while self._may_open():
            call = self.queue.popleft()
            self.running.append(call)
            self._step(call)
            moved = True
        calls = sorted(self.running, key=_deadline)
        looked_at = time.perf_counter()
        for call in calls:
            moved |= self._step(call)
            if time.perf_counter() - looked_at > TURN_S:
                moved |= self._step(calls[0])
                looked_at = time.perf_counter()
        return moved

    def _may_open(self) -> bool:
        if not self.queue or self.recovering or len(self.running) >= OPEN_CALLS:
            return False
        last = self.running[-1] if self.running else None
        return last is None or (last.opened and not last.alone)

    def _step(self, call: CallLike) -> bool:
        if call.done:  # an earlier one of this round gave the communicator up
            return True
        moved = call.step()
        if call.done and call in self.running:
            self.running.remove(call)
        return moved

    def is_void(self, seq: int) -> bool:
        return any(seq in numbers for numbers in self.void)

    def give_up(self, why: str, by: CallLike | None = None) -> None:
        """Make the communicator unusable; keep the buffers of all that is under way.

        All calls fail, except the one that gives up, which has an error of its own.
        """
        if self.broken is None:
            self.broken = why
        for call in (*self.running, *self.queue):
            self.abandoned.append(call)
            if not call.done and call is not by:
                call.fail(self._unusable())
        self.running.clear()
        self.queue.clear()

    def _unusable(self) -> LifecycleError:
        text = f"the communicator cannot be used any more: {self.broken}"
        return LifecycleError(text) if self.lost is None else RankLostError(text, self.lost)

    def lose(self, error: Exception, by: CallLike | None = None) -> RankLostError | None:
        """What to raise if an error says that a rank has died; all other ranks then hear of it.

        Only an MPI with user-level failure mitigation (ULFM) tells: elsewhere the whole job ends,
        or the wait for the rank goes on until its timeout.
        """
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in LOST:
            return None
        if self.lost is None:
            self.lost = self._failed()
            for comm in (self.comm, self.native):
                with suppress(MPI.Exception, NotImplementedError):
                    comm.Revoke()  # whoever waits for us now, or for another, is told so
            named = ", ".join(map(str, self.lost))
            self.give_up(f"rank {named} has died" if named else "a rank has died", by)
        return RankLostError(str(self._unusable()), self.lost)

    def _failed(self) -> list[int]:
        try:
            failed, everybody = self.comm.Get_failed(), self.comm.Get_group()
            return sorted(failed.Translate_ranks(None, everybody))
        except (MPI.Exception, NotImplementedError):
            return []

    # ---- control messages ----

    def tell(self, peer: int, message: _control.Message) -> None:
        data = _control.pack(message)
        self.told.append((self.comm.Isend([data, MPI.BYTE], peer, CONTROL_TAG), data))

    def poll(self) -> None:
        """Take in the control messages that have arrived."""
        try:
            self._poll()
        except MPI.Exception as error:
            if self.lose(error) is None:
                raise

    def _poll(self) -> None:
        self.told = [entry for entry in self.told if not entry[0].Test()]
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, CONTROL_TAG, status):
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([buffer, MPI.BYTE], status.source, CONTROL_TAG)
            message = _control.unpack(bytes(buffer))
            if isinstance(message, Fault):
                self._take_fault(status.source, message)
            else:
                self._take_word(status.source, message)

    def _call(self, seq: int) -> CallLike | None:
        return next((c for c in (*self.running, *self.queue) if c.seq == seq), None)

    def _take_fault(self, sender: int, fault: Fault) -> None:
        if fault.seq < self.seq and self._call(fault.seq) is None:
            if self.broken is None:
                self.give_up(f"rank {sender} failed at the end of call {fault.seq}: {fault.text}")
            return
        self.faults.setdefault(fault.seq, {})[sender] = fault

    def _take_word(self, sender: int, message: Question | Answer) -> None:
        call = self._call(message.seq)
        if call is not None:
            call.hear(sender, message)
        elif isinstance(message, Question):
            state = "before" if message.seq >= self.seq else "past"
            self.tell(sender, Answer(message.seq, state, None))


forks = [0]
"""How often this process came out of a fork since the first import."""


def _count_fork() -> None:
    forks[0] += 1


os.register_at_fork(after_in_child=_count_fork)

_keyvals: list[int] = []  # one, made at the first call: importing makes no MPI call
channels: dict[int, Channel] = {}
"""All that are alive in this process, by the handle of the user's communicator."""

in_flight: set[CallLike] = set()
"""All calls of this process that have not ended."""

lock = threading.RLock()
"""Held by whoever starts calls or moves them on: the main thread, or the one for progress."""


def _free_channel(comm: MPI.Comm, keyval: int, channel: Channel) -> None:
    channels.pop(comm.handle, None)
    if channel.busy:  # its calls go on, and so it stays, under a number that no handle has
        channels[-1 - id(channel)] = channel
    elif channel.broken is None:
        channel.broken = "it was freed"
        # The predefined communicators end with MPI itself, which frees everything.
        if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
            channel.comm.Free()
            channel.native.Free()


def checked_comm(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """The communicator, COMM_WORLD by default, if it can be used now."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise LifecycleError("MPI is not running: call between MPI.Init() and MPI.Finalize()")
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        shown = "COMM_NULL" if comm == MPI.COMM_NULL else f"a {type(comm).__name__}"
        raise ValueError(f"comm is {shown}, expected an intracommunicator")
    return comm


def channel_of(comm: MPI.Intracomm | None, timeout: float | None = None) -> Channel:
    """The channel of a communicator (COMM_WORLD by default), made at its first use.

    Collective over comm at the first use, which waits for all ranks, but at most `timeout` seconds.
    """
    comm = checked_comm(comm)
    return find_channel(comm) or _make_channel(comm, timeout)


def find_channel(comm: MPI.Intracomm | None) -> Channel | None:
    """The channel of a communicator (COMM_WORLD by default), if it was used before."""
    found = channels.get((MPI.COMM_WORLD if comm is None else comm).handle)
    if found is None:
        return None
    if found.forks != forks[0]:
        raise LifecycleError("this process was forked after the communicator was first used")
    return found


def _make_channel(comm: MPI.Intracomm, timeout: float | None) -> Channel:
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_free_channel))
    if comm.handle in _unfinished:
        raise LifecycleError("an earlier first call on this communicator never ended")
    deadline = None if timeout is None else time.monotonic() + timeout
    # One after the other: two at once never end in some runs of Open MPI 5.
    private, native = _duplicate(comm, deadline), _duplicate(comm, deadline)
    channel = Channel(private, native, _nodes(comm, native, deadline))
    comm.Set_attr(_keyvals[0], channel)
    channels[comm.handle] = channel
    trace.active.set_rank(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    return channel


def _duplicate(comm: MPI.Intracomm, deadline: float | None) -> MPI.Intracomm:
    duplicate, request = comm.Idup()
    _await_all(comm, request, duplicate, deadline)
    return duplicate


def _nodes(comm: MPI.Intracomm, native: MPI.Intracomm, deadline: float | None) -> Nodes:
    """Ranks by node, which processors' names tell apart."""
    name = blake2b(MPI.Get_processor_name().encode(), digest_size=8).digest()
    mine, names = np.frombuffer(name, np.uint64).copy(), np.empty(comm.size, np.uint64)
    _await_all(comm, native.Iallgather(mine, names), (mine, names), deadline)
    ranks: dict[int, list[int]] = {}
    for rank, each in enumerate(names):
        ranks.setdefault(int(each), []).append(rank)
    return tuple(map(tuple, ranks.values()))


def _await_all(
    comm: MPI.Intracomm, request: MPI.Request, kept: object, deadline: float | None
) -> None:
    """Wait for what all ranks must do at the first use of a communicator."""
    _unfinished[comm.handle] = kept, request
    while not request.Test():
        os.sched_yield()
        if deadline is not None and time.monotonic() > deadline:
            raise CallTimeoutError(
                f"first call on {comm.name or 'a communicator'}, rank {comm.rank}: not all of its "
                f"{comm.size} ranks have come to it in time (MPI does not tell which)"
            )
    del _unfinished[comm.handle]


_unfinished: dict[int, Any] = {}
"""What is under way for new channels, by communicator's handle: alive until it ends, if ever."""
