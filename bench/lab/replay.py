"""Replays a trace of bandwidths: a text file with lines `SECONDS RATE [HOST]`.

From each time on, a host (all of them, if none is named by its number) has the given rate, such as
`200mbit`, in both directions.  Times do not fall; `#` begins a comment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import cluster
from system import LabError


class Change(NamedTuple):
    at_s: float
    rate: int
    host: int | None


def read(file: Path) -> list[Change]:
    """The changes of a trace; LabError that names a bad line."""
    changes: list[Change] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            at_s, rate, *host = words
            change = Change(float(at_s), cluster.parse_rate(rate), int(*host) if host else None)
        except (ValueError, TypeError, LabError):
            raise LabError(f"{file}:{number}: expected SECONDS RATE [HOST]") from None
        if changes and change.at_s < changes[-1].at_s:
            raise LabError(f"{file}:{number}: time {at_s} is before that of the line before")
        changes.append(change)
    if not changes:
        raise LabError(f"{file}: no lines")
    return changes


def replay(changes: list[Change], stop: threading.Event) -> None:
    """Make the changes at their times, until the last one or until stopped."""
    begin = time.monotonic()
    for change in changes:
        if stop.wait(max(0.0, begin + change.at_s - time.monotonic())):
            return
        for host in cluster.hosts():
            if change.host is None or host == f"{cluster.PREFIX}{change.host}":
                cluster.set_rate(host, change.rate)


@contextmanager
def replaying(changes: list[Change]) -> Iterator[None]:
    """Replay a trace while the block runs."""
    stop = threading.Event()
    thread = threading.Thread(target=replay, args=(changes, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
