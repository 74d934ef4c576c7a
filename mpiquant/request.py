"""Requests: what the nonblocking calls return."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpiquant._call import Call
from mpiquant.errors import LifecycleError
from mpiquant.progress import Waited, engine


class Request:
    """A collective in flight; made by `iallreduce` and `Iallreduce`.

    It moves on while any rank's thread is in a wait or test of this package (for whatever request),
    or all the time with the progress thread.  All buffers live until it has ended.  An error of
    the call is raised by every wait and test behind its end.
    """

    def __init__(
        self, calls: Sequence[Call], build: Callable[[Waited], Any], stall_s: float | None
    ) -> None:
        self._calls = list(calls)
        self._build = build
        self._stall_s = stall_s
        self._waited = Waited()
        self._built: list[Any] = []
        self._building = threading.Lock()
        self._seen = False

    # ---- one request ----

    def wait(self) -> Any:
        """Wait for the end; the result (the same object each time).

        Raises
        ------
        CallTimeoutError
            If this wait takes longer than the call's timeout.
        AgreementError, LifecycleError
            As the blocking call would.
        """
        self._seen = True
        for call in self._calls:
            if not call.done:
                engine.wait(call, self._waited, call.timeout, self._stall_s)
        return self._result()

    def test(self) -> tuple[bool, Any]:
        """Whether it has ended, and then the result; moves everything in flight on."""
        if not self.Test():
            return False, None
        return True, self._result()

    def Wait(self, status: object = None) -> bool:
        """`wait` without the result, as mpi4py's; returns True."""
        self.wait()
        return True

    def Test(self, status: object = None) -> bool:
        """Whether it has ended; moves everything in flight on."""
        if not self._done:
            engine.advance()
            if not self._done:
                engine.poll()
                return False
        self._seen = True
        self._result()
        return True

    @property
    def _done(self) -> bool:
        return all(call.done for call in self._calls)

    def _result(self) -> Any:
        for call in self._calls:
            if call.error is not None:
                raise call.error
        # Several threads may wait; none for the one that moves other calls on.
        with self._building:
            if not self._built:
                self._built.append(self._build(self._waited))
        return self._built[0]

    @property
    def error(self) -> BaseException | None:
        """What a wait would raise behind its end; None before it, and if nothing went wrong."""
        self._seen = True
        return next((call.error for call in self._calls if call.error is not None), None)

    def __del__(self) -> None:
        if not getattr(self, "_seen", True) and self._calls:
            warnings.warn(
                f"{self._calls[0]} was never waited for", ResourceWarning, stacklevel=2, source=self
            )

    # ---- several, also together with mpi4py's requests ----

    @classmethod
    def Waitall(cls, requests: Sequence[Any], statuses: object = None) -> bool:
        """Wait for all; the first error is raised when all have ended."""
        errors = []
        for request in requests:
            try:
                _wait_one(request)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Any], statuses: object = None) -> bool:
        """Whether all have ended."""
        return all([request.Test() for request in requests])  # noqa: C419 - all must move on

    @classmethod
    def Waitany(cls, requests: Sequence[Any], status: object = None) -> int:
        """Wait for any one; its index, or MPI.UNDEFINED if there is none left to wait for."""
        left = [i for i, request in enumerate(requests) if not _is_over(request)]
        while left:
            for i in left:
                if requests[i].Test():
                    return i
            os.sched_yield()
        return MPI.UNDEFINED

    @classmethod
    def waitall(cls, requests: Sequence[Any]) -> list[Any]:
        """The results of all."""
        cls.Waitall(requests)
        return [request.wait() for request in requests]

    def as_mpi(self) -> MPI.Grequest:
        """A generalized MPI request that completes with this one, for MPI's own waits.

        Raises
        ------
        LifecycleError
            Without the progress thread: nobody would move the call on in MPI's wait.
        """
        if engine.thread is None:
            raise LifecycleError("as_mpi() needs progress='thread': MPI's waits do not move it on")
        grequest = MPI.Grequest.Start(lambda status: None, lambda: None, lambda completed: None)
        self._seen = True
        self.when_done(grequest.Complete)
        return grequest

    def when_done(self, function: Callable[[], object]) -> None:
        """Have a function called once, when the call has ended: at once if it has.

        It is called by whichever thread moves the call on, and must not start or await calls.
        """
        with engine.lock:
            left = [call for call in self._calls if not call.done]

            def look() -> None:
                if all(call.done for call in left):
                    function()

            for call in left:
                call.when_done.append(look)
            if not left:
                function()


def _is_over(request: Any) -> bool:
    """Whether a request was waited for already."""
    if isinstance(request, Request):
        return request._done and request._seen
    return bool(request == MPI.REQUEST_NULL)


def _wait_one(request: Any) -> None:
    """Wait for one of ours, or for one of mpi4py's while ours move on."""
    if isinstance(request, Request):
        request.Wait()
        return
    while not request.Test():
        if not engine.advance():
            os.sched_yield()
