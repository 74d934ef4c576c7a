"""Options: argument > `with mpiquant.options(...)` > environment > default."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
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
        "auto", "native", "ring", "halving_doubling" ("hd") or "direct".
    min_size : int
        A codec that comes from the context or the environment, not from the call itself, leaves
        arrays (fused buckets, for lists and dicts) of fewer elements exact: they gain nothing, and
        among them are losses, counters and metrics.
    segment : int
        Elements of a pipelined segment.  The default is an odd multiple of 512, so that the bit
        planes of a segment do not fall on the same cache sets.
    bucket_bytes : int
        Largest message that several arrays of a list or dict are fused into.
    timeout : float or None
        Seconds until a call that waits for another rank raises CallTimeoutError; None: never.
    """

    codec: CodecLike = None
    algorithm: str = "auto"
    min_size: int = 1024
    segment: int = 511 * 512
    bucket_bytes: int = 32 << 20
    timeout: float | None = None

    def __post_init__(self) -> None:
        canonical(self.algorithm)
        for name, lowest in (("min_size", 0), ("segment", 1), ("bucket_bytes", 1)):
            value = getattr(self, name)
            if value < lowest:
                raise ValueError(f"{name} is {value}, expected {lowest} or more")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}, expected more than 0 or None")


_CONVERTERS = {"min_size": int, "segment": int, "bucket_bytes": int, "timeout": float}
_context: ContextVar[dict[str, Any] | None] = ContextVar("mpiquant_options", default=None)


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


def current(**arguments: Any) -> Options:
    """The options in force for a call with these arguments; None means not given."""
    given = {key: value for key, value in arguments.items() if value is not None}
    return Options(**{**_environment(), **(_context.get() or {}), **given})


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
    merged = {**(_context.get() or {}), **changes}
    checked = Options(**merged)
    token = _context.set(merged)
    try:
        yield checked
    finally:
        _context.reset(token)
