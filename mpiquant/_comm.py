"""The private channel behind a communicator: agreement, tags, waiting, faults.

A `Channel` holds a private duplicate of the user's communicator, cached on it as an attribute, so
that none of our messages can meet one of the user's.  A `Call` is one collective on it.

*Agreement.*  A call's `Plan` holds all that the ranks must agree on.  Each rank opens a call with a
64-byte header to its right neighbour in rank order and checks the one from its left neighbour
before it hands on any sum: if ranks disagree anywhere, they do so on two neighbours at least, and
no rank can complete the call.  A plan that was never used before, or that leaves some rank without
data, is agreed on by all before any data move: the neighbours' check and then a dissemination
barrier of headers.  Native collectives, which cannot be stopped half-way, run only known or so
agreed plans.

*Faults.*  A rank that refuses its arguments or finds a disagreement sends POISON to all other
ranks, which look for it whenever they wait.  All ranks then exchange how many messages of this
call each has sent to each, receive and drop what is still under way, and raise: the communicator
is as clean as before.

Header, little-endian::

    offset  0  magic "MPQ1"          offset 24  number of elements        (8 bytes)
            4  flags, 0      (1)             32  call number               (8 bytes)
            5  kind          (1)             40  dtype, numpy's text       (4 bytes)
            6  algorithm     (2)             44  op                        (4 bytes)
            8  plan hash     (8)             48  codec, start of its spec  (16 bytes)
           16  hash of name  (8)
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiquant.errors import (
    AgreementError,
    CallTimeoutError,
    LifecycleError,
    MPIQuantError,
    RemoteTypeError,
)
from mpiquant.typing import Bytes

HEADER_TAG, POISON_TAG, FIRST_TAG, TAGS = 1, 2, 16, 32000
"""Payload tags are FIRST_TAG + call number mod TAGS: never above the least bound, 32767."""

POLL_S = 1e-3
"""How often a waiting rank looks for poison and at its timeout."""

FAULT_S = 10.0
"""How long a failing rank waits for the others before it raises alone."""

KINDS = ("allreduce", "reduce_scatter", "allgather")
ALGORITHM_CODES = ("native", "ring", "halving_doubling", "direct")
_HEADER = struct.Struct("<4sBBHQQQQ4s4s16s")


@dataclass(frozen=True)
class Plan:
    """What all ranks of a call must agree on."""

    kind: str
    count: int
    dtype: str
    op: str
    codec: str
    algorithm: str
    segment: int
    feedback: bool
    measured: bool
    name: str

    @cached_property
    def hash(self) -> int:
        text = repr([getattr(self, f.name) for f in fields(self)])
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @cached_property
    def name_hash(self) -> int:
        digest = blake2b(self.name.encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def binds(self, size: int) -> bool:
        """Whether every rank needs something from every other, so that neighbours' checks do."""
        return self.count >= (1 if self.kind == "allreduce" else size)

    def header(self, seq: int) -> bytes:
        return _HEADER.pack(
            b"MPQ1",
            0,
            KINDS.index(self.kind),
            ALGORITHM_CODES.index(self.algorithm),
            self.hash,
            self.name_hash,
            self.count,
            seq,
            self.dtype.encode(),
            self.op.encode(),
            self.codec.encode()[:16],
        )

    def difference(self, seq: int, header: bytes) -> tuple[str, object, object] | None:
        """First field of a header that differs, the header's value and mine; None if all agree."""
        mine = self.header(seq)
        if header == mine:
            return None
        got, own = _HEADER.unpack(header), _HEADER.unpack(mine)
        for name, index in (
            ("call number", 7),
            ("collective", 2),
            ("shape (elements)", 6),
            ("dtype", 8),
            ("op", 9),
            ("codec", 10),
            ("algorithm", 3),
            ("name (hash)", 5),
        ):
            if got[index] != own[index]:
                return name, _shown(name, got[index]), _shown(name, own[index])
        return "segment, feedback, stats or codec options (hash)", hex(got[4]), hex(own[4])


plan_of = lru_cache(maxsize=1024)(Plan)
"""The plan of some fields; the same object, with its hash, for the calls of a loop."""


def _shown(name: str, value: Any) -> object:
    if name == "collective":
        return KINDS[value] if value < len(KINDS) else value
    if name == "algorithm":
        return ALGORITHM_CODES[value] if value < len(ALGORITHM_CODES) else value
    return value.rstrip(b"\0").decode(errors="replace") if isinstance(value, bytes) else value


class Channel:
    """Private duplicate of a communicator and the state of its calls."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = self.comm.rank
        self.size = self.comm.size
        self.pid = os.getpid()
        self.seq = 0
        self.agreed: set[int] = set()
        self.poisoned: dict[int, tuple[int, bool, str]] = {}  # call number: rank, kind, text
        self.poison_sent = np.zeros(self.size, np.int64)  # since the beginning, to each rank
        self.poison_got = np.zeros(self.size, np.int64)
        self.abandoned: list[object] = []  # keeps the buffers of what never ended
        self.broken: str | None = None  # why no further call is possible
        self.lock = threading.Lock()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """One thread at a time: two would pair up wrongly with other ranks' threads."""
        if not self.lock.acquire(blocking=False):
            raise LifecycleError("another thread is in a call on this communicator")
        try:
            if self.broken is not None:
                raise LifecycleError(f"the communicator cannot be used any more: {self.broken}")
            yield
        finally:
            self.lock.release()

    @contextmanager
    def refusing(self, name: str) -> Iterator[None]:
        """Make an exception of the block, before any message, an error on every rank."""
        try:
            yield
        except Exception as error:
            Call(self, None, name, None).refuse(error)
            raise

    def look_for_poison(self) -> None:
        """Take in poison that has arrived, for this call or a later one."""
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, POISON_TAG, status):
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([buffer, MPI.BYTE], status.source, POISON_TAG)
            self.poison_got[status.source] += 1
            seq, is_type = struct.unpack_from("<QB", buffer)
            self.poisoned.setdefault(seq, (status.source, bool(is_type), buffer[9:].decode()))


class Call:
    """One collective call: a transport for its runner, and its agreement."""

    def __init__(
        self, channel: Channel, plan: Plan | None, name: str, timeout: float | None
    ) -> None:
        self.channel = channel
        self.plan = plan
        self.name = name
        self.timeout = timeout
        self.seq = channel.seq
        channel.seq += 1
        self.tag = FIRST_TAG + self.seq % TAGS
        self.started = time.monotonic()
        self.next_poll = self.started + POLL_S
        self.waits_for: Callable[[], int | None] = lambda: None
        self.sends: list[MPI.Request] = []
        self.header_sends: list[MPI.Request] = []
        # Kept with the call, so that MPI never writes to freed memory if it is abandoned.
        self.header_recvs: list[MPI.Request] = []
        self.collectives: list[MPI.Request] = []
        self.recvs: list[tuple[int, MPI.Request]] = []
        self.sent = np.zeros((channel.size, 2), np.int64)  # payload and headers, to each rank
        self.got = np.zeros((channel.size, 2), np.int64)
        self.header_bytes = 0
        self._left: tuple[MPI.Request, bytearray] | None = None

    # ---- transport of the runner ----

    def isend(self, buffer: Bytes, peer: int) -> MPI.Request:
        self.sent[peer, 0] += 1
        request = self.channel.comm.Isend([buffer, buffer.nbytes, MPI.BYTE], peer, self.tag)
        self.sends.append(request)
        return request

    def irecv(self, buffer: Bytes, peer: int) -> MPI.Request:
        request = self.channel.comm.Irecv([buffer, buffer.nbytes, MPI.BYTE], peer, self.tag)
        self.recvs.append((peer, request))
        return request

    def wait(self) -> None:
        """Let others run; now and then look for poison and at the timeout."""
        os.sched_yield()
        now = time.monotonic()
        if now < self.next_poll:
            return
        self.next_poll = now + POLL_S
        self.channel.look_for_poison()
        self.raise_if_poisoned()
        if self.timeout is not None and now - self.started > self.timeout:
            peer = self.waits_for()
            missing = f"rank {peer}" if peer is not None else "other ranks"
            raise CallTimeoutError(f"{self} waited for {missing} for more than {self.timeout} s")

    def wait_for(self, request: MPI.Request, peer: int | None = None) -> None:
        self.waits_for = lambda: peer
        while not request.Test():
            self.wait()

    def wait_for_all(self, request: MPI.Request) -> None:
        """Wait for a native collective, which any rank may hold up."""
        self.collectives.append(request)
        self.wait_for(request)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank: a dissemination, with messages of this call."""
        size, rank, offset = self.channel.size, self.channel.rank, 1
        while offset < size:
            left = (rank - offset) % size
            buffer = np.empty(1, np.uint8)
            request = self.irecv(buffer, left)
            self.isend(np.array([flag], np.uint8), (rank + offset) % size)
            self.wait_for(request, left)
            flag = flag or bool(buffer[0])
            offset *= 2
        return flag

    def close(self) -> None:
        """The end of a call that went well."""
        for request in self.header_sends:
            self.wait_for(request, (self.channel.rank + 1) % self.channel.size)

    def __str__(self) -> str:
        kind = self.plan.kind if self.plan else "a call"
        named = f" of {self.name!r}" if self.name else ""
        return f"{kind} number {self.seq}{named} on rank {self.channel.rank}"

    # ---- agreement ----

    def open(self) -> None:
        """Tell the right neighbour the plan; agree with all ranks if the plan is new."""
        assert self.plan is not None
        if self.channel.size == 1:
            return
        if self.plan.hash in self.channel.agreed:
            if self.plan.algorithm == "native":
                return
            if self.plan.binds(self.channel.size):
                self._left = self._exchange(1)
                return
        offset = 1
        self._check(*self._exchange(1), 1)
        while offset < self.channel.size:
            self._check(*self._exchange(offset), offset)
            offset *= 2
        self.channel.agreed.add(self.plan.hash)

    def finish_agreement(self) -> None:
        """Check the left neighbour's header, if that was not done yet."""
        if self._left is not None:
            left, self._left = self._left, None
            self._check(*left, 1)

    def _exchange(self, offset: int) -> tuple[MPI.Request, bytearray]:
        assert self.plan is not None
        comm, rank, size = self.channel.comm, self.channel.rank, self.channel.size
        header = self.plan.header(self.seq)
        right, left = (rank + offset) % size, (rank - offset) % size
        buffer = bytearray(len(header))
        request = comm.Irecv([buffer, MPI.BYTE], left, HEADER_TAG)
        self.header_recvs.append(request)
        self.header_sends.append(comm.Isend([header, MPI.BYTE], right, HEADER_TAG))
        self.sent[right, 1] += 1
        self.header_bytes += len(header)
        return request, buffer

    def _check(self, request: MPI.Request, buffer: bytearray, offset: int) -> None:
        assert self.plan is not None
        peer = (self.channel.rank - offset) % self.channel.size
        try:
            self.wait_for(request, peer)
        except MPIQuantError:
            self._drop(request, peer, 1)
            raise
        self.got[peer, 1] += 1
        found = self.plan.difference(self.seq, bytes(buffer))
        if found is not None:
            name, theirs, mine = found
            raise AgreementError(
                f"ranks disagree in {self}: {name} is {theirs!r} on rank {peer} "
                f"and {mine!r} on rank {self.channel.rank}"
            )

    # ---- faults ----

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Make an exception of the block, raised here or elsewhere, an error on every rank."""
        try:
            self.raise_if_poisoned()
            yield
        except (CallTimeoutError, LifecycleError) as error:
            self._abandon(str(error))
            raise
        except MPI.Exception as error:
            if error.Get_error_class() == MPI.ERR_TRUNCATE:
                # A message longer than its receive: its sender has another plan; someone says so.
                self._await_poison()
            try:
                self.raise_if_poisoned()
            except AgreementError as cause:
                self._recover()
                raise cause from error
            raise
        except Exception as error:
            if self.seq not in self.channel.poisoned:
                self._poison(error)
            self._recover()
            raise
        except BaseException as error:  # Ctrl-C: the others were not told, the messages go on
            self._abandon(f"{self} was interrupted by {error!r}")
            raise

    def _abandon(self, why: str) -> None:
        """Give the communicator up, and keep the buffers of all that is under way."""
        self.channel.abandoned.append(self)
        self.channel.broken = why

    def refuse(self, error: Exception) -> None:
        """Tell all ranks that this one refused its arguments, and end the call with them."""
        if self.channel.size > 1:
            self._poison(error)
            self._recover()

    def raise_if_poisoned(self) -> None:
        for seq, (rank, _, text) in self.channel.poisoned.items():
            if seq < self.seq:
                raise LifecycleError(f"rank {rank} failed at the end of call {seq}: {text}")
        found = self.channel.poisoned.get(self.seq)
        if found is not None:
            rank, is_type, text = found
            kind = RemoteTypeError if is_type else AgreementError
            raise kind(f"{self} failed on rank {rank}: {text}")

    def _poison(self, error: Exception) -> None:
        is_type = isinstance(error, TypeError)
        text = str(error) if isinstance(error, (TypeError, ValueError)) else repr(error)
        message = struct.pack("<QB", self.seq, is_type) + text.encode(errors="backslashreplace")
        for peer in range(self.channel.size):
            if peer != self.channel.rank:
                request = self.channel.comm.Isend([message, MPI.BYTE], peer, POISON_TAG)
                self.sends.append(request)
                self.channel.poison_sent[peer] += 1

    def _await_poison(self) -> None:
        deadline = time.monotonic() + FAULT_S
        while self.seq not in self.channel.poisoned and time.monotonic() < deadline:
            self.channel.look_for_poison()
            os.sched_yield()

    def _recover(self) -> None:
        """Receive and drop all messages of this call that are still under way."""
        channel = self.channel
        mine = np.column_stack([self.sent, channel.poison_sent])
        theirs = np.empty_like(mine)
        exchange = channel.comm.Ialltoall(mine, theirs)
        deadline = time.monotonic() + FAULT_S
        while not exchange.Test():
            channel.look_for_poison()
            os.sched_yield()
            if time.monotonic() > deadline:  # the others are not in this call: raise alone
                channel.abandoned.append((self, exchange, mine, theirs))
                channel.broken = f"{self} failed on this rank only, the others did not take part"
                return
        if self._left is not None:
            self._drop(self._left[0], (channel.rank - 1) % channel.size, 1)
        for peer, request in self.recvs:
            self._drop(request, peer, 0)
        for peer in range(channel.size):
            for column, tag in ((0, self.tag), (1, HEADER_TAG)):
                for _ in range(theirs[peer, column] - self.got[peer, column]):
                    _discard(channel.comm, peer, tag)
        while np.any(channel.poison_got < theirs[:, 2]):
            channel.look_for_poison()
        MPI.Request.Waitall(self.sends + self.header_sends)
        channel.poisoned.pop(self.seq, None)
        # Some ranks may have agreed on this plan, and others not: all start anew.
        channel.agreed.clear()

    def _drop(self, request: MPI.Request, peer: int, column: int) -> None:
        if request != MPI.REQUEST_NULL:
            status = MPI.Status()
            request.Cancel()
            with suppress(MPI.Exception):  # too long a message, received in part
                request.Wait(status)
            if status.Is_cancelled():
                return
        self.got[peer, column] += 1


def _discard(comm: MPI.Intracomm, peer: int, tag: int) -> None:
    message = comm.Mprobe(peer, tag, status := MPI.Status())
    message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])


_keyvals: list[int] = []  # one, made at the first call: importing makes no MPI call


def _free_channel(comm: MPI.Comm, keyval: int, channel: Channel) -> None:
    # The predefined communicators end with MPI itself, which frees everything.
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        channel.comm.Free()


def checked_comm(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """The communicator, COMM_WORLD by default, if it can be used now."""
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise LifecycleError("MPI is not running: call between MPI.Init() and MPI.Finalize()")
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        shown = "COMM_NULL" if comm == MPI.COMM_NULL else f"a {type(comm).__name__}"
        raise ValueError(f"comm is {shown}, expected an intracommunicator")
    return comm


def channel_of(comm: MPI.Intracomm | None) -> Channel:
    """The channel of a communicator (COMM_WORLD by default), made at its first use.

    Collective over comm at the first use.
    """
    comm = checked_comm(comm)
    if not _keyvals:
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_free_channel))
    channel = comm.Get_attr(_keyvals[0])
    if not isinstance(channel, Channel):
        channel = Channel(comm)
        comm.Set_attr(_keyvals[0], channel)
    if channel.pid != os.getpid():
        raise LifecycleError("this process was forked after the communicator was first used")
    return channel
