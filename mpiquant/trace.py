"""The timeline: what each rank did when, as a Chrome trace.

With MPIQUANT_TIMELINE=file.json in the environment every rank notes its events and writes them at
its exit; rank 0 merges them all into that file, for ui.perfetto.dev or chrome://tracing.  A process
is a rank; its lanes are computation (as marked by the user), encoding, decoding and waiting, and
beside them messages and calls, which overlap.  Without the variable, `active` is an object that
does nothing.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LANES = ("compute", "encode", "decode", "wait")
MOST_EVENTS = 1_000_000
"""Where a rank stops to note more, so that a long job does not end for want of memory."""

MERGE_S = 10.0
"""How long rank 0 waits for the others' parts."""

logger = logging.getLogger("mpiquant")


class NoTimeline:
    """Does nothing, at the cost of an attribute and a call."""

    on = False

    def span(self, lane: str, name: str, begin: float, end: float) -> None:
        pass

    def overlapping(self, kind: str, name: str, begin: float, end: float, **details: Any) -> None:
        pass

    def count(self, name: str, value: float) -> None:
        pass

    def set_rank(self, rank: int, size: int) -> None:
        pass


class Timeline(NoTimeline):
    """Events of this rank; times are those of `time.perf_counter`."""

    on = True

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rank, self.size = 0, 1
        self.events: list[dict[str, Any]] = []
        self._serial = 0
        # One host's ranks share a clock; those of several hosts are as close as their wall clocks.
        self._epoch_s = time.time() - time.perf_counter()
        self._pid = os.getpid()
        atexit.register(self.write)

    def set_rank(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._part(rank).unlink(missing_ok=True)  # of an earlier job that was cut off

    def span(self, lane: str, name: str, begin: float, end: float) -> None:
        """Something that fills a lane for a time."""
        self._note(
            ph="X", tid=LANES.index(lane), name=name, ts=begin, dur=round((end - begin) * 1e6, 3)
        )

    def overlapping(self, kind: str, name: str, begin: float, end: float, **details: Any) -> None:
        """Something that may run beside others of its kind: a message, a call."""
        self._serial += 1
        what = {"cat": kind, "name": name, "tid": len(LANES), "id": f"{self.rank}.{self._serial}"}
        self._note(ph="b", ts=begin, args=details, **what)
        self._note(ph="e", ts=end, **what)

    def count(self, name: str, value: float) -> None:
        """The value of a counter from now on."""
        self._note(ph="C", tid=0, name=name, ts=time.perf_counter(), args={name: value})

    def _note(self, *, ts: float, **event: Any) -> None:
        if len(self.events) < MOST_EVENTS:
            self.events.append({**event, "ts": round((ts + self._epoch_s) * 1e6, 3)})

    # ---- files ----

    def write(self) -> None:
        """Write this rank's part; on rank 0, merge all parts.  Makes no MPI call."""
        if os.getpid() != self._pid:  # a forked child
            return
        mine = self._part(self.rank)
        partial = mine.with_name(f"{mine.name}.tmp")
        partial.write_text(json.dumps(self._labelled()))
        partial.rename(mine)  # nobody sees half a part
        if self.rank == 0:
            self._merge()

    def _part(self, rank: int) -> Path:
        return self.file.with_name(f"{self.file.name}.rank{rank}")

    def _labelled(self) -> list[dict[str, Any]]:
        label = {"ph": "M", "pid": self.rank, "ts": 0}
        names = [
            {**label, "name": "process_name", "args": {"name": f"rank {self.rank}"}},
            {**label, "name": "process_sort_index", "args": {"sort_index": self.rank}},
        ]
        for tid, lane in enumerate(LANES):
            names.append({**label, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        return names + [{"pid": self.rank, **event} for event in self.events]

    def _merge(self) -> None:
        deadline = time.monotonic() + MERGE_S
        parts = [self._part(rank) for rank in range(self.size)]
        while time.monotonic() < deadline and not all(part.exists() for part in parts):
            time.sleep(0.02)
        found = [part for part in parts if part.exists()]
        events = [event for part in found for event in json.loads(part.read_text())]
        first = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
        for event in events:
            event["ts"] = max(0.0, round(event["ts"] - first, 3))
        self.file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        for part in found:
            with suppress(OSError):
                part.unlink()
        missing = [str(rank) for rank, part in enumerate(parts) if part not in found]
        if missing:
            logger.warning("timeline %s lacks rank %s", self.file, ", ".join(missing))


def _begin() -> NoTimeline:
    file = os.environ.get("MPIQUANT_TIMELINE")
    return Timeline(Path(file)) if file else NoTimeline()


active = _begin()


@contextmanager
def mark(name: str) -> Iterator[None]:
    """Mark a block as computation in the timeline.

    Examples
    --------
    >>> with mpiquant.mark("forward"):
    ...     loss = model(batch)
    """
    begin = time.perf_counter()
    try:
        yield
    finally:
        active.span("compute", name, begin, time.perf_counter())
