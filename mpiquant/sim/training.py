"""Iterations of training on many ranks: computation, buckets on their way, and waits for them.

In each iteration the backward pass makes buckets ready, the last layers' first; their calls share
the links (see `mpiquant.sim.exchange`), and the next forward pass waits for each sum where it comes
to its layers.  What ranks compute, and how fast their links are, follows from the seed alone: all
schemes see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mpiquant.codecs import AqatCodec
from mpiquant.collectives import CODED, HIERARCHICAL
from mpiquant.rate import Trace, Window, hidden, oracle, overlap_s, row, split_waits
from mpiquant.sim.compute import Load, Part, parts_of
from mpiquant.sim.control import Control
from mpiquant.sim.exchange import Call, Exchange
from mpiquant.sim.legs import Course, course_of
from mpiquant.sim.machine import Machine
from mpiquant.sim.schemes import Scheme, Widths
from mpiquant.sim.wires import Cluster
from mpiquant.sim.workloads import Workload

Floats = NDArray[np.float64]

LEARNING = 3
"""First iterations, in which an adaptive scheme knows too little: they are not in the means."""


@dataclass(frozen=True)
class Iteration:
    """What one iteration did; means over the ranks, if nothing else is said.

    Attributes
    ----------
    begin_s : float
        When the first rank's backward pass began.
    time_s, compute_s : float
        Of the whole, and of the computation in it.
    wire_wait_s, peer_wait_s : float
        Waiting for the wire, and for ranks that were not ready.
    overlap_s : float
        Communication that computation hid, over all buckets.
    overlappable_s : float
        From when the first bucket is ready to when it is needed, without waits.
    partial_bits, final_bits : float
        Bits per value that the reduce-scatter and the allgather sent; NaN where there is none.
    wire_bits : float
        Of all that was sent, with scales, per value.
    sent_nbytes : float
        Bytes of a rank.
    bandwidth : float
        Bytes per second of the slowest link, the mean over the iteration.
    squared_error : float
        Relative, of the sums, to be expected of normal data.
    oracle_bits : float
        Most bits per value that any schedule could have sent without waiting; NaN for fixed ones.
    """

    begin_s: float
    time_s: float
    compute_s: float
    wire_wait_s: float
    peer_wait_s: float
    overlap_s: float
    overlappable_s: float
    partial_bits: float
    final_bits: float
    wire_bits: float
    sent_nbytes: float
    bandwidth: float
    squared_error: float
    oracle_bits: float


@dataclass(frozen=True)
class Summary:
    """Means over the iterations behind the first few.

    Attributes
    ----------
    scheme : str
    iteration_s, compute_s, wire_wait_s, peer_wait_s : float
    efficiency : float
        Computation over the whole.
    row, hidden : float
        Overlap over waiting for the wire, and over both; the first is infinite if nothing waited.
    bits, wire_bits : float
        Bits per value, without and with the scales.
    sent_nbytes : float
        Bytes of a rank in an iteration.
    error : float
        Relative error of a sum, predicted: the root of the mean square.
    oracle_bits : float
        To compare `wire_bits` with; NaN for fixed schemes.
    """

    scheme: str
    iteration_s: float
    compute_s: float
    wire_wait_s: float
    peer_wait_s: float
    efficiency: float
    row: float
    hidden: float
    bits: float
    wire_bits: float
    sent_nbytes: float
    error: float
    oracle_bits: float


@dataclass(frozen=True)
class History:
    """All iterations of a scheme.

    Attributes
    ----------
    scheme : str
    iterations : tuple of Iteration
    """

    scheme: str
    iterations: tuple[Iteration, ...]

    @property
    def settled(self) -> tuple[Iteration, ...]:
        """Those behind the first few; all of them if there are no more."""
        return self.iterations[LEARNING:] or self.iterations

    def mean(self, name: str) -> float:
        """Of an attribute, over the settled iterations."""
        return float(np.mean([getattr(each, name) for each in self.settled]))

    def summary(self) -> Summary:
        time_s, compute_s, wire_s = map(self.mean, ("time_s", "compute_s", "wire_wait_s"))
        hid_s = self.mean("overlap_s")
        phases = np.array([(i.partial_bits, i.final_bits) for i in self.settled])
        return Summary(
            scheme=self.scheme,
            iteration_s=time_s,
            compute_s=compute_s,
            wire_wait_s=wire_s,
            peer_wait_s=self.mean("peer_wait_s"),
            efficiency=compute_s / time_s,
            row=float(row(hid_s, wire_s)),
            hidden=float(hidden(hid_s, wire_s)),
            bits=float(np.nanmean(phases)) if np.isfinite(phases).any() else float("nan"),
            wire_bits=self.mean("wire_bits"),
            sent_nbytes=self.mean("sent_nbytes"),
            error=self.mean("squared_error") ** 0.5,
            oracle_bits=self.mean("oracle_bits"),
        )


@dataclass(frozen=True)
class _Times:
    """Of one iteration: (buckets, ranks) arrays, in seconds."""

    ready: Floats
    needs: Floats
    waits: Floats
    done: Floats
    overlaps: Floats
    """From ready to need, without the waits between."""


@dataclass
class Training:
    """Training of a model with one scheme.

    Parameters
    ----------
    workload : Workload
    scheme : Scheme
    cluster : Cluster
        Its bandwidths go on being drawn, so each training needs one of its own.
    machine : Machine
    load : Load
    seed : int
        Of the jitter and the stragglers.
    bucket_bytes : int, optional
        As of `mpiquant.gradients.GradientSynchronizer`.
    group : bool
        Whether steps of very many ranks are taken together.
    order : {"deadline", "arrival"}
        Which call's messages go first.

    Attributes
    ----------
    now : (ranks,) array
        When each rank begins its next iteration.

    Raises
    ------
    ValueError
        If the scheme's algorithm cannot be simulated on so many ranks.
    """

    workload: Workload
    scheme: Scheme
    cluster: Cluster
    machine: Machine = field(default_factory=Machine)
    load: Load = field(default_factory=Load)
    seed: int = 0
    bucket_bytes: int | None = None
    group: bool = True
    order: Literal["deadline", "arrival"] = "deadline"

    def __post_init__(self) -> None:
        cluster, codec = self.cluster, self.scheme.codec
        self.nested = self.scheme.algorithm == HIERARCHICAL
        self.ends = cluster.of_nodes() if self.nested else cluster
        self.parts = parts_of(self.workload, self.bucket_bytes)
        self.widths = Widths(self.scheme, self.machine)
        self.courses = [self._course(part) for part in self.parts]
        self.control: Control | None = None
        if isinstance(codec, AqatCodec):
            assert self.widths.levels is not None
            volumes = [course.volume for course in self.courses]
            levels, unknown = self.widths.levels, self.widths.unknown
            self.control = Control(self.ends.ranks, volumes, levels, unknown, codec.margin)
        self.exchange = Exchange(
            self.ends,
            self.machine,
            self.widths,
            self.control,
            order=self.order,
            processors=cluster.ranks_per_node if self.nested else 1,
        )
        self._rng = np.random.default_rng(self.seed)
        self.now = np.zeros(cluster.ranks)

    def _course(self, part: Part) -> Course:
        algorithm = "ring" if self.nested else self.scheme.algorithm
        size = self.ends.ranks
        # Ranks of a node send their lanes side by side.
        lanes = self.cluster.ranks_per_node if self.nested else 1
        bandwidth = float(self.cluster.bandwidths.table.mean())
        parts = {CODED: 2 * size, "broadcast": 1}.get(algorithm, size)
        chunk = max(-(-part.values // parts), 1)
        length = self.widths.lane(algorithm, chunk, bandwidth)
        length = max(min(length, -(-chunk // lanes)), 1)
        return course_of(algorithm, part.values, size, length, group=self.group)

    def run(self, iterations: int, progress: Callable[[int], None] | None = None) -> History:
        """Simulate some iterations.

        Parameters
        ----------
        iterations : int
        progress : callable, optional
            Called with the number of iterations that are done, after each of them.
        """
        found = []
        for done in range(1, iterations + 1):
            found.append(self.step())
            if progress is not None:
                progress(done)
        return History(self.scheme.name, tuple(found))

    def step(self) -> Iteration:
        """One iteration: from the beginning of a backward pass to that of the next one."""
        begin = self.now
        ahead_s, back_s = self.load.draw(self.cluster.ranks, self._rng)
        forward = [part.forward_s * ahead_s for part in self.parts]
        ready = list(begin + np.cumsum([p.backward_s * back_s for p in self.parts], axis=0))
        end = ready[-1]
        overlaps = [end - r + sum(forward[k + 1 :]) for k, r in enumerate(ready)]
        calls = self._exchange(begin, ready, overlaps)
        done = [self._to_ranks(c.done, p) for c, p in zip(calls, self.parts, strict=True)]
        now, needs, waits = end, [end] * len(calls), [end] * len(calls)
        for k in reversed(range(len(calls))):
            needs[k] = now
            waits[k] = np.maximum(done[k] - now, 0.0)
            now = now + waits[k] + forward[k]
        self.now = now
        times = _Times(*map(np.array, (ready, needs, waits, done, overlaps)))
        return self._iteration(begin, times, calls)

    def _exchange(
        self, begin: Floats, ready: Sequence[Floats], overlaps: Sequence[Floats]
    ) -> list[Call]:
        """Carry out the calls, and tell the control how much time each had."""
        calls = []
        starts = [self._to_ends(r, np.max) + self._inside_s(p) for r, p in self._with_parts(ready)]
        for k, start in enumerate(starts):
            calls.append(Call(k, self.courses[k], start))
        control, first = self.control, self._to_ends(begin, np.max)
        if control is not None:
            control.begin_step(first)
        self.exchange.run(calls)
        if control is not None:
            for k, (each, part) in enumerate(self._with_parts(overlaps)):
                due = self._to_ends(ready[k] + each, np.min) - self._inside_s(part)
                control.overlaps[k].add(starts[k], due)
                control.until_need[k].add(first, due)
        return calls

    def _with_parts(self, each: Sequence[Floats]) -> list[tuple[Floats, Part]]:
        return list(zip(each, self.parts, strict=True))

    # ---- nodes ----

    def _inside_s(self, part: Part) -> float:
        """Seconds within a node before the exchange of nodes, and as many behind it."""
        local = self.cluster.ranks_per_node
        if not self.nested or local == 1:
            return 0.0
        values = part.values * (1 - 1 / local)
        exact = self.machine.kernels.get("exact")
        added_s = exact.decode_add * values if exact is not None else 0.0
        moved_s = 4 * values / self.cluster.memory + self.cluster.memory_latency_s
        return moved_s + added_s

    def _to_ends(self, times: Floats, join: Callable[..., Floats]) -> Floats:
        """Of the exchange: ranks, or nodes, which wait for all of theirs."""
        if not self.nested:
            return times
        return join(times.reshape(self.ends.ranks, -1), axis=1)

    def _to_ranks(self, times: Floats, part: Part) -> Floats:
        if not self.nested:
            return times
        return np.repeat(times + self._inside_s(part), self.cluster.ranks_per_node)

    # ---- what it did ----

    def _iteration(
        self,
        begin: Floats,
        times: _Times,
        calls: Sequence[Call],
    ) -> Iteration:
        wire, peer = split_waits(times.ready.T, times.needs.T, times.waits.T)
        hid = overlap_s(times.done.T - times.ready.max(axis=1), wire)
        computed = self.now - begin - times.waits.sum(axis=0)
        first_s, last_s = float(begin.min()), float(self.now.max())
        slow = self.cluster.bandwidths.slowest(first_s, last_s)
        volumes = np.array([call.course.volume for call in calls], np.float64)
        sizes = np.array([part.values for part in self.parts], np.float64)
        sent = sum(call.sent for call in calls)
        errors = np.array([call.squared_error for call in calls])
        return Iteration(
            begin_s=first_s,
            time_s=float((self.now - begin).mean()),
            compute_s=float(computed.mean()),
            wire_wait_s=float(wire.sum(axis=1).mean()),
            peer_wait_s=float(peer.sum(axis=1).mean()),
            overlap_s=float(hid.sum(axis=1).mean()),
            overlappable_s=float(times.overlaps[0].mean()),
            partial_bits=_mean([call.bits["partial"] for call in calls], volumes),
            final_bits=_mean([call.bits["final"] for call in calls], volumes),
            wire_bits=float(8 * sent / volumes.sum()) if volumes.any() else float("nan"),
            sent_nbytes=float(sent),
            bandwidth=slow.nbytes(first_s, last_s) / (last_s - first_s),
            squared_error=_mean(list(errors), sizes) + self.widths.other_error,
            oracle_bits=self._oracle_bits(times, volumes),
        )

    def _oracle_bits(self, times: _Times, volumes: Floats) -> float:
        """Most bits on the wire, where no bucket has fewer than the lowest level.

        All ranks have the time that is left when the last one is ready and until the first one
        needs the sum, and the slowest link.
        """
        levels = self.widths.levels
        if levels is None or not volumes.any():
            return float("nan")
        begins, dues = times.ready.max(axis=1), (times.ready + times.overlaps).min(axis=1)
        windows = [
            Window(begin, max(due, begin), volume)
            for begin, due, volume in zip(begins, dues, volumes, strict=True)
        ]
        link = self.cluster.bandwidths.slowest(float(begins.min()), float(dues.max()))
        shared = not self.nested and self.scheme.algorithm != "ring"
        share = self.cluster.ranks_per_node if shared else 1
        link = Trace(link.times, [bandwidth / share for bandwidth in link.bandwidths])
        best = oracle(link, windows, levels.costs[0], levels.costs[-1])
        return _mean([max(width, levels.costs[0]) for width in best.widths], volumes)


def _mean(values: Sequence[float], weights: Floats) -> float:
    known = np.isfinite(values)
    if not known.any() or not weights[known].any():
        return float("nan")
    return float(np.average(np.array(values)[known], weights=weights[known]))
