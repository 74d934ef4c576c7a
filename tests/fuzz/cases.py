"""What is fuzzed: the codecs, headers and control messages, case by case.

A case is a number with random numbers of its own, so that each can be run again alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from fuzz import mutate

from mpiquant import _agreement, _control, _kernels
from mpiquant.codecs import LowBitCodec, TernaryCodec, UniformCodec, by_name
from mpiquant.codecs._block import BlockCodec
from mpiquant.codecs.aqat import LEVELS, codec_of
from mpiquant.codecs.bounded import INTEGERS
from mpiquant.codecs.sparse_message import decode_message, encode_message
from mpiquant.parts import HEADER_NBYTES, LAST, Assembly, Header, ends_of, read_part
from mpiquant.pool import pool

CODECS = [
    *(by_name(f"q{bits}") for bits in range(1, 17)),
    *map(by_name, ("ternary", "exact", "fp16", "bf16")),
    *(UniformCodec(bits=bits, rounding="stochastic", seed=bits) for bits in (3, 4, 8, 13)),
    *(UniformCodec(bits=b, block=n) for b, n in ((4, 48), (8, 64), (5, 1), (7, 8192), (12, 100))),
    UniformCodec(bits=6, block=77, rounding="stochastic"),
    *(LowBitCodec(bits=bits, block=block) for bits in (1, 2) for block in (7, 192)),
    *(TernaryCodec(block=block, seed=1) for block in (30, 64)),
]
COMBINATIONS = list(itertools.product(CODECS, (np.float32, np.float64)))
MUTATIONS = 20
GUARD = 0xA5


class Finding(AssertionError):
    """What should not be."""


def run(seed: int, number: int, mutations: int = MUTATIONS) -> int:
    """One case: how many mutated messages were tried.

    Every eighth is of headers, control messages, messages in parts, sparse ones and integers.
    """
    rng = np.random.default_rng([seed, number])
    if number % 8 == 7:
        for _ in range(mutations):
            check_header(rng)
            check_control(rng)
            check_parts(rng)
            check_sparse(rng)
            check_integers(rng)
        return 5 * mutations
    codec, dtype = COMBINATIONS[(number - number // 8) % len(COMBINATIONS)]
    check_codec(codec, dtype, rng, mutations)
    return mutations


# ---- wires ----


class Memory:
    """Where the buffers of a call come from.

    Those to read end where their memory ends, so that AddressSanitizer sees the first byte too
    many.  Those to write do so too, or lie between guard bytes, which show writes that jump over
    AddressSanitizer's own.  All start at any address.
    """

    def __init__(self, rng: np.random.Generator):
        self.guard = int(rng.choice([0, 64]))
        self.offset = int(rng.integers(9))
        self.fill = 0
        self._made: list[tuple[np.ndarray, int]] = []

    def hold(self, data: np.ndarray) -> np.ndarray:
        """A copy to read."""
        view = data.view(np.uint8)
        whole = np.empty(self.offset + view.size, np.uint8)
        whole[self.offset :] = view
        return whole[self.offset :].view(data.dtype)

    def room(self, count: int, dtype: type = np.uint8) -> np.ndarray:
        """A buffer to write, full of one byte."""
        nbytes = count * np.dtype(dtype).itemsize
        start = self.guard + self.offset
        whole = np.full(start + nbytes + self.guard, GUARD, np.uint8)
        self._made.append((whole, nbytes))
        inner = whole[start : start + nbytes]
        inner[:] = self.fill
        return inner.view(dtype)

    def check(self) -> None:
        """Raise Finding if a guard was written to."""
        start = self.guard + self.offset
        for whole, nbytes in self._made:
            around = whole[:start].tobytes() + whole[start + nbytes :].tobytes()
            if around.count(GUARD) != len(around):
                raise Finding("wrote outside of the output")
        self._made.clear()


def any_count(rng: np.random.Generator, block: int) -> int:
    """A length: short, at the border of groups and blocks, or any."""
    around = int(rng.choice([8, 64, block])) * int(rng.integers(1, 5)) + int(rng.integers(-1, 2))
    some = [rng.integers(1, 70), min(max(1, around), 3000), rng.integers(1, 3000)]
    return int(rng.choice(some, p=[0.4, 0.4, 0.2]))


def any_reals(rng: np.random.Generator, count: int, dtype: type) -> np.ndarray:
    """Values of all magnitudes; now and then at the ends of the range, or constant."""
    info = np.finfo(dtype)
    x = rng.standard_normal(count)
    shape = rng.integers(8)
    if shape == 0:
        x = np.clip(x / 4, -1, 1) * float(info.max)
    elif shape == 1:
        x *= float(info.tiny) * rng.choice([1e-3, 1.0, 100.0])
    elif shape == 2:
        x[:] = x[0]
    elif shape == 3:
        x *= 10.0 ** rng.integers(-30, 30)
    x = x.astype(dtype)
    if shape == 4:
        x[rng.integers(count)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def mutated(codec, wire: np.ndarray, count: int, dtype: type, rng) -> np.ndarray:
    """Other bytes, made of some good ones."""
    wire = wire.copy()
    itemsize = np.dtype(dtype).itemsize
    if isinstance(codec, BlockCodec):
        extremes = (-(-count // codec.block), itemsize)
    else:
        extremes = (count, codec.nbytes(1, np.dtype(dtype)))
    for _ in range(rng.choice([1, 1, 1, 2])):
        choice = rng.integers(len(mutate.ANY) + 4)
        if choice < len(mutate.ANY):
            found = mutate.ANY[choice](wire, rng)
            if found is not None:  # of another length as a rule, which no more changes would mend
                return found
        else:
            mutate.extreme(wire, rng, *extremes)
    return wire


def check_codec(codec, dtype: type, rng: np.random.Generator, mutations: int = MUTATIONS) -> None:
    """Encode some values and decode what mutations make of them, on all instruction sets.

    Raises
    ------
    Finding
        If a wire of a wrong length is taken, something is written that should not be, or the
        instruction sets do not give the same.
    """
    count = any_count(rng, getattr(codec, "block", 64))
    x = any_reals(rng, count, dtype)
    wire = np.empty(codec.nbytes(count, x.dtype), np.uint8)
    codec.encode(x, wire)
    for _ in range(mutations):
        spoilt = mutated(codec, wire, count, dtype, rng)
        memory = Memory(rng)
        trial = Trial(codec, memory.hold(spoilt), memory.hold(any_reals(rng, count, dtype)), memory)
        if len(spoilt) == len(wire):
            trial.decoded(rng)
        else:
            trial.refused()
        if trial.wire.tobytes() != spoilt.tobytes():
            raise Finding(f"{trial} changed its input")


@contextmanager
def using(isa: str) -> Iterator[None]:
    before = _kernels.isa()
    _kernels.use_isa(isa)
    try:
        yield
    finally:
        _kernels.use_isa(before)


class Trial:
    """One wire, and one array to add it to."""

    def __init__(self, codec, wire: np.ndarray, x: np.ndarray, memory: Memory):
        self.codec, self.wire, self.x, self.memory = codec, wire, x, memory
        wire.flags.writeable = x.flags.writeable = False

    def __str__(self) -> str:
        return f"{self.codec}, {self.x.size} values of {self.x.dtype}, {self.wire.size} bytes"

    def _outputs(self) -> list[np.ndarray]:
        """Room for what decode, decode_add and two hops write, and the second one's residual."""
        n, dtype = self.x.size, self.x.dtype
        nbytes = self.codec.nbytes(n, dtype)
        room = self.memory.room
        return [room(n, dtype), room(n, dtype), room(nbytes), room(nbytes), room(n, dtype)]

    def _calls(self, outputs: list[np.ndarray], in_place: bool, **place: int) -> list[partial]:
        """All ways to decode."""
        codec, wire, x = self.codec, self.wire, self.x
        out, total, hopped, hopped_rest, rest = outputs
        if in_place:
            total[:] = rest[:] = x
        return [
            partial(codec.decode, wire, out),
            partial(codec.decode_add, wire, total if in_place else x, total),
            partial(codec.hop, wire, x, hopped, **place),
            partial(codec.hop, wire, rest if in_place else x, hopped_rest, residual=rest, **place),
        ]

    def refused(self) -> None:
        """A wire of a wrong length raises ValueError before anything is written."""
        self.memory.fill = 0x11
        outputs = self._outputs()
        for call in self._calls(outputs, in_place=False):
            try:
                call()
            except ValueError:
                continue
            raise Finding(f"{self}: taken, though of a wrong length")
        if any(output.tobytes().strip(b"\x11") for output in outputs):
            raise Finding(f"{self}: refused, but something was written")
        self.memory.check()

    def decoded(self, rng: np.random.Generator) -> None:
        """A wire of the right length decodes, and to the same everywhere."""
        place = {
            "stream": int(rng.integers(1 << 63)),
            "index": self.codec.granule * int(rng.integers(5)),
        }
        in_place = bool(rng.integers(2))
        first: list[bytes] = []
        for i, isa in enumerate(_kernels.available_isas()):
            self.memory.fill = 0x11 * (i + 1)  # what is left of it makes results differ
            with using(isa), np.errstate(all="ignore"):
                results = self._results(in_place, place)
                if not first:
                    first = results
                    self._compose(results, place)
            self.memory.check()
            for name, one, other in zip(NAMES, first, results, strict=True):
                if one != other:
                    raise Finding(f"{self}: {name} differs on {isa}")

    def _results(self, in_place: bool, place: dict[str, int]) -> list[bytes]:
        outputs = self._outputs()
        flags = [call() for call in self._calls(outputs, in_place, **place)]
        out, total, hopped, hopped_rest, rest = outputs
        wires = [self._wire_bits(hopped), self._wire_bits(hopped_rest)]
        return [bits(out), bits(total), *wires, bits(rest), bytes(flags[:2])]

    def _wire_bits(self, wire: np.ndarray) -> bytes:
        """The bytes of a wire; where values travel as such, of the values."""
        if isinstance(self.codec, BlockCodec):
            return wire.tobytes()
        values = np.empty_like(self.x)
        self.codec.decode(wire, values)
        return bits(values)

    def _compose(self, results: list[bytes], place: dict[str, int]) -> None:
        """The fused ways give what decode, a sum and encode give one after the other."""
        codec, x = self.codec, self.x
        out, back = np.empty_like(x), np.empty_like(x)
        wire, hopped_rest, rest = self._outputs()[2:]
        codec.decode(self.wire, out)
        total = x + out
        codec.encode(total, wire, **place)
        codec.encode(total, hopped_rest, residual=rest, **place)
        codec.decode(hopped_rest, back)
        wires = [self._wire_bits(wire), self._wire_bits(hopped_rest)]
        expected = [bits(out), bits(total), *wires, bits(total - back if codec.lossy else rest)]
        for name, one, other in zip(NAMES, expected, results, strict=False):
            if one != other:
                raise Finding(f"{self}: {name} is not what its parts give")


NAMES = ("decode", "decode_add", "hop", "hop with a residual", "the residual", "the flag")


def bits(values: np.ndarray) -> bytes:
    """The bits of reals; all NaNs are one, since their payloads are of no account."""
    return np.where(np.isnan(values), values.dtype.type(np.nan), values).tobytes()


# ---- words ----

PLAN = _agreement.Plan(
    kind="allreduce",
    count=1000,
    dtype="<f4",
    op="sum",
    codec="q4",
    algorithm="ring",
    segment=261632,
    feedback=False,
    measured=False,
    blocking=True,
    check="neighbours",
    name="w",
)


def check_header(rng: np.random.Generator) -> None:
    """A header is refused with ValueError, or read."""
    good = np.frombuffer(PLAN.header(int(rng.integers(1 << 62)), bool(rng.integers(2))), np.uint8)
    data = bytes(spoil(good, rng))
    try:
        foreign, seq, plan_hash = _agreement.read_header(data)
    except ValueError:
        return
    if type(foreign) is not bool or not (0 <= seq < 1 << 64 and 0 <= plan_hash < 1 << 64):
        raise Finding(f"header {data!r} was read as {(foreign, seq, plan_hash)}")


def spoil(good: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    data = good.copy()
    found = mutate.ANY[rng.integers(len(mutate.ANY))](data, rng)
    return data if found is None else found


def nested(opening: bytes, closing: bytes) -> list[bytes]:
    return [opening * depth + closing * depth for depth in (5, 100, 900, 980, 1000, 20000)]


VALUES = [
    *rb'0 -1 1.5 1e999 NaN -Infinity null true "" "in" "error" "\ud800" "\u0000"'.split(),
    *b'[] [1,-1] [1,2,3] [true,false] {} {"count":{"count":[]}} } "\xff"'.split(),
    *(b"", b"1" + b"0" * 40, b"9" * 4000, b"9" * 5000),
    *nested(b"[", b"]"),
    *(deep.replace(b":}", b":0}") for deep in nested(b'{"count":', b"}")),
]
"""JSON that may stand where something else should."""


def any_message(rng: np.random.Generator) -> _control.Message:
    seq, plan = int(rng.integers(1 << 40)), PLAN.values() if rng.integers(2) else None
    some = [
        _control.Fault(
            seq=seq,
            kind=str(rng.choice(["error", "type", "stopped", "timeout"])),
            text="a text, \u00e4",
            plan=plan,
            agreed=bool(rng.integers(2)),
            tag=16,
            sent=[4, 5],
            next_seq=seq + 1,
            native=bool(rng.integers(2)),
        ),
        _control.Question(seq, plan),
        _control.Answer(seq, str(rng.choice(["in", "before", "past"])), int(rng.integers(9))),
    ]
    return some[rng.integers(len(some))]


def hostile(message: _control.Message, rng: np.random.Generator) -> bytes:
    """A message with another value in one of its fields, or in a new one."""
    content = json.loads(_control.pack(message)[len(_control.MAGIC) :])
    fields = content
    if content.get("plan") and rng.integers(3) == 0:
        fields = content["plan"]
    fields[str(rng.choice([*fields, *fields, "more"]))] = "@"
    value = VALUES[rng.integers(len(VALUES))]
    return _control.MAGIC + json.dumps(content).encode().replace(b'"@"', value)


def check_control(rng: np.random.Generator) -> None:
    """A control message is refused with ValueError, or is one that can be used."""
    message = any_message(rng)
    if rng.integers(2):
        data = hostile(message, rng)
    else:
        data = bytes(spoil(np.frombuffer(_control.pack(message), np.uint8), rng))
    try:
        found = _control.unpack(data)
    except ValueError:
        return
    packed = _control.pack(found)
    if _control.pack(_control.unpack(packed)) != packed:
        raise Finding(f"control message {data!r} is not what comes back")
    if getattr(found, "plan", None):
        _agreement.difference({0: PLAN.values(), 1: found.plan})


# ---- messages in parts ----


def some_parts(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """The parts of a good message, perhaps of one that was cut short."""
    bits, dtype = int(rng.choice(LEVELS)), np.dtype(np.float32)
    codec = codec_of(bits)
    wire = np.empty(codec.nbytes(count, dtype), np.uint8)
    codec.encode(any_reals(rng, count, np.float32), wire)
    ends = ends_of(codec, count, dtype, float(rng.choice([1, 1000, 1e9])))
    ends = ends[: int(rng.integers(1, len(ends) + 1))]
    parts, begin = [], 0
    for i, (stop, planes) in enumerate(ends):
        flags = LAST if i == len(ends) - 1 else 0
        part = np.empty(HEADER_NBYTES + stop - begin, np.uint8)
        Header(flags, bits, planes, 0, 7, count, stop - begin, 1e9).pack_into(part)
        part[HEADER_NBYTES:] = wire[begin:stop]
        parts.append(part)
        begin = stop
    return parts


def check_parts(rng: np.random.Generator) -> None:
    """A message in parts is refused with ValueError, or can be decoded."""
    count = any_count(rng, 512)
    parts = some_parts(rng, count)
    spoilt = int(rng.integers(len(parts)))
    parts[spoilt] = np.asarray(spoil(parts[spoilt], rng))
    assembly, out = Assembly(7, count, np.dtype(np.float32)), np.empty(count, np.float32)
    try:
        for part in parts:
            buffer = pool.take(part.nbytes)
            buffer[:] = part
            header, payload = read_part(buffer)
            if assembly.add(header, payload, buffer):
                break
        else:
            return  # more parts are waited for
        codec, wire = assembly.format()
        with np.errstate(all="ignore"):
            codec.decode(wire, out)
    except ValueError:
        return


# ---- sparse messages ----

SPARSE_VALUES = [by_name(name) for name in ("exact", "q8", "q1", "bf16")]


def check_sparse(rng: np.random.Generator) -> None:
    """A sparse message is refused with ValueError, or its positions lie in the array."""
    total = int(rng.choice([1, 9, 300, 5000, 200_000]))
    count = int(rng.integers(min(total, 500) + 1))
    at = np.sort(rng.choice(total, count, replace=False))
    codec = SPARSE_VALUES[rng.integers(len(SPARSE_VALUES))]
    dtype = np.dtype(rng.choice([np.float32, np.float64]))
    values = any_reals(rng, count, dtype.type) if count else np.zeros(0, dtype)
    with np.errstate(all="ignore"):
        wire = encode_message(at, values, total, codec)
    data = np.asarray(spoil(wire, rng))
    try:
        with np.errstate(all="ignore"):
            found, values, _ = decode_message(data, total, codec, dtype)
    except ValueError:
        return
    if found.size != values.size or np.any(np.diff(found) <= 0):
        raise Finding(f"{found.size} positions of {values.size} values, or not ascending")
    if found.size and not 0 <= found[0] <= found[-1] < total:
        raise Finding(f"positions {found[0]} to {found[-1]} of {total}")


def check_integers(rng: np.random.Generator) -> None:
    """A message of integers is refused with ValueError, or read alike by all instruction sets."""
    count = any_count(rng, 128)
    dtype = np.dtype(rng.choice([np.int32, np.int64]))
    x = any_integers(rng, count, dtype)
    whole = np.empty(INTEGERS.nbytes(count, dtype), np.uint8)
    INTEGERS.encode(x, whole)
    memory = Memory(rng)
    wire = memory.hold(np.asarray(spoil(whole[: INTEGERS.used(whole)], rng)))
    addend = memory.hold(any_integers(rng, count, dtype))
    found = set()
    for i, isa in enumerate(_kernels.available_isas()):
        memory.fill = 0x11 * (i + 1)
        out, total = memory.room(count, dtype), memory.room(count, dtype)
        hop = memory.room(whole.size)
        try:
            with using(isa):
                INTEGERS.decode(wire, out)
                INTEGERS.decode_add(wire, addend, total)
                INTEGERS.hop(wire, addend, hop)
        except ValueError:
            if any(np.any(each.view(np.uint8) != memory.fill) for each in (out, total)):
                raise Finding("refused, but something was written") from None
            found.add(None)
            continue
        finally:
            memory.check()
        found.add((out.tobytes(), total.tobytes(), hop[: INTEGERS.used(hop)].tobytes()))
    if len(found) > 1:
        raise Finding(f"{count} integers of {dtype} in {wire.size} bytes differ between ISAs")


def any_integers(rng: np.random.Generator, count: int, dtype: np.dtype) -> np.ndarray:
    """Integers of any width, constant or close to each other now and then."""
    bits = int(rng.integers(1, 8 * dtype.itemsize))
    x = rng.integers(-(1 << bits >> 1), 1 << bits >> 1, count, dtype=dtype, endpoint=False)
    return rng.choice([x, np.cumsum(x, dtype=dtype), np.full(count, x[0])]).astype(dtype)
