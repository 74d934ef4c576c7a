"""Options: argument > `with mpiquant.options(...)` > environment > default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from mpiquant.collectives import canonical
from mpiquant.typing import CodecLike


@dataclass(frozen=True)
class Options:
    """All options, with their defaults.

    Each field is also read from the environment variable MPIQUANT_<FIELD>, in capital letters.

    Attributes
    ----------
    codec : str, Codec, policy or None
        None: nothing is compressed.
    algorithm : str
        "auto", "native", "ring", "halving_doubling" ("hd"), "direct", "broadcast",
        "parameter_server", "hierarchical", "cerar", "sparse_allgather" or "sparse_reduce_scatter".
    min_size : int
        A codec that comes from the context or the environment, not from the call itself, leaves
        arrays (fused buckets, for lists and dicts) of fewer elements exact: they gain nothing, and
        among them are losses, counters and metrics.
    segment : int or None
        Elements of a pipelined segment; None: chosen by algorithm, codec, MPI and
        the length of the array.
    bucket_bytes : int
        Largest message that several arrays of a list or dict are fused into.
    timeout : float or None
        Seconds until a wait for a call raises CallTimeoutError; None: never.
    stall_seconds : float or None
        Seconds until a wait for a call is reported to the log; None: never.
    check : {"first", "always", "never"}
        What the ranks compare.  "first": all plans when they are first used, and those of
        compressed calls with every call, beside their data.  "always": also MPI's own small
        reductions with every call, which costs them about as much again.  "never": nothing.
    budget_s : float or None
        Seconds from its start in which a call with the codec "aqat" shall end.
    deadline : float or None
        When it shall end, on the clock of `time.perf_counter`; goes before budget_s.
    progress : {"manual", "thread"}
        What moves nonblocking calls on: waits and tests only, or a thread as well.
    ranks_per_node : int or None
        With "hierarchical": so many ranks, one after the other, are a node; None: those on one
        machine.
    components : int or None
        With "cerar": into how many components an array is cut, as many as ranks or more; None:
        twice as many, or as many as error_max allows.
    cond_max, error_max : float or None
        With "cerar": the largest condition number, and the largest relative error to be expected.
    """

    codec: CodecLike = None
    algorithm: str = "auto"
    min_size: int = 1024
    segment: int | None = None
    bucket_bytes: int = 32 << 20
    timeout: float | None = None
    stall_seconds: float | None = 30.0
    check: str = "first"
    budget_s: float | None = None
    deadline: float | None = None
    progress: str = "manual"
    ranks_per_node: int | None = None
    components: int | None = None
    cond_max: float | None = None
    error_max: float | None = None

    def __post_init__(self) -> None:
        canonical(self.algorithm)
        for name, lowest in LOWEST:
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name} is {value}, expected {lowest} or more")
        for name in ("timeout", "stall_seconds", "budget_s", "cond_max", "error_max"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}, expected more than 0 or None")
        for name, words in (("check", CHECKS), ("progress", PROGRESSES)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {words}")


LOWEST = (
    ("min_size", 0),
    ("segment", 1),
    ("bucket_bytes", 1),
    ("components", 2),
    ("ranks_per_node", 1),
)
CHECKS = ("first", "always", "never")
PROGRESSES = ("manual", "thread")

_CONVERTERS = {
    **dict.fromkeys((name for name, _ in LOWEST), int),
    **dict.fromkeys(("timeout", "stall_seconds", "budget_s", "deadline"), float),
    **dict.fromkeys(("cond_max", "error_max"), float),
}


@dataclass(frozen=True)
class _Frame:
    """What a `with` block changed, with all blocks around it, and the options that follow."""

    changes: dict[str, Any]
    options: Options


context: ContextVar[_Frame | None] = ContextVar("mpiquant_options", default=None)


@cache
def _environment() -> dict[str, Any]:
    found = {}
    for field in fields(Options):
        variable = f"MPIQUANT_{field.name.upper()}"
        text = os.environ.get(variable)
        if text:
            try:
                found[field.name] = _CONVERTERS.get(field.name, str)(text)
            except ValueError:
                raise ValueError(f"{variable} is {text!r}, expected a number") from None
    return found


@cache
def defaults() -> Options:
    """The options outside of all blocks."""
    return Options(**_environment())


def reload_environment() -> None:
    """Read the environment again at the next call."""
    _environment.cache_clear()
    defaults.cache_clear()


_last_merge: list[tuple[Options, dict[str, Any], Options]] = [(Options(), {}, Options())]
"""Options, changes, and what both make: the buckets of a step are called alike."""


def current(**arguments: Any) -> Options:
    """The options in force for a call with these arguments; None means not given.

    The environment is read once, at the first call.
    """
    frame = context.get()
    options = defaults() if frame is None else frame.options
    if not arguments:
        return options
    given = {key: value for key, value in arguments.items() if value is not None}
    if not given:
        return options
    last, changes, merged = _last_merge[0]
    if options is not last or given != changes:
        merged = replace(options, **given)
        _last_merge[0] = options, given, merged
    return merged


@contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """Options for the calls of a `with` block, in this thread; see `Options` for the names.

    Blocks nest; the innermost wins.

    Raises
    ------
    ValueError
        For a value out of range.
    TypeError
        For an unknown name.

    Examples
    --------
    >>> with mpiquant.options(codec="q4", algorithm="ring"):
    ...     total = mpiquant.allreduce(gradient)
    """
    preset = Preset(changes)
    token = preset.apply()
    try:
        yield current()
    finally:
        restore(token)


class Preset:
    """Changes of options that are applied again and again, and therefore worked out once."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.changes = changes
        self._last: tuple[_Frame | None, _Frame] | None = None

    def apply(self) -> Token[_Frame | None]:
        """Put them in force; returns what `restore` needs."""
        outer, last = context.get(), self._last
        if last is None or last[0] is not outer:
            merged = {**(outer.changes if outer else {}), **self.changes}
            last = (outer, _Frame(merged, Options(**{**_environment(), **merged})))
            self._last = last
        return context.set(last[1])


def restore(token: Token[_Frame | None]) -> None:
    context.reset(token)
