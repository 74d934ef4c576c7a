"""What a synchronizer's latest steps did, from what each rank measured.

Ranks have clocks of their own.  To tell whether a wait was for the wire or for a peer that was not
ready, they are compared, by the shortest of some round trips with rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpiquant._comm import Channel
from mpiquant.rate import hidden, overlap_s, row, split_waits

if TYPE_CHECKING:
    from mpiquant.gradients.bucket import Bucket, Turn
    from mpiquant.rate._numbers import Floats

MEMORY = 100
"""Steps that are kept for a report."""

ROUND_TRIPS = 10


@dataclass(frozen=True)
class Row:
    """Means over ranks and steps for one bucket.

    Attributes
    ----------
    name : str
    values : int
    overlappable_s : float
        From when a gradient is ready to when its sum is needed, without waits between.
    partial_bits, final_bits : float
        Bits per value that the reduce-scatter and the allgather sent; NaN for fixed codecs.
    hidden : float
        Share of the communication that computation hid, 0 to 1.
    row : float
        Hidden time over waiting time; infinite if nothing waited.
    wire_wait_s, peer_wait_s : float
        Waiting for the wire, and for ranks that were not ready.
    sent_nbytes : float
        Bytes sent by a rank in a step, headers included.
    cut_messages : float
        Messages cut short by a rank in a step.
    encode_s, decode_s : float
        In kernels, in a step.
    """

    name: str
    values: int
    overlappable_s: float
    partial_bits: float
    final_bits: float
    hidden: float
    row: float
    wire_wait_s: float
    peer_wait_s: float
    sent_nbytes: float
    cut_messages: float
    encode_s: float
    decode_s: float


@dataclass(frozen=True)
class Report:
    """What the latest steps did; the same on all ranks.

    Attributes
    ----------
    steps : int
    step_s : float
        From the first gradient of a step to that of the next one; the median.
    buckets : list of Row
    slowest : tuple of (int, int, float) or None
        The slowest link, as adaptive calls measured it: sender, receiver, bytes per second.
    """

    steps: int
    step_s: float
    buckets: list[Row]
    slowest: tuple[int, int, float] | None

    @property
    def wire_wait_s(self) -> float:
        """Waiting for the wire in a step."""
        return sum(r.wire_wait_s for r in self.buckets)

    @property
    def peer_wait_s(self) -> float:
        """Waiting for ranks that were not ready, in a step."""
        return sum(r.peer_wait_s for r in self.buckets)

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps of {1e3 * self.step_s:.1f} ms; "
            f"waiting per step: {1e3 * self.wire_wait_s:.1f} ms for the wire, "
            f"{1e3 * self.peer_wait_s:.1f} ms for peers",
            f"{'bucket':<28}{'values':>11}{'T ms':>9}{'bits RS':>9}{'AG':>7}{'hidden':>8}{'ROW':>8}"
            f"{'wire ms':>9}{'peer ms':>9}{'codec ms':>10}{'MB sent':>9}{'cut':>6}",
        ]
        for r in self.buckets:
            lines.append(
                f"{r.name[:27]:<28}{r.values:>11}{1e3 * r.overlappable_s:>9.1f}"
                f"{_shown(r.partial_bits):>9}{_shown(r.final_bits):>7}{r.hidden:>8.3f}"
                f"{_shown(r.row):>8}{1e3 * r.wire_wait_s:>9.2f}{1e3 * r.peer_wait_s:>9.2f}"
                f"{1e3 * (r.encode_s + r.decode_s):>10.2f}{r.sent_nbytes / 1e6:>9.2f}"
                f"{r.cut_messages:>6.1f}"
            )
        if self.slowest is not None:
            sender, receiver, bandwidth = self.slowest
            lines.append(
                f"slowest link: rank {sender} to rank {receiver}, {8 * bandwidth / 1e6:.0f} Mbit/s"
            )
        return "\n".join(lines)


def _shown(value: float) -> str:
    return "-" if value != value else f"{value:.1f}"


# ---- from what ranks measured ----

_READY, _NEED, _DONE, _WAIT, _OVERLAP, _PARTIAL, _FINAL, _SENT, _CUT, _ENCODE, _DECODE = range(11)


def make_report(channel: Channel, buckets: Sequence[Bucket]) -> Report:
    """Gather what all ranks measured; collective over the channel."""
    offset = clock_offset(channel.native)
    mine = [
        [_numbers(turn, offset) for turn in bucket.turns if _is_whole(turn)] for bucket in buckets
    ]
    gathered = channel.native.allgather((mine, _slowest(channel)))
    steps = min((len(turns) for ranks, _ in gathered for turns in ranks), default=0)
    slowest = [link for _, link in gathered if link is not None]
    found = None if not slowest else min(slowest, key=lambda link: link[2])
    if not steps:
        return Report(0, float("nan"), [], found)
    # By bucket, rank, step and number.
    everything = [
        np.array([ranks[i][-steps:] for ranks, _ in gathered]) for i in range(len(buckets))
    ]
    first = everything[0][:, :, _READY].mean(axis=0)
    step_s = float(np.median(np.diff(first))) if steps > 1 else float("nan")
    rows = [_row(bucket, numbers) for bucket, numbers in zip(buckets, everything, strict=True)]
    return Report(steps, step_s, rows, found)


def _is_whole(turn: Turn) -> bool:
    return turn.stats is not None and turn.done == turn.done


def _numbers(turn: Turn, offset: float) -> list[float]:
    stats = turn.stats
    assert stats is not None
    nan = float("nan")
    return [
        *(turn.ready - offset, turn.need - offset, turn.done - offset, turn.wait_s),
        max(turn.need - turn.ready - turn.waited_between, 0.0),
        nan if stats.partial_bits is None else stats.partial_bits,
        nan if stats.final_bits is None else stats.final_bits,
        *(stats.wire_bytes + stats.header_bytes, stats.cut_messages),
        *(stats.encode_s, stats.decode_s),
    ]


def _row(bucket: Bucket, numbers: Floats) -> Row:
    wire_s, peer_s = split_waits(numbers[..., _READY], numbers[..., _NEED], numbers[..., _WAIT])
    begun = numbers[..., _READY].max(axis=0)
    hid = overlap_s(numbers[..., _DONE] - begun, wire_s)
    means = numbers.mean(axis=(0, 1))
    return Row(
        name=bucket.name,
        values=bucket.flat.size,
        overlappable_s=float(means[_OVERLAP]),
        partial_bits=float(means[_PARTIAL]),
        final_bits=float(means[_FINAL]),
        hidden=float(hidden(hid.sum(), wire_s.sum())),
        row=float(row(hid.sum(), wire_s.sum())),
        wire_wait_s=float(wire_s.mean()),
        peer_wait_s=float(peer_s.mean()),
        sent_nbytes=float(means[_SENT]),
        cut_messages=float(means[_CUT]),
        encode_s=float(means[_ENCODE]),
        decode_s=float(means[_DECODE]),
    )


def _slowest(channel: Channel) -> tuple[int, int, float] | None:
    """This rank's slowest link, as its peers measured it."""
    known = [
        (channel.rank, peer, bandwidth)
        for peer, bandwidth in channel.links.bandwidths().items()
        if bandwidth == bandwidth
    ]
    return min(known, key=lambda link: link[2], default=None)


def clock_offset(comm: MPI.Intracomm) -> float:
    """Seconds by which this rank's `time.perf_counter` is ahead of that of rank 0.

    Collective over comm.  The error is at most half of the shortest round trip.
    """
    offset = 0.0
    for rank in range(1, comm.size):
        if comm.rank == rank:
            offset = min(_round_trip(comm) for _ in range(ROUND_TRIPS))[1]
        elif comm.rank == 0:
            for _ in range(ROUND_TRIPS):
                comm.recv(source=rank)
                comm.send(time.perf_counter(), dest=rank)
    return offset


def _round_trip(comm: MPI.Intracomm) -> tuple[float, float]:
    """Seconds it took, and how far this rank's clock is ahead by it."""
    begin = time.perf_counter()
    comm.send(None, dest=0)
    there = comm.recv(source=0)
    end = time.perf_counter()
    return end - begin, (begin + end) / 2 - there
