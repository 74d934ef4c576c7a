"""One collective call: a state machine with its messages, its agreement and its faults.

The work of a call is a generator that yields whenever it can do no more for now, and says whether
anything happened since the last time; `step` moves it on.  Blocking and nonblocking calls are the
same calls: they differ only in who steps them, and when.

*Agreement.*  Each rank opens a call with a header to its right neighbour in rank order and checks
the one from its left neighbour before it hands on any sum: if ranks disagree anywhere, they do so
on two neighbours at least, and no rank can complete the call.  A plan that was never used before,
or that leaves some rank without data, is agreed on by all before any data move: the neighbours'
check and then a dissemination of its outcome, so that all ranks learn it alike.

*Faults.*  A rank that raises or finds a disagreement tells all others, which look for that
whenever they are here.  Each then tells all others how many messages of this call it has sent
them, receives and drops what is still under way, and raises: the communicator is as clean as
before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from mpi4py import MPI

from mpiquant import trace
from mpiquant._agreement import HEADER_NBYTES, Plan, difference, read_header
from mpiquant._comm import HEADER_TAG, ROUNDS, Channel, data_tag, in_flight, lock
from mpiquant._control import Answer, Fault, Question
from mpiquant.errors import AgreementError, CallTimeoutError, RemoteTypeError
from mpiquant.typing import Array, Bytes

FAULT_S = 10.0
"""How long a failing rank waits for the others before it raises alone."""

T = TypeVar("T")
Steps: TypeAlias = Generator[bool, None, T]
"""Yields whether anything happened since the last yield."""


def _nobody() -> None:
    """The rank waited for, if there is none in particular."""


class _StoppedError(Exception):
    """The call cannot go on: another rank left it, or its plan is a foreign one."""


class Call:
    """One call on one rank: a transport for its runner, and its life.

    Parameters
    ----------
    channel : Channel
    name : str
        What the user calls the array.
    timeout : float or None
        Seconds that a wait for it may take.
    seq : int, optional
        Its number; the next one by default.
    deadline : float, optional
        When its result is needed, on the clock of `time.perf_counter`.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        timeout: float | None = None,
        seq: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        self.channel = channel
        self.name = name
        self.timeout = timeout
        self.deadline = deadline
        if seq is None:
            seq = channel.seq
            channel.seq += 1
        self.seq = seq
        self.header_tag = HEADER_TAG + seq % ROUNDS
        self.tag = 0  # of the data: known with the plan
        self.plan: Plan | None = None
        self.opened = False
        self.alone = False  # whether no later call is opened before this one has ended
        self.done = False
        self.failing = False
        self.error: BaseException | None = None
        self.result: Any = None
        self.when_done: list[Callable[[], None]] = []
        self.waits_for: Callable[[], int | None] = _nobody
        self.answers: dict[int, Answer] = {}
        self.foreign = False
        # All requests stay with the call, so that MPI never writes to freed memory.
        self.sends: list[MPI.Request] = []
        self.header_sends: list[MPI.Request] = []
        self.recvs: list[tuple[int, MPI.Request]] = []
        self.header_recvs: list[tuple[int, MPI.Request]] = []
        self.native_begun_on: MPI.Intracomm | None = None
        self.native_requests: list[Any] = []
        self.todo: Callable[[], None] | None = None
        self.sent = np.zeros((channel.size, 2), np.int64)  # payload and headers, to each rank
        self.header_bytes = 0
        self._left: tuple[MPI.Request, bytearray, int] | None = None

    def __str__(self) -> str:
        kind = self.plan.kind if self.plan else "a call"
        named = f" of {self.name!r}" if self.name else ""
        return f"{kind} number {self.seq}{named} on rank {self.channel.rank}"

    def adopt(
        self, plan: Plan, receiving: Sequence[MPI.Request], sending: Sequence[MPI.Request]
    ) -> None:
        """Take over a known plan, and messages with the other of two ranks, that began before."""
        self.plan = plan
        self._set_tag(self.channel.agreed[plan.hash])
        peer = 1 - self.channel.rank
        self.recvs.extend((peer, request) for request in receiving)
        self.sends.extend(sending)
        if sending:
            self.sent[peer, 0] = len(sending)

    # ---- life ----

    def launch(self, body: Steps[T], after: Callable[[T], Any] = lambda result: result) -> None:
        """Take the place in the channel's queue.

        An exception in the body becomes an error on every rank; `after` makes the result of what
        the body returns, when no rank needs this one any more.
        """
        self._steps = self._guarded(body, after)
        next(self._steps)
        self.launched = time.perf_counter()
        with lock:
            in_flight.add(self)
            self.channel.queue.append(self)

    def step(self) -> bool:
        """Move on as far as possible; whether anything happened."""
        try:
            if not self.failing and (self.foreign or self.seq in self.channel.faults):
                return self._steps.throw(_StoppedError())
            return next(self._steps)
        except StopIteration as end:
            self.result = end.value
            # Nothing is under way any more; who keeps a request need not keep its buffers.
            for requests in (self.sends, self.header_sends, self.recvs, self.header_recvs):
                requests.clear()
            self.native_requests.clear()
            self._end()
        except Exception as error:
            self.fail(error)
        except BaseException as error:  # Ctrl-C: the others were not told, the messages go on
            self.channel.give_up(f"{self} was interrupted by {error!r}", self)
            self.fail(error)
            raise
        return True

    def throw(self, error: Exception) -> None:
        """Raise an error in the body, from outside."""
        try:
            self._steps.throw(error)
        except StopIteration:
            self._end()
        except Exception as raised:
            self.fail(raised)

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.done = True
        self.waits_for = _nobody  # else the run and the call would hold each other
        if trace.active.on:
            end = time.perf_counter()
            trace.active.overlapping("call", str(self), self.launched, end, failed=bool(self.error))
        in_flight.discard(self)
        for function in self.when_done:
            function()

    def _guarded(self, body: Steps[T], after: Callable[[T], Any]) -> Steps[Any]:
        try:
            yield True  # where it rests until opened: what is thrown in then is caught below
            result = yield from body
            for request in self.header_sends:
                yield from self.until(request)
        except CallTimeoutError as error:
            self._tell_all("timeout", str(error))
            self.channel.give_up(str(error), self)
            raise
        except Exception as error:
            if lost := self.channel.lose(error, self):
                raise lost from error
            self.failing = True
            verdict = yield from self._fault(error)
            if verdict is error:
                raise
            raise verdict from (None if isinstance(error, _StoppedError) else error)
        return after(result)

    # ---- transport ----

    def isend(self, buffer: Bytes, peer: int) -> MPI.Request:
        self.sent[peer, 0] += 1
        request = self.channel.comm.Isend([buffer, buffer.nbytes, MPI.BYTE], peer, self.tag)
        self.sends.append(request)
        return request

    def irecv(self, buffer: Bytes, peer: int) -> MPI.Request:
        request = self.channel.comm.Irecv([buffer, buffer.nbytes, MPI.BYTE], peer, self.tag)
        self.recvs.append((peer, request))
        return request

    def until(self, request: MPI.Request) -> Steps[None]:
        while not request.Test():
            yield False

    def until_from(self, request: MPI.Request, peer: int) -> Steps[None]:
        self.waits_for = lambda: peer
        yield from self.until(request)

    def until_native(self, request: MPI.Request, *buffers: object) -> Steps[None]:
        """Wait for a native collective, which any rank may hold up."""
        self.native_begun_on = self.channel.native
        self.native_requests.append((request, buffers))
        self.waits_for = _nobody
        while not request.Test():
            yield False
            if self.channel.is_void(self.seq) and self.native_begun_on != self.channel.native:
                raise _StoppedError

    def until_called(self, function: Callable[[], None]) -> Steps[float]:
        """Let the thread that waits for this call make a blocking one, outside of all locks.

        Returns the seconds that the blocking one took.
        """
        errors: list[Exception] = []
        taken = 0.0

        def work() -> None:
            nonlocal taken
            begin = time.perf_counter()
            try:
                function()
            except Exception as error:
                errors.append(error)
            taken = time.perf_counter() - begin

        self.todo = work
        while self.todo is not None:
            yield False
        if errors:
            raise errors[0]
        return taken

    def do(self) -> None:
        """Make the blocking call that is to be made, if there is one."""
        if self.todo is not None:
            self.todo()
            self.todo = None

    def any(self, flag: bool) -> Steps[bool]:
        """Whether the flag is set on any rank."""
        (found,) = yield from self.largest([flag])
        return bool(found > 0)

    def largest(self, values: Sequence[float]) -> Steps[Array]:
        """The largest of each value on all ranks: a dissemination, with messages of this call."""
        size, rank, offset = self.channel.size, self.channel.rank, 1
        found = np.array(values, np.float64)
        while offset < size:
            left = (rank - offset) % size
            buffer = np.empty_like(found)
            request = self.irecv(buffer.view(np.uint8), left)
            self.isend(found.view(np.uint8), (rank + offset) % size)
            yield from self.until_from(request, left)
            found = np.maximum(found, buffer)
            offset *= 2
        return found

    # ---- agreement ----

    def open(self, plan: Plan) -> Steps[None]:
        """Tell the right neighbour the plan; agree with all ranks if the plan asks for it."""
        self.plan = plan
        channel = self.channel
        native = plan.algorithm == "native"
        if native and channel.is_void(self.seq):
            raise _StoppedError
        if channel.size == 1:
            return
        number = channel.agreed.get(plan.hash, plan.hash if plan.check == "never" else None)
        if number is not None:
            self._set_tag(number)
            if plan.check == "never":
                return
            if native and plan.check == "first" and not plan.blocking:
                return
            if not native and plan.binds(channel.size):
                self._left = self._exchange(1)
                return
        yield from self._agree(agreement_offsets(channel.size))

    def reopen(self, plan: Plan, exchanges: list[HeaderExchange]) -> Steps[None]:
        """Take over an agreement of which all exchanges but the last have ended well."""
        self.plan = plan
        rank, size = self.channel.rank, self.channel.size
        offsets = agreement_offsets(size)
        for offset, exchange in zip(offsets, exchanges, strict=False):
            right, left = (rank + offset) % size, (rank - offset) % size
            self.header_recvs.append((left, exchange.receiving))
            self.header_sends.append(exchange.sending)
            self.sent[right, 1] += 1
        last = exchanges[-1]
        return self._agree(offsets[len(exchanges) :], (last.receiving, last.buffer, left))

    def _agree(
        self,
        offsets: Sequence[int],
        begun: tuple[MPI.Request, bytearray, int] | None = None,
    ) -> Steps[None]:
        """Exchange headers, until it is known whether all ranks have the same plan."""
        foreign = False
        if begun is not None:
            foreign = yield from self._is_foreign(begun)
        for offset in offsets:
            foreign |= yield from self._is_foreign(self._exchange(offset, foreign))
        if foreign:
            raise _StoppedError
        self._set_tag(self._know_plan())

    def _know_plan(self) -> int:
        """Its number: the same on all ranks, since all come to know the same plans in turn."""
        assert self.plan is not None
        agreed = self.channel.agreed
        return agreed.setdefault(self.plan.hash, len(agreed))

    def _set_tag(self, number: int) -> None:
        self.tag = data_tag(number, self.seq)

    def finish_agreement(self) -> Steps[None]:
        """Check the left neighbour's header, if that was not done yet."""
        if self._left is not None:
            left, self._left = self._left, None
            foreign = yield from self._is_foreign(left)
            if foreign:
                raise _StoppedError

    def _exchange(self, offset: int, foreign: bool = False) -> tuple[MPI.Request, bytearray, int]:
        assert self.plan is not None
        comm, rank, size = self.channel.comm, self.channel.rank, self.channel.size
        header, buffer = self.plan.header(self.seq, foreign), bytearray(HEADER_NBYTES)
        right, left = (rank + offset) % size, (rank - offset) % size
        request = comm.Irecv([buffer, MPI.BYTE], left, self.header_tag)
        self.header_recvs.append((left, request))
        self.header_sends.append(comm.Isend([header, MPI.BYTE], right, self.header_tag))
        self.sent[right, 1] += 1
        self.header_bytes += len(header)
        return request, buffer, left

    def _is_foreign(self, exchange: tuple[MPI.Request, bytearray, int]) -> Steps[bool]:
        assert self.plan is not None
        request, buffer, peer = exchange
        yield from self.until_from(request, peer)
        seen, seq, plan_hash = read_header(bytes(buffer))
        return seen or (seq, plan_hash) != (self.seq, self.plan.hash)

    # ---- faults ----

    def _tell_all(self, kind: str, text: str) -> Fault:
        """Tell all other ranks that the call goes on no more here; what they were told."""
        channel = self.channel
        fault = Fault(
            seq=self.seq,
            kind=kind,
            text=text,
            plan=self.plan.values() if self.plan else None,
            agreed=self.plan is not None and self.plan.hash in channel.agreed,
            tag=self.tag,
            sent=[],
            next_seq=channel.next_to_open,
            native=self.native_begun_on is not None and self.native_begun_on == channel.native,
        )
        for peer in range(channel.size):
            if peer != channel.rank:
                sent = [int(n) for n in self.sent[peer]]
                channel.tell(peer, replace(fault, sent=sent))
        return fault

    def _fault(self, error: Exception) -> Steps[Exception]:
        """Tell all ranks, end the call with them, and say what to raise."""
        channel = self.channel
        if channel.size == 1:
            return error
        if isinstance(error, MPI.Exception) and error.Get_error_class() == MPI.ERR_TRUNCATE:
            # A message longer than its receive: its sender has another plan.
            error = _StoppedError()
        if isinstance(error, _StoppedError):
            kind, text = "stopped", ""
            if any(f.kind == "timeout" for f in channel.faults.get(self.seq, {}).values()):
                return self._verdict(error)
        else:
            kind = "type" if isinstance(error, TypeError) else "error"
            text = str(error) if isinstance(error, (TypeError, ValueError)) else repr(error)
        channel.recovering += 1
        try:
            told = self._tell_all(kind, text)
            yield from self._recover(told)
        finally:
            channel.recovering -= 1
        verdict = self._verdict(error)
        channel.faults.pop(self.seq, None)
        return verdict

    def _verdict(self, error: Exception) -> Exception:
        if not isinstance(error, _StoppedError):
            return error
        channel = self.channel
        faults = channel.faults.get(self.seq, {})
        for rank, fault in sorted(faults.items()):
            if fault.kind == "timeout":
                channel.give_up(f"rank {rank} gave up: {fault.text}", self)
                return CallTimeoutError(f"{self}: rank {rank} gave up: {fault.text}")
        for rank, fault in sorted(faults.items()):
            if fault.kind in ("error", "type"):
                kind = RemoteTypeError if fault.kind == "type" else AgreementError
                return kind(f"{self} failed on rank {rank}: {fault.text}")
        plans = {rank: fault.plan for rank, fault in faults.items() if fault.plan}
        if self.plan is not None:
            plans[channel.rank] = self.plan.values()
        found = difference(plans)
        if found:
            return AgreementError(f"ranks disagree in {self}: {found}")
        return AgreementError(
            f"{self} was lost, since an earlier call failed while it was under way: repeat it"
        )

    def _recover(self, told: Fault) -> Steps[None]:
        """Receive and drop all messages of this call that are still under way.

        `told` is what this rank told the others, which go by it, and so must this one.
        """
        channel = self.channel
        faults = channel.faults.setdefault(self.seq, {})
        deadline = time.monotonic() + FAULT_S
        while len(faults) < channel.size - 1:
            yield False
            if any(f.kind == "timeout" for f in faults.values()):
                return
            if time.monotonic() > deadline:  # the others are not in this call: raise alone
                why = f"{self} failed on this rank only, the others did not take part"
                channel.give_up(why, self)
                return
        got = np.zeros((channel.size, 2), np.int64)
        for column, recvs in enumerate((self.recvs, self.header_recvs)):
            for peer, request in recvs:
                got[peer, column] += _end_receive(request)
        for peer, fault in faults.items():
            # The data may have been of another plan, and so have another tag.
            foreign = fault.tag != self.tag
            for column, tag in enumerate((fault.tag, self.header_tag)):
                taken = 0 if foreign and column == 0 else int(got[peer, column])
                for _ in range(fault.sent[column] - taken):
                    _discard(channel.comm, peer, tag)
        for request in self.sends + self.header_sends:
            yield from self.until(request)
        if self.plan is not None:
            mine = self.plan.values()
            if any(fault.agreed and fault.plan == mine for fault in faults.values()):
                # The fault came after the agreement, but was heard of here before its end.
                self._know_plan()
        yield from self._replace_native([told, *faults.values()])

    def _replace_native(self, faults: list[Fault]) -> Steps[None]:
        """A new duplicate for native collectives, where one cannot end on the old any more.

        All ranks must decide alike, so they go by what each had told and not by what has become of
        it: an earlier call may have replaced the duplicate since.
        """
        channel = self.channel
        if not any(fault.native for fault in faults):
            return
        first_unopened = max(fault.next_seq for fault in faults)
        channel.void.append(range(self.seq + 1, first_unopened))
        channel.abandoned.append((self, channel.native))
        channel.native, request = channel.comm.Idup()
        yield from self.until(request)

    # ---- who waits for whom ----

    def ask(self) -> None:
        """Ask all other ranks where they are."""
        self.answers.clear()
        question = Question(self.seq, self.plan.values() if self.plan else None)
        for peer in range(self.channel.size):
            if peer != self.channel.rank:
                self.channel.tell(peer, question)

    def hear(self, sender: int, message: Question | Answer) -> None:
        if isinstance(message, Answer):
            self.answers[sender] = message
            return
        state = "in" if self.plan is not None else "before"
        self.channel.tell(sender, Answer(self.seq, state, self.waits_for()))
        if self.plan is not None and message.plan not in (None, self.plan.values()):
            self.foreign = True

    def missing(self) -> list[int]:
        """Ranks that have not said that they are in the call or past it."""
        others = (p for p in range(self.channel.size) if p != self.channel.rank)
        return [p for p in others if p not in self.answers or self.answers[p].state == "before"]

    def situation(self) -> str:
        """Who waits for whom, in words."""
        parts = []
        missing = self.missing()
        peer = self.waits_for()
        if missing:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            parts.append(f"{ranks} missing")
        elif peer is not None:
            parts.append(f"waits for rank {peer}")
        for rank in range(self.channel.size):
            answer = self.answers.get(rank)
            if rank == self.channel.rank:
                continue
            if answer is None:
                parts.append(f"rank {rank} does not answer: stopped, or busy outside mpiquant")
            elif answer.state == "in" and answer.waits_for is not None:
                parts.append(f"rank {rank} waits for rank {answer.waits_for}")
            else:
                words = {"in": "is in the call", "before": "has not come to the call"}
                parts.append(f"rank {rank} {words.get(answer.state, 'has left the call')}")
        return "; ".join(parts)


class HeaderExchange(NamedTuple):
    """A header on its way to the right, and the one that comes from the left."""

    receiving: MPI.Request
    buffer: bytearray
    sending: MPI.Request


@lru_cache
def agreement_offsets(size: int) -> tuple[int, ...]:
    """To which neighbours on the right a rank sends its header, one after the other.

    Each rank checks its left neighbour's plan; a dissemination of what was found follows.  Two
    ranks have found the same.
    """
    return (1,) if size == 2 else (1, *(1 << k for k in range((size - 1).bit_length())))


def _end_receive(request: MPI.Request) -> bool:
    """Cancel a receive; whether it has taken a message all the same."""
    if request == MPI.REQUEST_NULL:
        return True
    status = MPI.Status()
    request.Cancel()
    with suppress(MPI.Exception):  # too long a message, received in part
        request.Wait(status)
        return not status.Is_cancelled()
    return True


def _discard(comm: MPI.Intracomm, peer: int, tag: int) -> None:
    message = comm.Mprobe(peer, tag, status := MPI.Status())
    message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
