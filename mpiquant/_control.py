"""Messages of the ranks about their calls, apart from the data: faults, questions, answers.

Each is JSON behind four bytes of magic.  They are rare: none is sent while all goes well.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

MAGIC = b"MPQC"


@dataclass(frozen=True)
class Fault:
    """A rank left a call early.  Every other rank answers with a fault of its own.

    Attributes
    ----------
    seq : int
        Number of the call.
    kind : str
        "error": this rank raised or refused something, and `text` says what; "type": the same,
        with a TypeError; "stopped": it saw a foreign plan, or heard of another rank's fault;
        "timeout": it gave up, and takes no part in a recovery.
    text : str
    plan : dict or None
        The plan of this rank, if it had come to one.
    agreed : bool
        Whether this rank knows that all ranks have agreed on this plan.
    tag : int
        Of this rank's data.
    sent : list of int
        Numbers of payload messages and of headers sent to the receiver of this fault.
    next_seq : int
        The first call that this rank will only open after its recovery.
    native : bool
        Whether this rank has begun a native collective that cannot end any more.
    """

    seq: int
    kind: str
    text: str
    plan: dict[str, Any] | None
    agreed: bool
    tag: int
    sent: list[int]
    next_seq: int
    native: bool


@dataclass(frozen=True)
class Question:
    """A rank has waited in a call for some time, and asks all others where they are."""

    seq: int
    plan: dict[str, Any] | None


@dataclass(frozen=True)
class Answer:
    """Where a rank is, as seen from the call asked for.

    Attributes
    ----------
    seq : int
        Number of the call asked for.
    state : str
        "in" the call, "before" it or "past" it.
    waits_for : int or None
        In the call: the rank whose message is due next.
    """

    seq: int
    state: str
    waits_for: int | None


Message: TypeAlias = Fault | Question | Answer
_KINDS: dict[str, type] = {"fault": Fault, "question": Question, "answer": Answer}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_CHECKS = {
    "seq": lambda v: type(v) is int and v >= 0,
    "kind": lambda v: v in ("error", "type", "stopped", "timeout"),
    "text": lambda v: isinstance(v, str),
    "plan": lambda v: (
        v is None
        or (isinstance(v, dict) and not any(isinstance(i, list | dict) for i in v.values()))
    ),
    "agreed": lambda v: isinstance(v, bool),
    "tag": lambda v: type(v) is int and v >= 0,
    "sent": lambda v: (
        isinstance(v, list) and len(v) == 2 and all(type(i) is int and i >= 0 for i in v)
    ),
    "next_seq": lambda v: type(v) is int and v >= 0,
    "native": lambda v: isinstance(v, bool),
    "state": lambda v: v in ("in", "before", "past"),
    "waits_for": lambda v: v is None or (type(v) is int and v >= 0),
}


def pack(message: Message) -> bytes:
    return MAGIC + json.dumps({"message": _NAMES[type(message)], **asdict(message)}).encode()


def unpack(data: bytes) -> Message:
    """The message in some bytes.

    Raises
    ------
    ValueError
        If there is none.
    """
    if data[:4] != MAGIC:
        raise ValueError(f"not a control message: {data[:16]!r}")
    try:
        return _read(data[4:])
    except RecursionError:
        raise ValueError("not a control message: nested too deeply") from None


def _read(data: bytes) -> Message:
    found = json.loads(data)  # its errors are ValueErrors
    kind = _KINDS.get(str(found.pop("message", None))) if isinstance(found, dict) else None
    if kind is None or set(found) != {f.name for f in fields(kind)}:
        raise ValueError("not a control message: unknown kind or fields")
    for name, value in found.items():
        if not _CHECKS[name](value):
            raise ValueError(f"bad {name} in a control message: {value!r}")
    message: Message = kind(**found)
    return message
