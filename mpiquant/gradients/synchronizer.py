"""`GradientSynchronizer`: sums of gradients that are on their way while others are computed.

A backward pass hands in each gradient as soon as it is there, `ready(name)`; the next forward pass
asks for each sum when it comes to its layer, `wait(name)`.  Between the two lies the time that
communication can hide in.  It is measured in each step, and with the codec "aqat" the next steps'
gradients take as many bits as fit into it.

All ranks send the same buckets in the same order, whatever the order in which their gradients come:
a bucket that is full waits for those before it.  A step that fails on one rank fails on all, each
of them sends something for every bucket all the same, and the next step is like any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import numpy as np
from mpi4py import MPI

from mpiquant import _buffers, api, codecs, config, trace
from mpiquant._comm import channel_of, checked_comm
from mpiquant.errors import AgreementError, LifecycleError
from mpiquant.feedback import ErrorFeedback
from mpiquant.gradients._meeting import meet
from mpiquant.gradients.bucket import Bucket, Turn
from mpiquant.gradients.report import MEMORY, Report, make_report
from mpiquant.plan import Parameter, bucket_limits, plan_buckets
from mpiquant.progress import engine
from mpiquant.rate import Overlap
from mpiquant.request import Request
from mpiquant.typing import Array, CodecLike, CommLike


class GradientSynchronizer:
    """Sums of gradients over all ranks, hidden behind the computation; collective over comm.

    Parameters
    ----------
    parameters : mapping of str to array
        In the order in which the forward pass needs them; only names, shapes and dtypes matter.
        float16, bfloat16, float32 or float64.
    op : {"mean", "sum"}
    comm : MPI.Intracomm, optional
        COMM_WORLD by default.
    codec, algorithm
        As for `allreduce`; "aqat" by default.  A policy is asked once for each parameter.
    bucket_bytes : int, optional
        Bytes of a bucket; by default such that there are at most eight, all of which can be
        under way at once.
    weighted : bool
        Whether ranks give weights, as for batches of different sizes: the mean is then the
        weighted one.  Costs one tiny message more in each step.
    missing : {"error", "zeros"}
        What a parameter without gradient is when its bucket is waited for.
    feedback : bool
        Whether what a lossy codec loses is added at the next step; see `ErrorFeedback`.
    timeout : float, optional
        Seconds that a wait may take.
    progress : {"thread", "manual"}
        Whether a thread moves the messages on while the program computes.

    Attributes
    ----------
    gradients : dict of str to array
        Where gradients are gathered, and sums appear.  A backward pass that writes there saves a
        copy.  Read-only while a gradient is under way.
    step : int
        Number of the current step.
    comm : MPI.Intracomm
        The communicator; another one behind `shrink`.

    Raises
    ------
    AgreementError
        On all ranks, if they do not have the same parameters and options.

    Examples
    --------
    >>> sync = GradientSynchronizer(params)
    >>> for batch in batches:
    ...     for layer in layers:
    ...         mean = sync.wait(layer.name)  # of the step before; None in the first one
    ...         if mean is not None:
    ...             params[layer.name] -= rate * mean
    ...         layer.forward()
    ...     for layer in reversed(layers):
    ...         sync.ready(layer.name, layer.backward())

    Notes
    -----
    Memory: one copy of all gradients, another one of residuals, and one of the buckets that are
    under way.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        op: Literal["mean", "sum"] = "mean",
        *,
        comm: CommLike | None = None,
        codec: CodecLike = "aqat",
        algorithm: str = "auto",
        bucket_bytes: int | None = None,
        weighted: bool = False,
        missing: Literal["error", "zeros"] = "error",
        feedback: bool = True,
        timeout: float | None = None,
        progress: Literal["thread", "manual"] = "thread",
    ) -> None:
        self.comm = checked_comm(comm)
        self._channel = channel_of(comm, timeout)  # waits for all ranks
        self._timeout = timeout
        self.weighted, self.missing = weighted, missing
        self._op, self._algorithm = op, algorithm
        self._preset = config.Preset({"progress": progress})
        self._bucket_bytes = bucket_bytes
        self._use_feedback = feedback
        error: Exception | None = None
        self._parameters: list[Parameter] = []
        try:
            self._parameters = _checked(parameters, op, codec, missing, bucket_bytes)
        except (TypeError, ValueError) as raised:
            error = raised
        self._agree(error)
        self.step = 0
        self._waited_s = 0.0
        self._started = math.nan  # when the current step began
        self._unsynced = 0  # depth of no_sync blocks
        self._joined = False  # whether this rank has no more data
        self._weights: Request | None = None
        self._weight = 1.0
        self._make_buckets({})

    def _agree(self, error: Exception | None) -> None:
        """Raise on all ranks if one has an error, or they have different parameters."""
        channel = meet(self.comm, "synchronizer", error, self._timeout)
        mine = [(p.name, p.shape, p.dtype.str, p.codec.spec) for p in self._parameters]
        terms = (self._op, self._algorithm, self._bucket_bytes, self.weighted, self.missing)
        all_terms = channel.native.allgather((mine, terms, self._use_feedback))
        found = _difference(all_terms)
        if found:
            raise AgreementError(f"synchronizer: {found}")
        known = {p.name: p for p in self._parameters}
        self._parameters = [known[name] for name, *_ in all_terms[0][0]]

    # ---- buckets ----

    def _make_buckets(self, residuals: Mapping[str, Array]) -> None:
        total = sum(p.nbytes for p in self._parameters)
        planned = plan_buckets(self._parameters, *bucket_limits(total, self._bucket_bytes))
        self.buckets = [Bucket(i, parameters) for i, parameters in enumerate(planned)]
        self._bucket_of = {p.name: b for b in self.buckets for p in b.parameters}
        self.gradients = {p.name: self._bucket_of[p.name].views[p.name] for p in self._parameters}
        self._next = 0  # the first bucket that is not under way yet
        self._feedback = ErrorFeedback()
        for bucket in self.buckets:
            if any(name in residuals for name in bucket.views):
                dtype = _buffers.work_dtype(bucket.flat.dtype)
                self._feedback.put(bucket.name, bucket.join(residuals, dtype))

    def rebucket(self, bucket_bytes: int | None) -> None:
        """Change the size of the buckets, between two steps; residuals stay.

        All ranks must do so before the same step.
        """
        if not math.isnan(self._started):
            raise ValueError(f"step {self.step} is under way: buckets cannot change")
        residuals = self.residuals()
        self._bucket_bytes = bucket_bytes
        self._make_buckets(residuals)

    def residuals(self) -> dict[str, Array]:
        """What error feedback keeps for each parameter; views."""
        found: dict[str, Array] = {}
        for bucket in self.buckets:
            residual = self._feedback.residual(bucket.name)
            if residual is not None:
                found.update(bucket.split(residual))
        return found

    # ---- a step ----

    def set_weight(self, weight: float) -> None:
        """Weight of this rank's gradients in the coming step, as the number of its samples.

        It is 1 if not set.  A rank with weight 0 takes part in the step; what it hands in
        counts nothing.
        """
        if not self.weighted:
            raise ValueError("a weight needs weighted=True")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight is {weight}, expected a finite number of 0 or more")
        if not math.isnan(self._started):
            raise ValueError(f"step {self.step} has begun: its weight cannot change")
        self._weight = float(weight)

    def ready(self, name: str, gradient: Array | None = None) -> None:
        """Hand in a gradient of this step; sends its bucket if that is full.

        Parameters
        ----------
        name : str
        gradient : array, optional
            Copied; it may be changed at once.  None: it was written to `gradients[name]`.

        Raises
        ------
        ValueError
            For an unknown name, a wrong shape, or a second gradient in a step.  The step then
            fails on all ranks.
        """
        try:
            bucket = self._accept(name, gradient)
        except (TypeError, ValueError) as error:
            self._fail(error)
        bucket.take(name, gradient)
        bucket.begun.add(name)
        if self._unsynced:
            return
        self._begin_step()
        bucket.ready.add(name)
        self._send_full()

    def _accept(self, name: str, gradient: Array | None) -> Bucket:
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise ValueError(f"no parameter has the name {name!r}")
        if bucket.taken:
            late = next(b.name for b in self.buckets if not b.taken)
            error = ValueError(f"{late!r} was not waited for in step {self.step}")
            self._drain()
            raise error  # fails the next step
        if name in bucket.ready or bucket.request is not None:
            raise ValueError(f"{name!r} is ready a second time in step {self.step}")
        if gradient is not None:
            shape = bucket.views[name].shape
            given = gradient.shape if type(gradient) is np.ndarray else np.shape(gradient)
            if given != shape:
                raise ValueError(
                    f"the gradient of {name!r} has shape {given}, the parameter {shape}"
                )
        return bucket

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in this block; the first ones behind it are added and sent."""
        self._unsynced += 1
        try:
            yield
        finally:
            self._unsynced -= 1

    def _begin_step(self) -> None:
        if not math.isnan(self._started):
            return
        now = self._started = time.perf_counter()
        self._waited_at_start = self._waited_s
        if self.weighted:
            self._send_weights(self._weight, joined=False)
        with engine.lock:
            for bucket in self.buckets:
                offset_s = bucket.until_need.predicted_s
                if bucket.codec.adaptive and offset_s is not None:
                    key = self._key(bucket)
                    values, most = self._volume(bucket), bucket.most_bits
                    self._channel.links.expect(key, now + offset_s, values, most)

    def _key(self, bucket: Bucket) -> tuple[int, int]:
        return id(self), bucket.index

    def _volume(self, bucket: Bucket) -> int:
        """Values of a bucket that this rank will send, about."""
        size = self._channel.size
        return 2 * (size - 1) * bucket.flat.size // size

    def _send_full(self) -> None:
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self._send(self.buckets[self._next])
            self._next += 1

    def _send(self, bucket: Bucket) -> None:
        now = time.perf_counter()
        turn = Turn(now, self._waited_s)
        if self._weights is not None:
            np.multiply(bucket.flat, bucket.flat.dtype.type(self._weight), out=bucket.flat)
        bucket.protect(True)
        with engine.lock:
            self._channel.links.expect(self._key(bucket), math.nan, 0)  # its call speaks for it
        bucket.request = self._start(
            bucket.flat,
            "sum" if self.weighted else self._op,
            codec=bucket.codec,
            algorithm=self._algorithm,
            out=bucket.flat,
            name=bucket.name,
            feedback=self._feedback if self._use_feedback and bucket.codec.lossy else None,
            stats=True,
            deadline=self._deadline(bucket, now) if bucket.codec.adaptive else None,
        )
        bucket.request.when_done(turn.end)
        bucket.turns = [*bucket.turns[1 - MEMORY :], turn]

    def _start(self, x: Array, op: str = "sum", **options: Any) -> Request:
        """Start a call with what all of them share."""
        token = self._preset.apply()
        try:
            return api.iallreduce(x, op, comm=self.comm, timeout=self._timeout, **options)
        finally:
            config.restore(token)

    def _deadline(self, bucket: Bucket, now: float) -> float:
        predicted_s = bucket.overlap.predicted_s
        return math.nan if predicted_s is None else now + predicted_s

    # ---- its end ----

    def wait(self, name: str) -> Array | None:
        """The sum or mean of a gradient, as soon as it is there.

        Returns
        -------
        array or None
            `gradients[name]`; None if no gradient was ever handed in.  Without a new gradient the
            last result, at once.

        Raises
        ------
        ValueError
            If gradients are missing, naming them; on other ranks AgreementError, naming the rank.
        CallTimeoutError
        """
        bucket = self._bucket_of.get(name)
        if bucket is None:
            raise ValueError(f"no parameter has the name {name!r}")
        if math.isnan(self._started):
            return bucket.views[name] if bucket.turns else None
        if not bucket.taken:
            self._take(bucket)
            self._end_step()
        return bucket.views[name]

    def wait_all(self) -> dict[str, Array]:
        """All sums or means of the step, by name."""
        for parameter in self._parameters:
            self.wait(parameter.name)
        return self.gradients

    def _take(self, bucket: Bucket) -> None:
        try:
            self._send_up_to(bucket)
            self._await(bucket)
        except Exception as error:
            self._fail(error)
        bucket.taken = True

    def _send_up_to(self, bucket: Bucket) -> None:
        for earlier in self.buckets[self._next : bucket.index + 1]:
            missing = earlier.missing
            if missing and self.missing == "error":
                named = ", ".join(map(repr, missing))
                raise ValueError(f"no gradient of {named} in step {self.step}")
            for name in missing:
                if name not in earlier.begun:
                    earlier.views[name][...] = 0
                earlier.ready.add(name)
            self._send_full()

    def _await(self, bucket: Bucket) -> None:
        assert bucket.request is not None
        turn, now = bucket.turns[-1], time.perf_counter()
        turn.need, turn.waited_between = now, self._waited_s - turn.waited_before
        total = self._total_weight()
        _, turn.stats = bucket.request.wait()
        turn.wait_s = time.perf_counter() - now
        if total is not None and self._op == "mean":
            np.divide(bucket.flat, bucket.flat.dtype.type(total), out=bucket.flat)
        bucket.protect(False)
        if not self._joined:
            bucket.overlap.add(turn.ready, now, turn.waited_between)
            bucket.until_need.add(self._started, now, self._waited_s - self._waited_at_start)
        self._waited_s += turn.wait_s
        self._note(bucket, turn)

    def _note(self, bucket: Bucket, turn: Turn) -> None:
        if trace.active.on and turn.stats is not None:
            stats = turn.stats
            bits = {"bits_rs": stats.partial_bits, "bits_ag": stats.final_bits}
            trace.active.overlapping("bucket", bucket.name, turn.ready, turn.done, **bits)

    def _end_step(self) -> None:
        if all(bucket.taken for bucket in self.buckets):
            self._reset()

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.begin_step()
            bucket.protect(False)
        self.step += 1
        self._next, self._started, self._weight = 0, math.nan, 1.0
        self._weights = None
        with engine.lock:
            for bucket in self.buckets:
                self._channel.links.expect(self._key(bucket), math.nan, 0)

    def _fail(self, error: Exception) -> NoReturn:
        """End the step on all ranks: they have as many calls in it as without the error."""
        if self._channel.broken is None:
            self._begin_step()
            for bucket in self.buckets[self._next :]:
                with self._channel.entered():
                    bucket.request = api.refuse(self._channel, bucket.name, error)
        first = self._drain()
        # Calls behind the one that failed may only tell that they were lost with it.
        raise first if first is not None and isinstance(error, AgreementError) else error

    def _drain(self) -> Exception | None:
        """Let what is under way end, and forget it; the error of the first call that had one."""
        errors = []
        requests = [bucket.request for bucket in self.buckets if not bucket.taken]
        for request in (self._weights, *requests):
            if request is not None:
                try:
                    request.wait()
                except Exception as error:
                    errors.append(error)
        self._reset()
        return errors[0] if errors else None

    # ---- weights ----

    def _send_weights(self, weight: float, *, joined: bool) -> None:
        mine = np.array([weight, joined], np.float64)
        self._weights = self._start(mine, codec="exact", name="weights")

    def _total_weight(self) -> float | None:
        if self._weights is None:
            return None
        total = float(self._weights.wait()[0])
        if total == 0:
            raise ValueError(f"the weights of all ranks are 0 in step {self.step}")
        return total

    def join(self) -> None:
        """Take part in the steps of ranks that still have data, with weight 0, until none has.

        Returns on all ranks when all have called it; needs weighted=True.
        """
        if not self.weighted:
            raise ValueError("join() needs weighted=True")
        self._joined = True
        while True:
            self._started, self._weight = time.perf_counter(), 0.0
            self._waited_at_start = self._waited_s
            self._send_weights(0.0, joined=True)
            assert self._weights is not None
            _, joined = self._weights.wait()
            if joined == self._channel.size:
                self._joined = False
                self._reset()
                return
            for bucket in self.buckets:
                bucket.flat[...] = 0
                bucket.ready.update(bucket.views)
            self._send_full()
            self.wait_all()

    # ---- survivors ----

    def shrink(self) -> MPI.Intracomm:
        """Go on with the ranks that are left, after a `RankLostError`.

        Collective over those ranks.  The step that was interrupted is lost; some ranks may have
        its sums and others not, so parameters must be made alike again: `DistributedOptimizer`
        does, others by `broadcast_parameters`.

        Returns
        -------
        MPI.Intracomm
            The new communicator, also to be used for all else; ranks keep their order.

        Raises
        ------
        LifecycleError
            If the MPI cannot: it needs user-level failure mitigation, as Open MPI 5 has when it is
            launched with `mpiexec --with-ft ulfm`.
        """
        try:
            comm = self.comm.Shrink()
        except NotImplementedError:
            raise LifecycleError("this MPI cannot go on without a lost rank") from None
        assert isinstance(comm, MPI.Intracomm)
        residuals = self.residuals()
        self.comm, self._channel = comm, channel_of(comm, self._timeout)
        self._started, self._weights, self._weight = math.nan, None, 1.0
        self._make_buckets(residuals)
        # Ranks may have heard of the loss in different steps.
        steps = np.array([self.step])
        api.allreduce(steps, MPI.MAX, comm=comm, out=steps)
        self.step = int(steps[0]) + 1
        return comm

    # ---- state and report ----

    def state_dict(self) -> dict[str, Any]:
        """Residuals and estimates of this rank, to be kept with a checkpoint.

        Returns
        -------
        dict
            "residuals": array by parameter; "overlap" and "until_need": seconds by bucket;
            "slowest": bytes per second of the slowest link.
        """
        return {
            "residuals": {name: array.copy() for name, array in self.residuals().items()},
            "overlap": {b.name: list(b.overlap.last) for b in self.buckets},
            "until_need": {b.name: list(b.until_need.last) for b in self.buckets},
            "slowest": self._channel.links.slow,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` gave; estimates of other buckets are left out.

        Raises
        ------
        ValueError
            If a residual does not fit its parameter.
        """
        for name, residual in state["residuals"].items():
            parameter = next((p for p in self._parameters if p.name == name), None)
            if parameter is None or np.shape(residual) != parameter.shape:
                shape = "no such parameter" if parameter is None else f"shape {parameter.shape}"
                raise ValueError(f"residual of {name!r} has shape {np.shape(residual)}: {shape}")
        self._make_buckets(state["residuals"])
        for bucket in self.buckets:
            bucket.overlap = Overlap(state["overlap"].get(bucket.name, ()))
            bucket.until_need = Overlap(state["until_need"].get(bucket.name, ()))
        with engine.lock:
            self._channel.links.slow = state["slowest"]

    def report(self) -> Report:
        """What the latest steps did, for each bucket; collective over comm.

        See `Report`; print it for a table.
        """
        return make_report(self._channel, self.buckets)


def _checked(
    parameters: Mapping[str, Array],
    op: str,
    codec: CodecLike,
    missing: str,
    bucket_bytes: int | None,
) -> list[Parameter]:
    if op not in ("mean", "sum"):
        raise ValueError(f"op is {op!r}, expected 'mean' or 'sum'")
    if missing not in ("error", "zeros"):
        raise ValueError(f"missing is {missing!r}, expected 'error' or 'zeros'")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, expected 1 or more")
    if not parameters:
        raise ValueError("there are no parameters")
    found = []
    for name, value in parameters.items():
        array = np.asarray(value)
        if array.dtype.kind != "f" and not _buffers.is_half(array.dtype):
            raise TypeError(f"dtype {array.dtype} of {name!r}: gradients are floating-point")
        if not array.size:
            raise ValueError(f"{name!r} has no elements")
        chosen = codecs.resolve(codec, name, array.shape)
        found.append(Parameter(name, array.shape, array.dtype.newbyteorder("="), chosen))
    return found


def _difference(all_terms: list[Any]) -> str:
    """What distinguishes a rank from rank 0, in words."""
    words = ("op", "algorithm", "bucket_bytes", "weighted", "missing")
    (first, terms, feedback), *others = all_terms
    for rank, (mine, my_terms, my_feedback) in enumerate(others, 1):
        pairs = zip((*words, "feedback"), (*terms, feedback), (*my_terms, my_feedback), strict=True)
        for word, a, b in pairs:
            if a != b:
                return f"{word} is {a!r} on rank 0, {b!r} on rank {rank}"
        here, there = {m[0]: m for m in first}, {m[0]: m for m in mine}
        for name in sorted(here.keys() ^ there.keys()):
            return f"rank {rank if name in here else 0} has no parameter {name!r}"
        for name, *rest in first:
            if tuple(rest) != there[name][1:]:
                return f"{name!r} is {rest} on rank 0, {list(there[name][1:])} on rank {rank}"
    return ""
