"""Faults that hit users of other libraries; one test per case, named by its ID."""

import threading
import time

import numpy as np
import pytest
from conftest import ALGORITHMS, CODECS, SCHEDULES, digests, normals, raised, together
from mpi4py import MPI

import mpiquant
from mpiquant import UniformCodec, _call, _comm, calls

pytestmark = pytest.mark.mpi


def codec_of(bits, block=512):
    if bits < 3:
        return mpiquant.LowBitCodec(bits=bits, block=block)
    return UniformCodec(bits=bits, block=block)


def bound(size, largest, bits):
    return largest * size * (size + 1) / (4 * (2 ** (bits - 1) - 1)) * (1 + 1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("dtype", "powers"), [("f4", range(-30, 31, 3)), ("f8", range(-300, 301, 30))]
)
def test_b01_small_amplitudes_keep_their_gain(comm, algorithm, dtype, powers):
    size = comm.size
    codec = UniformCodec(bits=8, block=32)
    unit = np.linspace(-1, 1, 32)
    for power in powers:
        x = (10.0**power * unit).astype(dtype)
        out = mpiquant.allreduce(x, codec=codec, algorithm=algorithm, comm=comm)
        with together(comm):
            true = size * x.astype(np.float64)
            assert np.max(np.abs(out - true)) <= bound(size, 10.0**power, 8)
            gain = np.dot(out / 10.0**power, true / 10.0**power)
            gain /= np.dot(true / 10.0**power, true / 10.0**power)
            assert 0.99 <= gain <= 1.01
    x = normals(comm, 4000, dtype)[0]
    base = mpiquant.allreduce(x, codec="q8", algorithm=algorithm, comm=comm)
    for power in (-60, -3, 1, 50):
        scaled = np.ldexp(x, power)
        out = mpiquant.allreduce(scaled, codec="q8", algorithm=algorithm, comm=comm)
        with together(comm):
            np.testing.assert_array_equal(out, np.ldexp(base, power))


def test_b02_range_of_the_users_dtype(comm):
    size = comm.size
    x = np.ones(64, np.float32)
    if comm.rank == 0:
        x[0] = 1e30
    out = mpiquant.allreduce(x, codec=UniformCodec(bits=8, block=32), comm=comm)
    half = mpiquant.allreduce(np.array([40000.0], np.float16), op="mean", comm=comm)
    tiny = mpiquant.allreduce(np.array([5.96e-8], np.float16), op="mean", comm=comm)
    total = mpiquant.allreduce(np.array([40000.0], np.float16), comm=comm)
    with together(comm):
        assert np.all(np.isfinite(out))
        assert abs(out[0] - 1e30) <= bound(size, 1e30, 8)
        np.testing.assert_allclose(out[32:], size, rtol=1e-6)
        assert half.dtype == np.float16
        assert half[0] == 40000.0
        assert tiny[0] == np.float16(5.96e-8) > 0
        assert total[0] == (40000.0 if size == 1 else np.inf)


def test_b03_codes_are_never_summed_in_their_own_width(comm):
    size = comm.size
    for algorithm in ALGORITHMS:
        out = mpiquant.allreduce(np.ones(256, "f4"), codec="q8", algorithm=algorithm, comm=comm)
        with together(comm):
            np.testing.assert_allclose(out, size, rtol=1e-6)
    x = np.array([100 + 20 * (comm.rank % 2)], np.int8)
    out, native = mpiquant.allreduce(x, codec="q8", comm=comm), np.empty_like(x)
    comm.Allreduce(x, native)
    with together(comm):
        np.testing.assert_array_equal(out, native)
        assert size != 2 or out[0] == -36


@pytest.mark.parametrize("algorithm", ["auto", "native", *ALGORITHMS])
def test_b07_every_length(comm, algorithm):
    size, rank = comm.size, comm.rank
    for count in sorted({0, 1, 2, size - 1, size, size + 1, 2 * size + 1, 255, 256, 257, 1023}):
        x = np.arange(count) + float(rank)
        out = np.full(count, np.nan)
        assert mpiquant.allreduce(x, algorithm=algorithm, comm=comm, out=out) is out
        quantized = mpiquant.allreduce(
            x, codec=UniformCodec(bits=8, block=256), algorithm=algorithm, comm=comm
        )
        mean = mpiquant.allreduce(x, op="mean", codec="q4", algorithm=algorithm, comm=comm)
        with together(comm):
            exact = size * np.arange(count) + size * (size - 1) / 2
            np.testing.assert_array_equal(out, exact)
            assert quantized.shape == (count,)
            assert quantized.dtype == x.dtype
            largest = count + size - 2
            assert np.all(np.abs(quantized - exact) <= bound(size, largest, 8))
            assert np.all(np.isfinite(mean))
            if size == 1:
                np.testing.assert_array_equal(quantized, x)
                np.testing.assert_array_equal(mean, x)
    zero = mpiquant.allreduce(np.array(3.0), algorithm=algorithm, comm=comm)
    scalar = mpiquant.allreduce(3.0, algorithm=algorithm, comm=comm)
    listed = mpiquant.allreduce([1, 2], algorithm=algorithm, comm=comm)
    with together(comm):
        assert isinstance(zero, np.ndarray)
        assert zero.shape == ()
        assert zero == 3.0 * size
        assert scalar == 3.0 * size
        assert isinstance(scalar, float)
        np.testing.assert_array_equal(listed, [size, 2 * size])


def test_b08_any_number_of_ranks(comm):
    for count in (1, comm.size, 1000):
        x = np.full(count, 2.0**comm.rank)
        out = mpiquant.allreduce(x, algorithm="hd", comm=comm)
        with together(comm):
            np.testing.assert_array_equal(out, 2.0**comm.size - 1)


@pytest.mark.parametrize("codec", [None, "q8"])
@pytest.mark.parametrize("algorithm", ["auto", "native", *ALGORITHMS])
def test_b09_aliasing_and_read_only(comm, algorithm, codec):
    size, rank = comm.size, comm.rank
    x = np.array([rank, 1 / rank if rank else 0.0])
    expected = [size * (size - 1) / 2, sum(1 / r for r in range(1, size))]
    buf, same = x.copy(), x.copy()
    mpiquant.Allreduce(MPI.IN_PLACE, buf, comm=comm, codec=codec, algorithm=algorithm)
    result = mpiquant.allreduce(same, out=same, comm=comm, codec=codec, algorithm=algorithm)
    with together(comm):
        assert result is same
        tolerance = 1e-6 if codec is None else 0.05 * size
        np.testing.assert_allclose(buf, expected, rtol=1e-6, atol=tolerance if codec else 0)
        np.testing.assert_array_equal(same, buf)
    big, _ = normals(comm, 5001)
    before = big.copy()
    out = mpiquant.allreduce(big, comm=comm, codec=codec, algorithm=algorithm)
    in_place = mpiquant.allreduce(before, out=before, comm=comm, codec=codec, algorithm=algorithm)
    with together(comm):
        np.testing.assert_allclose(in_place, out, rtol=1e-5, atol=1e-5)
        if codec and algorithm != "native":
            np.testing.assert_array_equal(in_place, out)
    frozen = normals(comm, 100)[0]
    frozen.flags.writeable = False
    kept = frozen.copy()
    mpiquant.allreduce(frozen, comm=comm, codec=codec, algorithm=algorithm)
    a = np.zeros(5000)
    overlap = raised(
        comm,
        lambda: mpiquant.allreduce(a[:-1], out=a[1:], comm=comm, codec=codec, algorithm=algorithm),
    )
    with together(comm):
        np.testing.assert_array_equal(frozen, kept)
        assert all(e and "ValueError" in e[0] for e in overlap)


@pytest.mark.parametrize("codec", [None, "q8"])
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_b09_read_only_out_on_one_rank_fails_on_all(comm, algorithm, codec):
    for count in (3, 300_000):
        private = comm.Dup()  # an unknown plan, so native calls agree first too
        try:
            x, out = np.ones(count, np.float32), np.full(count, -7.0, np.float32)
            out.flags.writeable = comm.rank != 0

            def call(x=x, out=out, private=private):
                mpiquant.allreduce(x, out=out, comm=private, codec=codec, algorithm=algorithm)

            begin = time.monotonic()
            errors = raised(comm, call)
            took = time.monotonic() - begin
            after = mpiquant.allreduce(x, comm=private, codec=codec, algorithm=algorithm)
            with together(comm):
                assert took < 10
                assert all(e and "ValueError" in e[0] for e in errors)
                assert all("read-only" in e[1] for e in errors)
                assert all("rank 0" in e[1] for e in errors[1:])
                np.testing.assert_array_equal(out, -7.0)
                np.testing.assert_allclose(after, comm.size, rtol=1e-6)
        finally:
            private.Free()


def test_b11_dtypes(comm):
    size = comm.size
    orders = [np.array([1, 2, 3], dtype=d) for d in (">f8", "<f8", "f8")]
    for algorithm in ("auto", *ALGORITHMS):
        for codec in (None, "q8"):
            sums = [
                mpiquant.allreduce(x, comm=comm, algorithm=algorithm, codec=codec) for x in orders
            ]
            mixed = mpiquant.allreduce(
                orders[comm.rank % 2], comm=comm, algorithm=algorithm, codec=codec
            )
            with together(comm):
                for out in (*sums, mixed):
                    assert out.dtype == np.float64
                    np.testing.assert_allclose(
                        out, size * np.array([1.0, 2, 3]), atol=0.02 * size**2 if codec else 0
                    )
    half = mpiquant.allreduce(np.array([0.1], np.float16), comm=comm)
    with together(comm):
        assert half.dtype == np.float16
        expected = np.float16(np.float32(np.float16(0.1)) * size)
        assert half[0] == expected
        assert size != 2 or half[0] == np.float16(0.19995117)
    bad = (
        np.array([object()], object),
        np.array(["text"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(1, [("a", "f4")]),
    )
    for x in bad:
        errors = raised(comm, lambda x=x: mpiquant.allreduce(x, comm=comm))
        with together(comm):
            assert all(e and "TypeError" in e[0] and str(x.dtype) in e[1] for e in errors)
    x = bad[0] if comm.rank == comm.size - 1 else np.zeros(5)
    errors = raised(comm, lambda: mpiquant.allreduce(x, comm=comm, algorithm="ring"))
    with together(comm):
        assert all(e and "TypeError" in e[0] and "object" in e[1] for e in errors)


def test_b11_bfloat16(comm):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    out = mpiquant.allreduce(np.ones(10, ml_dtypes.bfloat16), comm=comm, codec="q8")
    with together(comm):
        assert out.dtype == ml_dtypes.bfloat16
        assert np.all(out.astype(np.float32) == comm.size)


def test_b13_what_must_stay_exact(comm):
    size, rank = comm.size, comm.rank
    with mpiquant.options(codec="q4"):
        counters = mpiquant.allreduce(np.array([1000003, 1]), comm=comm)
        loss = mpiquant.allreduce(np.float32(7.36 + 0.01 * rank), comm=comm)
        mean = mpiquant.allreduce(np.array([1 + rank], np.int32), op="mean", comm=comm)
        big, reference = normals(comm, 20_000, np.float64)
        exact = mpiquant.allreduce(big, codec="exact", comm=comm)
        lossy = mpiquant.allreduce(big, comm=comm)
        top = mpiquant.allreduce(big, op=MPI.MAX, comm=comm)
        lowest = np.empty_like(big)
        comm.Allreduce(big, lowest, MPI.MAX)
    with together(comm):
        np.testing.assert_array_equal(counters, [1000003 * size, size])
        np.testing.assert_allclose(loss, 7.36 * size + 0.01 * size * (size - 1) / 2, rtol=1e-6)
        assert mean.dtype == np.float64
        assert mean[0] == (size + 1) / 2
        np.testing.assert_allclose(exact, reference, rtol=1e-12, atol=1e-12)
        assert (np.max(np.abs(lossy - reference)) > 1e-3) == (size > 1)
        np.testing.assert_array_equal(top, lowest)


def test_b14_degenerate_blocks(comm):
    size = comm.size
    for algorithm in ALGORITHMS:
        for bits in range(1, 9):

            def run(x, block=512, bits=bits, algorithm=algorithm):
                codec = codec_of(bits, block)
                return mpiquant.allreduce(x, codec=codec, algorithm=algorithm, comm=comm)

            zeros = run(np.zeros(64, np.float32))
            tenth = run(np.full(64, 0.1, np.float32))
            pairs = run(np.array([9, 9, -9, -9], np.float32), 2)
            one = run(np.array([0.3], np.float32))
            with together(comm):
                np.testing.assert_array_equal(zeros, 0.0)
                np.testing.assert_allclose(tenth, np.float32(0.1) * size, rtol=1e-6)
                np.testing.assert_allclose(pairs, np.array([9, 9, -9, -9.0]) * size, rtol=1e-6)
                np.testing.assert_allclose(one, np.float32(0.3) * size, rtol=1e-6)


def test_b14_sign_with_feedback_moves_no_zero(comm):
    gradient = np.array([0.3, 1, 0, -0.2], np.float32)
    codec = mpiquant.LowBitCodec(bits=1)
    wire, sent = np.empty(codec.nbytes(4, gradient.dtype), np.uint8), np.empty_like(gradient)
    codec.encode(gradient, wire)
    codec.decode(wire, sent)
    assert sent[2] == np.float32(0.375)
    rest, total = np.zeros_like(gradient), np.zeros(4)
    for _ in range(1000):
        rest += gradient
        codec.encode(rest, wire, residual=rest)
        codec.decode(wire, sent)
        total += sent
    assert np.max(np.abs(total / 1000 - gradient)) <= 2e-3


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("codec", ["exact", "bf16", "q8", "q4", "q2", "q1", "ternary"])
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_b15_overflow_leaves_no_trace(comm, algorithm, codec, bad):
    def steps(feedback, gradients):
        return [
            mpiquant.allreduce(
                g, comm=comm, codec=codec, algorithm=algorithm, feedback=feedback, name="g"
            )
            for g in gradients
        ]

    for count in (4, 3000):
        warm = normals(comm, count, seed=1)[0]
        broken = np.ones(count, np.float32)
        if comm.rank == 0:
            broken[:4] = [bad, 1, 2, 3]
        last = normals(comm, count, seed=2)[0]
        seen, unseen = mpiquant.ErrorFeedback(), mpiquant.ErrorFeedback()
        with np.errstate(invalid="ignore"):
            steps(seen, [warm])
            before = seen.state_dict()
            visible, after = steps(seen, [broken, last])
            clean = steps(unseen, [warm, last])[-1]
        with together(comm):
            assert not np.isfinite(visible[0])
            assert all(np.all(np.isfinite(r)) for r in seen.state_dict().values())
            assert all(np.all(np.isfinite(r)) for r in before.values())
            np.testing.assert_array_equal(after, clean)


def test_b16_residuals_by_name(comm):
    feedback, other = mpiquant.ErrorFeedback(), mpiquant.ErrorFeedback()
    outputs = {"a": np.zeros(8), "b": np.zeros(8)}
    totals = {"a": np.zeros(8), "b": np.zeros(8)}
    rng = np.random.default_rng(comm.rank)
    for step in range(50):
        gradients = {name: rng.standard_normal(8) for name in outputs}
        if step >= 20:
            gradients = {name: gradients[name] for name in ("b", "a")}
        nbytes = 64 if step >= 30 else 1 << 20
        with mpiquant.options(bucket_bytes=nbytes):
            out = mpiquant.allreduce(gradients, comm=comm, codec="q2", feedback=feedback)
        mpiquant.allreduce({"a": np.ones(8)}, comm=comm, codec="q2", feedback=other)
        for name in outputs:
            outputs[name] += out[name]
            totals[name] += comm.allreduce(gradients[name])
    residuals = {name: comm.allreduce(r) for name, r in feedback.state_dict().items()}
    errors = raised(
        comm,
        lambda: mpiquant.allreduce(
            {"a": np.ones(9), "b": np.ones(8)}, comm=comm, codec="q2", feedback=feedback
        ),
    )
    saved = feedback.state_dict()
    fresh = mpiquant.ErrorFeedback()
    fresh.load_state_dict(saved)
    x = {"a": np.ones(8), "b": np.arange(8.0)}
    one = mpiquant.allreduce(x, comm=comm, codec="q2", feedback=feedback)
    two = mpiquant.allreduce(x, comm=comm, codec="q2", feedback=fresh)
    with together(comm):
        assert len(saved) == len(feedback) == (2 if comm.size > 1 else len(saved))
        if comm.size > 1:
            # With a value or two per chunk and rank, raw messages are shorter and lose nothing.
            assert any(np.any(r) for r in saved.values()) or comm.size > 4
            for name in outputs:
                np.testing.assert_allclose(
                    outputs[name] + residuals[name], totals[name], atol=1e-9, rtol=1e-9
                )
            assert all(e and "ValueError" in e[0] and "'a'" in e[1] for e in errors)
        for name in x:
            np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b16_switch_to_exact_pays_the_residual_once(comm, algorithm):
    feedback = mpiquant.ErrorFeedback()
    x, total = normals(comm, 2000, np.float64)
    run = lambda codec: mpiquant.allreduce(  # noqa: E731
        x, comm=comm, codec=codec, algorithm=algorithm, feedback=feedback, name="w"
    )
    first, second, third = run("q2"), run("exact"), run("exact")
    with together(comm):
        np.testing.assert_allclose(first + second, 2 * total, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(third, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "codec", [*CODECS, UniformCodec(bits=4, rounding="stochastic", seed=3)], ids=str
)
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_b19_identical_on_all_ranks(comm, algorithm, codec):
    for count in (1003, 70_001):
        x = normals(comm, count)[0]
        out = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm)
        scattered = mpiquant.reduce_scatter(x, comm=comm, codec=codec, algorithm=algorithm)
        rows = mpiquant.allgather(x, comm=comm, codec=codec, algorithm=algorithm)
        assert len(digests(comm, out)) == 1
        assert len(digests(comm, rows)) == 1
        parts = np.concatenate(comm.allgather(scattered))
        with together(comm):
            assert parts.shape == x.shape
    x = np.array([[1e8, 1, -1e8, 1][comm.rank % 4]], np.float32)
    out = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm)
    assert len(digests(comm, out)) == 1


def test_b19_replicas_stay_identical_over_1000_steps(comm):
    weights = np.zeros(300, np.float32)
    feedback = mpiquant.ErrorFeedback()
    rng = np.random.default_rng(comm.rank)
    for _ in range(1000):
        gradient = weights - rng.standard_normal(300).astype(np.float32)
        weights -= 0.1 * mpiquant.allreduce(
            gradient, op="mean", comm=comm, codec="q2", feedback=feedback
        )
    assert len(digests(comm, weights)) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b20_repeats_and_bucket_sizes(comm, algorithm):
    tensors = {str(n): normals(comm, n, seed=n) for n in (7, 1000, 70_001)}
    x = {name: pair[0] for name, pair in tensors.items()}
    results = {}
    for nbytes in (64 << 10, 1 << 20, 1):
        for segment in (512, 8192, 1 << 20):
            with mpiquant.options(bucket_bytes=nbytes, segment=segment):
                for _ in range(20 if segment == 8192 else 1):
                    out = mpiquant.allreduce(x, comm=comm, codec="q8", algorithm=algorithm)
                    first = results.setdefault(nbytes, out)
                    with together(comm):
                        for name in x:
                            np.testing.assert_array_equal(out[name], first[name])
    largest = comm.allreduce(max(float(np.max(np.abs(v))) for v in x.values()), MPI.MAX)
    with together(comm):
        for out in results.values():
            for name, (_, exact) in tensors.items():
                assert np.max(np.abs(out[name] - exact)) <= bound(comm.size, largest, 8)


def test_b23_our_traffic_meets_nobody_elses(comm):
    size, rank = comm.size, comm.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    inbox = [np.empty(3) for _ in range(10)]
    recvs = [comm.Irecv(b, left, tag) for tag, b in enumerate(inbox)]
    any_tag = comm.Irecv(late := np.empty(1), left, 77)
    one = mpiquant.allreduce(np.ones(5000, "f4"), comm=comm, codec="q8", algorithm="ring")
    sends = [comm.Isend(np.full(3, 100.0 * rank + tag), right, tag) for tag in range(10)]
    native = np.empty(5)
    comm.Allreduce(np.full(5, 10.0), native)
    two = mpiquant.allreduce(np.full(5000, 100.0), comm=comm, codec="q4", algorithm="direct")
    comm.Send(np.array([1.5]), right, 77) if size > 1 else any_tag.Cancel()
    MPI.Request.Waitall([*recvs, *sends])
    any_tag.Wait()
    with together(comm):
        np.testing.assert_allclose(one, size, rtol=1e-6)
        np.testing.assert_array_equal(native, 10.0 * size)
        np.testing.assert_allclose(two, 100.0 * size, rtol=1e-6)
        for tag, box in enumerate(inbox):
            np.testing.assert_array_equal(box, 100.0 * left + tag)
        assert size == 1 or late[0] == 1.5


def test_b23_tags_wrap(comm):
    private = comm.Dup()
    try:
        mpiquant.allreduce(np.ones(10), comm=private, algorithm="ring")
        channel = _comm.channel_of(private)
        channel.seq = 1000 * _comm.ROUNDS - 3
        assert _comm.DATA_TAG + _comm.PLANS * _comm.ROUNDS - 1 <= 32767
        for k in range(6):
            x = np.full(5000, float(k))
            out = mpiquant.allreduce(x, comm=private, codec="q8", algorithm=ALGORITHMS[k % 3])
            with together(comm):
                np.testing.assert_allclose(out, k * comm.size, rtol=1e-6)
    finally:
        private.Free()


def test_b23_a_second_thread_is_refused(comm):
    channel = _comm.channel_of(comm)
    caught = []

    def call():
        try:
            mpiquant.allreduce(np.ones(3), comm=comm)
        except RuntimeError as error:
            caught.append(error)

    with channel.entered():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(20)
    out = mpiquant.allreduce(np.ones(3), comm=comm)
    with together(comm):
        assert len(caught) == 1
        assert "another thread" in str(caught[0])
        np.testing.assert_array_equal(out, comm.size)


@pytest.mark.parametrize("algorithm", ["native", *SCHEDULES])
def test_b28_large_counts(comm, algorithm, monkeypatch):
    x = normals(comm, 2501)[0]
    gathered = mpiquant.allgather(x, comm=comm, algorithm=algorithm)
    plain = mpiquant.allreduce(x, comm=comm, algorithm=algorithm)
    quantized = mpiquant.allreduce(x, comm=comm, algorithm=algorithm, codec="q8")
    monkeypatch.setattr(calls, "MAX_COUNT", 256)
    with mpiquant.options(segment=256):
        pieces, stats = mpiquant.allreduce(x, comm=comm, algorithm=algorithm, stats=True)
        small = mpiquant.allreduce(x, comm=comm, algorithm=algorithm, codec="q8")
        regathered = mpiquant.allgather(x, comm=comm, algorithm=algorithm)
    with together(comm):
        if algorithm != "native":  # MPI sums short pieces in an order of its own
            np.testing.assert_array_equal(pieces, plain)
        np.testing.assert_allclose(pieces, plain, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            small, quantized, rtol=0, atol=0 if algorithm != "native" else 1e-5
        )
        np.testing.assert_array_equal(gathered, regathered)
        if comm.size == 3 and algorithm == "ring":
            assert stats.messages == 2 * 2 * 4  # chunks of 834: 256, 256, 256, 66


def test_b28_nothing_is_pickled(comm, monkeypatch):
    class Refuse:
        def dumps(self, *args, **kwargs):
            raise AssertionError("pickled")

        loads = dumps

    monkeypatch.setattr(MPI, "pickle", Refuse())
    out = mpiquant.allreduce({"a": np.ones(3000, "f4"), "b": np.ones(3)}, comm=comm, codec="q4")
    monkeypatch.undo()
    with together(comm):
        np.testing.assert_allclose(out["a"], comm.size, rtol=1e-6)


@pytest.mark.parametrize("codec", [None, "q8", "q4"])
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_b28_peak_memory(comm, algorithm, codec):
    import tracemalloc

    x = np.ones(10_000_000, np.float32)
    mpiquant.allreduce(x[:10_000], comm=comm, codec=codec, algorithm=algorithm)
    tracemalloc.start()
    out = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm)
    peak = tracemalloc.get_traced_memory()[1] + x.nbytes
    tracemalloc.stop()
    with together(comm):
        np.testing.assert_allclose(out[::1000], comm.size, rtol=1e-6)
        assert peak <= 3 * x.nbytes


@pytest.mark.parametrize("codec", [None, "q4", "q1"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_b35_no_pattern_leans_on_buffering(comm, algorithm, codec, monkeypatch):
    def issend(self, buffer, peer):
        self.sent[peer, 0] += 1
        request = self.channel.comm.Issend([buffer, buffer.nbytes, MPI.BYTE], peer, self.tag)
        self.sends.append(request)
        return request

    monkeypatch.setattr(_call.Call, "isend", issend)
    for power in (0, 3, 9, 12, 16, 20, 22 if comm.size < 5 else 21):
        x = np.full(1 << power, float(comm.rank), np.float32)
        begin = time.monotonic()
        out = mpiquant.allreduce(x, comm=comm, codec=codec, algorithm=algorithm, timeout=60)
        took = time.monotonic() - begin
        with together(comm):
            np.testing.assert_allclose(
                out, comm.size * (comm.size - 1) / 2, rtol=1e-5 if codec != "q1" else 0.5
            )
            assert took < 20
