"""Schedules and programs, run on a loopback: no MPI, all ranks in one process."""

from collections import defaultdict, deque

import numpy as np
import pytest

from mpiquant.codecs import EXACT, IdentityCodec, LowBitCodec, TernaryCodec, UniformCodec, by_name
from mpiquant.codecs._block import mix_key
from mpiquant.codecs.bounded import INTEGERS
from mpiquant.collectives import ALGORITHMS, chunk_bounds, own_part
from mpiquant.execute import Execution
from mpiquant.program import compile_program
from mpiquant.stats import Stats

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11)
CODECS = ("exact", "fp16", "bf16", "q16", "q8", "q4", "q3", "q2", "q1", "ternary")


class _Sent:
    def Test(self):
        return True


class _Received:
    def __init__(self, queue, position, buffer):
        self.queue, self.position, self.buffer, self.done = queue, position, buffer, False

    def Test(self):
        if not self.done and len(self.queue.messages) > self.position:
            data = self.queue.messages[self.position]
            ragged = self.queue.ragged and len(data) <= len(self.buffer)
            assert ragged or len(data) == len(self.buffer), "messages matched in the wrong order"
            self.buffer[: len(data)] = data
            self.done = True
        return self.done


class _Queue:
    def __init__(self, ragged):
        self.messages, self.posted, self.ragged = [], 0, ragged


class Loopback:
    """All ranks' transports; messages between two ranks match in the order of posting.

    They have the length that was expected, or if they are ragged, at most that.
    """

    def __init__(self, ragged):
        self.queues = defaultdict(lambda: _Queue(ragged))

    def of(self, rank):
        return _Transport(self, rank)


class _Transport:
    def __init__(self, loopback, rank):
        self.loopback, self.rank = loopback, rank

    def isend(self, buffer, peer):
        self.loopback.queues[self.rank, peer].messages.append(buffer.copy())
        return _Sent()

    def irecv(self, buffer, peer):
        queue = self.loopback.queues[peer, self.rank]
        queue.posted += 1
        return _Received(queue, queue.posted - 1, buffer)


class _Rendezvous:
    """A send that ends when its bytes are fetched: right from its buffer, as late as possible."""

    def __init__(self, buffer):
        self.buffer, self.fetched = buffer, False

    def __len__(self):
        return len(self.buffer)

    def __array__(self, dtype=None, copy=None):
        self.fetched = True
        return self.buffer

    def Test(self):
        return self.fetched


class LazyLoopback(Loopback):
    def of(self, rank):
        return _LazyTransport(self, rank)


class _LazyTransport(_Transport):
    def isend(self, buffer, peer):
        sending = _Rendezvous(buffer)
        self.loopback.queues[self.rank, peer].messages.append(sending)
        return sending


def collective(
    kind,
    algorithm,
    inputs,
    codec,
    length=512,
    rests=None,
    seed=0,
    in_place=False,
    transports=Loopback,
):
    """Outputs and statistics of all ranks."""
    size = len(inputs)
    count = inputs[0].size * (size if kind == "allgather" else 1)
    loopback = transports(codec.ragged)
    runs, outs = deque(), []
    for rank, x in enumerate(inputs):
        program = compile_program(
            kind, algorithm, rank, size, count, codec, inputs[0].dtype, length
        )
        out = x if in_place else np.full(count, np.nan if x.dtype.kind == "f" else -1, x.dtype)
        source = x
        if kind == "allgather":
            out[rank * x.size : (rank + 1) * x.size] = x
            source = out
        outs.append(out)
        run = Execution(
            program,
            loopback.of(rank),
            source,
            out,
            None if rests is None else rests[rank],
            mix_key(seed, rank),
            Stats(),
        )
        run.start()
        runs.append(run)
    for _ in range(100_000):
        if all([run.advance() for run in runs]):  # noqa: C419 - every run must advance
            for queue in loopback.queues.values():
                assert queue.posted == len(queue.messages)
            return outs, [run.stats for run in runs], [run.program for run in runs]
    raise AssertionError("deadlock")


def data(size, count, dtype=np.float32, seed=0):
    return [
        np.random.default_rng([seed, rank]).standard_normal(count).astype(dtype)
        for rank in range(size)
    ]


def test_b28_chunk_table():
    """64-bit offsets, rising, lengths that sum to n and differ by one at most."""
    n = 2**31 + 5
    for chunks in (2, 3, 7, 1024):
        lengths = np.diff(chunk_bounds(n, chunks))
        assert lengths.sum() == n
        assert lengths.max() - lengths.min() <= 1
    assert tuple(np.diff(chunk_bounds(n, 2))) == (1073741827, 1073741826)
    assert chunk_bounds(2, 4) == (0, 1, 2, 2, 2)
    for count, size in ((2, 4), (11, 3), (n, 7)):
        bounds = chunk_bounds(count, size)
        parts = [own_part(count, rank, size) for rank in range(size)]
        assert parts == [slice(*bounds[rank : rank + 2]) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exact_integers(algorithm, size):
    """A wrong bit of the sum of powers of two shows which rank was lost or counted twice."""
    for count in (0, 1, 2, size - 1, size, size + 1, 2 * size + 1, 257, 1000):
        inputs = [np.full(count, 2.0**rank) for rank in range(size)]
        outs, *_ = collective("allreduce", algorithm, inputs, EXACT, length=100)
        for out in outs:
            np.testing.assert_array_equal(out, 2.0**size - 1)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_reduce_scatter_and_allgather(algorithm, size):
    for count in (1, size, 3 * size + 2, 700):
        inputs = [np.arange(count) + 1000.0 * rank for rank in range(size)]
        outs, *_ = collective("reduce_scatter", algorithm, inputs, EXACT, length=64)
        total = np.sum(inputs, axis=0)
        bounds = chunk_bounds(count, size)
        for rank, out in enumerate(outs):
            part = slice(bounds[rank], bounds[rank + 1])
            if part.start < part.stop:
                np.testing.assert_array_equal(out[part], total[part])
        outs, *_ = collective("allgather", algorithm, inputs, EXACT, length=64)
        for out in outs:
            np.testing.assert_array_equal(out, np.concatenate(inputs))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "allgather"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_of_many_lengths(algorithm, kind, size):
    """Integers of any width, summed without loss; what is sent is what they need."""
    rng = np.random.default_rng(size)
    for count in (1, size + 1, 1000, 5003):
        widths = np.repeat(2 ** rng.integers(0, 25, count), 300)[:count]
        inputs = [(rng.integers(-1, 2, count) * widths).astype(np.int32) for _ in range(size)]
        plain = np.concatenate(inputs) if kind == "allgather" else np.sum(inputs, axis=0)
        for transports in (Loopback, LazyLoopback):
            outs, stats, programs = collective(
                kind, algorithm, [x.copy() for x in inputs], INTEGERS, 512, transports=transports
            )
            bounds = chunk_bounds(count, size)
            for rank, out in enumerate(outs):
                whole = kind != "reduce_scatter"
                part = slice(None) if whole else slice(bounds[rank], bounds[rank + 1])
                np.testing.assert_array_equal(out[part], plain[part])
            assert all(s.wire_bytes <= p.wire_nbytes for s, p in zip(stats, programs, strict=True))
    assert sum(s.wire_bytes for s in stats) < 0.95 * sum(p.wire_nbytes for p in programs)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_identical_and_segments_change_no_bit(algorithm, name):
    codec = by_name(name)
    for size in SIZES[1:]:
        inputs = data(size, 5003)
        first = None
        for length in (512, 1000, 1 << 20):
            outs, *_ = collective("allreduce", algorithm, inputs, codec, length)
            for out in outs:
                np.testing.assert_array_equal(out, outs[0])
            first = outs[0] if first is None else first
            np.testing.assert_array_equal(outs[0], first)
        outs, *_ = collective(
            "allreduce", algorithm, [x.copy() for x in inputs], codec, in_place=True
        )
        np.testing.assert_array_equal(outs[0], first)


@pytest.mark.parametrize("bits", [3, 4, 8, 12])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_error_bound(algorithm, bits):
    codec = UniformCodec(bits=bits, block=64)
    levels = 2 ** (bits - 1) - 1
    for size in SIZES[1:]:
        inputs = data(size, 1003)
        outs, *_ = collective("allreduce", algorithm, inputs, codec)
        largest = np.max(np.abs(inputs))
        bound = largest * size * (size + 1) / (4 * levels)
        exact = np.sum(inputs, axis=0, dtype=np.float64)
        assert np.max(np.abs(outs[0] - exact)) <= bound * (1 + 1e-5)


LOSSY = {name: by_name(name) for name in CODECS[1:]} | {
    "stochastic": UniformCodec(bits=4, rounding="stochastic"),
    "small blocks": UniformCodec(bits=4, block=24),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_telescoping_identity(algorithm, name, dtype):
    """Sum of outputs + sum of residuals = sum of all inputs: no hop's error may be dropped."""
    for size in (2, 3, 4, 7, 8):
        count = 1100
        residuals = [np.zeros(count, dtype) for _ in range(size)]
        outputs = np.zeros(count, np.float64)
        total = np.zeros(count, np.float64)
        for step in range(50 if size in (3, 4) else 10):
            inputs = data(size, count, dtype, seed=step)
            rests = [x + r for x, r in zip(inputs, residuals, strict=True)]
            outs, *_ = collective(
                "allreduce", algorithm, inputs, LOSSY[name], rests=rests, seed=step
            )
            residuals = rests
            outputs += outs[0]
            total += np.sum(inputs, axis=0, dtype=np.float64)
        error = np.linalg.norm(outputs + np.sum(residuals, axis=0, dtype=np.float64) - total)
        assert error <= (1e-4 if dtype == np.float32 else 1e-9) * np.linalg.norm(total)
        assert any(np.any(r) for r in residuals)


def residual_norms(name, algorithm, steps=1000, size=16, count=1024):
    """Root mean square of the residuals of all ranks after each step, on normal data."""
    rng = np.random.default_rng(0)
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    norms = []
    for step in range(steps):
        inputs = [rng.standard_normal(count).astype(np.float32) for _ in range(size)]
        residuals = [x + r for x, r in zip(inputs, residuals, strict=True)]
        collective("allreduce", algorithm, inputs, by_name(name), rests=residuals, seed=step)
        norms.append(float(np.sqrt(np.mean(np.square(residuals)))))
    return norms


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["q1", "q2", "ternary"])
def test_residual_stays_bounded(name, algorithm):
    """Over 1,000 steps the residual of the low-bit codecs does not grow."""
    norms = residual_norms(name, algorithm, size=5)
    assert np.mean(norms[-100:]) < 1.2 * np.mean(norms[300:400])
    assert np.mean(norms[-100:]) < 5.0


def test_stochastic_rounding_repeats_with_the_seed_only():
    inputs = data(4, 3000)
    codec = UniformCodec(bits=3, rounding="stochastic")
    a, b, c = (collective("allreduce", "ring", inputs, codec, seed=s)[0][0] for s in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)
    other = UniformCodec(bits=3, rounding="stochastic", seed=9)
    d = collective("allreduce", "ring", inputs, other, seed=1)[0][0]
    assert not np.array_equal(a, d)


def test_wire_bytes_of_one_mebi_values():
    """Raw over wire at 1 Mi values, scales included (headers are 64 bytes a call)."""
    for name, least in (("q8", 3.9), ("q4", 7.7), ("q2", 15.0), ("q1", 29.0)):
        for algorithm in ALGORITHMS:
            program = compile_program(
                "allreduce", algorithm, 0, 4, 1 << 20, by_name(name), np.dtype("f4"), 511 * 512
            )
            assert program.raw_nbytes / (program.wire_nbytes + 64) >= least


@pytest.mark.parametrize("name", ["exact", "bf16", "q4"])
@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        *(("allreduce", in_place) for in_place in (False, True)),
        *(("reduce_scatter", in_place) for in_place in (False, True)),
        ("allgather", False),  # its input is a part of its output anyway
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_stay_until_they_are_fetched(algorithm, kind, name, in_place):
    """No buffer is used again before its send has ended, and all come back to the pool."""
    for size in (2, 3, 5, 8):
        for count in (7, 9001):
            inputs = data(size, count)
            expected, _, _ = collective(kind, algorithm, inputs, by_name(name))
            copies = [x.copy() for x in inputs]
            options = {"in_place": in_place, "transports": LazyLoopback}
            got, _, programs = collective(kind, algorithm, copies, by_name(name), **options)
            for rank in range(size):
                part = slice(None)
                if kind == "reduce_scatter":
                    part = own_part(count, rank, size)
                np.testing.assert_array_equal(got[rank][part], expected[rank][part])
            if algorithm == "ring" and not programs[0].exact:
                assert programs[0].final_sends is not None


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_and_bytes_of_the_algorithm_cards(algorithm, size):
    """Each rank sends as many messages and bytes as docs/algorithms says."""
    codec, chunk, segment = by_name("q8"), 4096, 1024
    power = 1 << (size.bit_length() - 1)
    core = power if algorithm == "halving_doubling" else size
    count = core * chunk
    w = codec.nbytes(count, np.dtype("f4")) / count  # bytes of a value, scales included
    whole, per_chunk = count * w, chunk // segment
    for rank in range(size):
        args = (algorithm, rank, size, count, codec, np.dtype("f4"), segment)
        program = compile_program("allreduce", *args)
        messages = len(program.first_sends) + sum(len(m.then) for m in program.recvs)
        paired, folded = rank < 2 * (size - core), rank < 2 * (size - core) and rank % 2
        sent = 2 * (core - 1) / core * whole
        expected = 2 * (core - 1) * per_chunk
        if algorithm == "parameter_server":
            copies = size - 1 if rank == 0 else 1
            sent, expected = copies * whole, copies * count // segment
        if folded:
            sent, expected = whole, core * per_chunk
        elif paired:
            sent, expected = sent + whole, expected + core * per_chunk
        assert program.wire_nbytes == sent
        assert messages == expected


def test_tiny_messages_travel_raw():
    """Wire bytes are never above the raw ones."""
    for count in range(1, 40):
        for name in CODECS:
            for algorithm in ALGORITHMS:
                program = compile_program(
                    "allreduce", algorithm, 0, 4, count, by_name(name), np.dtype("f4"), 512
                )
                assert program.wire_nbytes <= program.raw_nbytes


def test_fused_hops():
    """A ring stores no partial sum: all receives but the forwarded ones are fused hops."""
    program = compile_program("allreduce", "ring", 1, 4, 4096, by_name("q4"), np.dtype("f4"), 512)
    partial = [m for m in program.recvs if not m.final]
    assert partial
    assert all(m.fused or m.finalize for m in partial)


def test_sends_to_a_peer_keep_the_order_of_the_receives():
    """Both ends of every pair list the same messages in the same order."""
    for algorithm in ALGORITHMS:
        for kind in ("allreduce", "reduce_scatter", "allgather"):
            for size in SIZES:
                sent, received = defaultdict(list), defaultdict(list)
                for rank in range(size):
                    program = compile_program(
                        kind, algorithm, rank, size, 1999, by_name("q4"), np.dtype("f4"), 512
                    )
                    issued = list(program.first_sends)
                    for recv in program.recvs:
                        received[recv.peer, rank].append([(s.start, s.stop) for s in recv.segments])
                        issued += [recv.fused] if recv.fused in recv.then else []
                        issued += [m for m in recv.then if m is not recv.fused]
                    for message in issued:
                        sent[rank, message.peer].append(
                            [(s.start, s.stop) for s in message.segments]
                        )
                assert sent == received


def test_identity_is_shared():
    assert IdentityCodec() == EXACT
    assert LowBitCodec() == by_name("sign")
    assert TernaryCodec(seed=1) != TernaryCodec()
