"""Headers, plans and control messages as bytes and as text."""

import dataclasses
import json

import pytest

from mpiquant import _control
from mpiquant._agreement import HEADER_NBYTES, MAGIC, Plan, difference, read_header
from mpiquant._control import Answer, Fault, Question, pack, unpack

PLAN = Plan(
    kind="allreduce",
    count=1000,
    dtype="<f4",
    op="sum",
    codec="q4",
    algorithm="ring",
    segment=261632,
    feedback=False,
    measured=False,
    blocking=False,
    check="neighbours",
    name="w",
)
FAULT = Fault(
    seq=7,
    kind="error",
    text="bad \u00e4\ud800",
    plan=PLAN.values(),
    agreed=True,
    tag=16,
    sent=[3, 1],
    next_seq=9,
    native=False,
)


# ---- headers ----


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("seq", [0, 7, (1 << 64) - 1])
def test_a_header_comes_back(seq, foreign):
    header = PLAN.header(seq, foreign)
    assert len(header) == HEADER_NBYTES == 32
    assert read_header(header) == (foreign, seq, PLAN.hash)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        PLAN.header(1)[:-1],
        PLAN.header(1) + b"\0",
        b"XXXX" + PLAN.header(1)[4:],
        MAGIC + b"\2" + PLAN.header(1)[5:],
        MAGIC + b"\1\0\0\1" + PLAN.header(1)[8:],
        bytes(HEADER_NBYTES),
    ],
)
def test_what_is_no_header_is_refused(header):
    with pytest.raises(ValueError, match="header"):
        read_header(header)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Plan)])
def test_the_hash_depends_on_every_field(field):
    value = getattr(PLAN, field)
    other = dataclasses.replace(
        PLAN, **{field: not value if isinstance(value, bool) else value + type(value)(1)}
    )
    assert other.hash != PLAN.hash
    assert dataclasses.replace(PLAN).hash == PLAN.hash


# ---- differences ----


def plans(**of_rank):
    """Plans of ranks 0, 1, ... with such values of one field."""
    ((field, values),) = of_rank.items()
    return {rank: {**PLAN.values(), field: value} for rank, value in enumerate(values)}


def test_equal_plans_do_not_differ():
    assert difference({}) is None
    assert difference(plans(op=["sum"])) is None
    assert difference(plans(op=["sum"] * 5)) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"op": ["sum", "max", "sum"]}, "op is 'sum' on ranks 0, 2 and 'max' on rank 1"),
        ({"count": [3, 4]}, "shape (elements) is 3 on rank 0 and 4 on rank 1"),
        ({"measured": [True, False]}, "stats='error' is True on rank 0 and False on rank 1"),
        ({"name": ["w"] * 6 + ["v"]}, "name is 'w' on ranks 0, 1, 2, 3 and 2 more and 'v' on rank"),
        (
            {"segment": list(range(6))},
            "0 on rank 0 and 1 on rank 1 and 2 on rank 2 and 3 on rank 3",
        ),
    ],
)
def test_a_difference_is_told_in_words(values, text):
    found = difference(plans(**values))
    assert text in found
    assert "4 on rank 4" not in found
    assert found == difference(dict(reversed(plans(**values).items())))


def test_plans_of_another_version_differ():
    assert "algorithm is 'ring' on rank 0 and None on rank 3" in difference(
        {0: PLAN.values(), 3: {}}
    )


# ---- control messages ----


@pytest.mark.parametrize(
    "message",
    [
        FAULT,
        dataclasses.replace(FAULT, kind="timeout", plan=None, native=True),
        Question(0, None),
        Question(1 << 40, PLAN.values()),
        Answer(3, "in", 2),
        Answer(3, "past", None),
    ],
)
def test_a_control_message_comes_back(message):
    assert unpack(pack(message)) == message


def changed(message=FAULT, /, **values):
    content = json.loads(pack(message)[len(_control.MAGIC) :])
    return _control.MAGIC + json.dumps({**content, **values}).encode()


def without(name):
    content = json.loads(pack(FAULT)[len(_control.MAGIC) :])
    del content[name]
    return _control.MAGIC + json.dumps(content).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"MPQ",
        b"XXXX" + pack(FAULT)[4:],
        *(
            _control.MAGIC + rest
            for rest in (b"", b"\xff", b"{", b"[]", b"null", b"{}", b'"fault"')
        ),
        pack(FAULT)[:-1],
        pack(FAULT) + b"}",
        *(without(field) for field in ("message", "seq", "plan")),
        changed(more=1),
        changed(message="answer"),
        changed(message=["fault"]),
        *(changed(seq=seq) for seq in (-1, True, 1.0, "1", None)),
        *(changed(kind=kind) for kind in ("other", None, ["error"])),
        changed(text=None),
        *(changed(plan=plan) for plan in ([], "q4", {"count": [3]}, {"op": {}})),
        *(changed(sent=sent) for sent in (None, [1], [1, 2, 3], [1, -1], [True, 1], "12")),
        changed(next_seq=None),
        changed(native=0),
        changed(Answer(3, "in", 2), state="out"),
        changed(Answer(3, "in", 2), waits_for=-1),
        changed(Question(3, None), text=""),
    ],
)
def test_what_is_no_control_message_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        unpack(data)


@pytest.mark.parametrize("depth", [100, 900, 950, 975, 990, 1000, 100_000])
@pytest.mark.parametrize("place", ["message", "seq", "plan", "text"])
def test_deep_nesting_is_refused_like_all_else(place, depth):
    deep = b"[" * depth + b"]" * depth
    data = changed(**{place: "@"}).replace(b'"@"', deep)
    for nested in (data, data.replace(deep, b'{"count":' + deep + b"}"), _control.MAGIC + deep):
        with pytest.raises(ValueError, match=r"."):
            unpack(nested)
