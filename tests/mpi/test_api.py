"""The faces: trees, buffers, wrap, options, statistics, disagreement."""

import time
from contextlib import suppress

import numpy as np
import pytest
from conftest import ALGORITHMS, SCHEDULES, digests, normals, raised, together
from mpi4py import MPI

import mpiquant
from mpiquant.config import reload_environment

pytestmark = pytest.mark.mpi


def test_dicts_and_lists_are_fused_and_matched_by_name(comm):
    size, rank = comm.size, comm.rank
    names = ["w", "b", "n"] if rank % 2 else ["n", "b", "w"]
    values = {"w": np.full((3, 4), rank + 1.0), "b": np.full(5, 10.0), "n": np.arange(3)}
    out = mpiquant.allreduce({k: values[k] for k in names}, comm=comm)
    first, second = mpiquant.allreduce([np.ones(2, "f4"), np.ones((2, 2))], comm=comm)
    pair = mpiquant.allreduce((np.ones(2), np.ones(2)), comm=comm)
    with together(comm):
        assert list(out) == names
        np.testing.assert_array_equal(out["w"], np.full((3, 4), size * (size + 1) / 2))
        np.testing.assert_array_equal(out["b"], 10.0 * size)
        np.testing.assert_array_equal(out["n"], size * np.arange(3))
        assert out["n"].dtype == values["n"].dtype
        assert first.dtype == np.float32
        assert second.shape == (2, 2)
        assert isinstance(pair, tuple)


def test_policy_keeps_biases_exact(comm):
    weights, exact_w = normals(comm, 4096, seed=1)
    biases, exact_b = normals(comm, 64, seed=2)
    out, stats = mpiquant.allreduce(
        {"w": weights.reshape(64, 64), "b": biases},
        comm=comm,
        codec=lambda name, shape: "q4" if len(shape) > 1 else None,
        stats=True,
    )
    with together(comm):
        np.testing.assert_allclose(out["b"], exact_b, rtol=1e-5, atol=1e-5)
        error = np.linalg.norm(out["w"].ravel() - exact_w) / np.linalg.norm(exact_w)
        assert (0.02 < error < 0.5) == (comm.size > 1)
        assert comm.size == 1 or set(stats.codec.split("+")) == {"q4", "exact"}


def test_statistics(comm):
    x, _ = normals(comm, 1 << 18)
    _, stats = mpiquant.allreduce(x, comm=comm, codec="q8", stats="error")
    _, native = mpiquant.allreduce(x, comm=comm, stats=True)
    with together(comm):
        if comm.size == 1:
            assert stats.ratio is None
            return
        assert stats.algorithm == "ring"
        assert stats.codec == "q8"
        assert stats.reason
        assert 3.9 < stats.ratio < 4
        assert stats.wire_bytes > 0
        assert stats.messages > 0
        assert 0 < stats.error < 0.1
        assert 0 < stats.max_error < 2
        assert stats.encode_s > 0
        assert stats.decode_s > 0
        assert native.algorithm == "native"
        assert native.reason == "no codec was given"


def test_upper_case_takes_mpi4py_buffers(comm):
    size = comm.size
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for send, receive in (
        (x, np.empty_like(x)),
        ([x, MPI.FLOAT], [np.empty_like(x), MPI.FLOAT]),
        ([x, 12, MPI.FLOAT], [np.empty_like(x), 12, MPI.FLOAT]),
        (np.asfortranarray(x), np.empty_like(x, order="F")),
    ):
        mpiquant.Allreduce(send, receive, comm=comm)
        got = receive[0] if isinstance(receive, list) else receive
        with together(comm):
            np.testing.assert_array_equal(got, size * x)
    part = np.zeros(12, np.float32)
    mpiquant.Allreduce([x, 5, MPI.FLOAT], [part, 5, MPI.FLOAT], comm=comm)
    derived, top = np.zeros_like(x), np.zeros(3, np.int32)
    mpiquant.Allreduce(np.arange(3, dtype=np.int32), top, op=MPI.MAX, comm=comm)
    with together(comm):
        np.testing.assert_array_equal(part[:5], size * np.arange(5))
        np.testing.assert_array_equal(part[5:], 0)
        np.testing.assert_array_equal(top, [0, 1, 2])
    errors = raised(comm, lambda: mpiquant.Allreduce(x, np.empty(5, "f4"), comm=comm))
    strided = raised(comm, lambda: mpiquant.Allreduce(x[:, ::2], derived[:, ::2], comm=comm))
    with together(comm):
        assert all("ValueError" in e[0] and "12 elements" in e[1] for e in errors)
        assert all("ValueError" in e[0] and "contiguous" in e[1] for e in strided)


def test_wrap_is_a_drop_in(comm):
    wrapped = mpiquant.wrap(comm, codec="q8", algorithm="ring")
    x, exact = normals(comm, 5000)
    out = np.empty_like(x)
    wrapped.Allreduce(x, out)
    same = wrapped.allreduce(x)
    objects = wrapped.allreduce({"k"} and 1)
    listed = wrapped.allreduce([comm.rank])
    child = wrapped.Dup()
    try:
        with together(comm):
            assert isinstance(wrapped, MPI.Intracomm)
            assert wrapped == comm
            assert wrapped.size == comm.size
            np.testing.assert_array_equal(out, same)
            assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < 0.1
            assert comm.size == 1 or np.any(out != exact.astype(np.float32))
            assert objects == comm.size
            assert listed == list(range(comm.size))
            assert type(child) is MPI.Intracomm
    finally:
        child.Free()
    assert len(digests(comm, out)) == 1


def test_options_precedence(comm, monkeypatch):
    x, exact = normals(comm, 5000, np.float64)
    lossy = lambda **k: bool(  # noqa: E731
        np.any(np.abs(mpiquant.allreduce(x, comm=comm, **k) - exact) > 1e-9)
    )
    monkeypatch.setenv("MPIQUANT_CODEC", "q4")
    reload_environment()
    by_environment = lossy()
    with mpiquant.options(codec="exact"):
        by_context = lossy()
        by_argument = lossy(codec="q4")
    monkeypatch.setenv("MPIQUANT_MIN_SIZE", "6000")
    reload_environment()
    small = lossy()
    monkeypatch.delenv("MPIQUANT_MIN_SIZE")
    monkeypatch.setenv("MPIQUANT_SEGMENT", "many")
    reload_environment()
    errors = raised(comm, lossy)
    monkeypatch.undo()
    reload_environment()
    with together(comm):
        assert by_environment == by_argument == (comm.size > 1)
        assert not by_context
        assert not small
        assert all("ValueError" in e[0] and "MPIQUANT_SEGMENT" in e[1] for e in errors)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
@pytest.mark.parametrize("count", [3, 300_000])
def test_disagreement_is_an_error_on_every_rank(comm, algorithm, count):
    """Shape, dtype, op, codec or algorithm; known plans and new ones; the next call is right."""
    odd = comm.rank == comm.size - 1
    base = {"comm": comm, "algorithm": algorithm}
    cases = {
        "shape": lambda: mpiquant.allreduce(np.ones(count + odd, "f4"), **base),
        "dtype": lambda: mpiquant.allreduce(np.ones(count, "f8" if odd else "f4"), **base),
        "op": lambda: mpiquant.allreduce(np.ones(count), "mean" if odd else "sum", **base),
        "codec": lambda: mpiquant.allreduce(
            np.ones(300_000, "f4"), codec="q4" if odd else "q8", **base
        ),
        "name": lambda: mpiquant.allreduce(np.ones(count), name=str(odd), **base),
    }
    if algorithm == "auto":
        # Native calls are checked when their plan is new; here that of one rank must be.
        del cases["op"], cases["name"]
    for field, call in cases.items():
        errors = raised(comm, call)
        after = mpiquant.allreduce(np.ones(5), comm=comm)
        with together(comm):
            assert all(e and "ValueError" in e[0] for e in errors), errors
            assert all(field in e[1] for e in errors), errors
            np.testing.assert_array_equal(after, comm.size)


@pytest.mark.mpi(min_size=2)
def test_timeout_names_the_missing_rank(comm):
    private = comm.Dup()
    x = np.ones(5000, np.float32)
    mpiquant.allreduce(x, comm=private, codec="q8", algorithm="ring")
    error = None
    if comm.rank != 1:
        try:
            mpiquant.allreduce(x, comm=private, codec="q8", algorithm="ring", timeout=0.5, name="w")
        except TimeoutError as caught:
            error = str(caught)
    with together(comm):
        if comm.rank == 2 or (comm.size == 2 and comm.rank == 0):
            assert "rank 1" in error
            assert "'w'" in error
        if comm.rank != 1:
            assert "0.5 s" in error


def test_bad_arguments(comm):
    x = np.ones(10)
    for call, kind, text in (
        (lambda: mpiquant.allreduce(x, comm=comm, codec="q99"), "ValueError", "unknown codec"),
        (
            lambda: mpiquant.allreduce(x, comm=comm, algorithm="star"),
            "ValueError",
            "unknown algorithm",
        ),
        (lambda: mpiquant.allreduce(x, "median", comm=comm), "ValueError", "op is"),
        (lambda: mpiquant.allreduce(x, comm=comm, feedback={}), "TypeError", "feedback"),
        (lambda: mpiquant.allreduce(x, comm=comm, stats="all"), "ValueError", "stats"),
        (lambda: mpiquant.allreduce(x, comm=comm, out=np.ones(9)), "ValueError", "(9,)"),
        (lambda: mpiquant.allreduce(x, comm=comm, timeout=-1), "ValueError", "timeout"),
        (lambda: mpiquant.allreduce(np.array([True]), comm=comm), "TypeError", "bool"),
    ):
        errors = raised(comm, call)
        with together(comm):
            assert all(e and kind in e[0] and text in e[1] for e in errors), errors
    with together(comm), pytest.raises(ValueError, match="COMM_NULL"):
        mpiquant.allreduce(x, comm=MPI.COMM_NULL)


def test_communicators_come_and_go(comm):
    """Private duplicates are freed with their communicator: contexts do not run out."""
    for k in range(3000 if comm.size < 4 else 1000):
        private = comm.Split(0, comm.rank)
        if k % 100 == 0:
            out = mpiquant.allreduce(np.ones(2000, "f4"), comm=private, codec="q4")
            assert out[0] > 0
        else:
            mpiquant.allreduce(np.ones(3), comm=private)
        private.Free()


def test_reduce_scatter_and_allgather_faces(comm):
    size, rank = comm.size, comm.rank
    for algorithm in ("native", *SCHEDULES):
        x = np.arange(2 * size + 1, dtype=np.float64)
        part = mpiquant.reduce_scatter(x, comm=comm, algorithm=algorithm)
        mean = mpiquant.reduce_scatter(x, "mean", comm=comm, algorithm=algorithm)
        rows = mpiquant.allgather(np.full((2, 3), rank), comm=comm, algorithm=algorithm)
        target = np.empty((size, 4), np.float32)
        mpiquant.allgather(np.full(4, rank, np.float32), comm=comm, algorithm=algorithm, out=target)
        with together(comm):
            first = 3 * rank if rank < 1 else 2 * rank + 1
            expected = np.arange(first, first + (3 if rank < 1 else 2))
            np.testing.assert_array_equal(part, size * expected)
            np.testing.assert_array_equal(mean, expected)
            assert rows.shape == (size, 2, 3)
            np.testing.assert_array_equal(rows[:, 1, 2], np.arange(size))
            np.testing.assert_array_equal(target[:, 0], np.arange(size))
    feedback = mpiquant.ErrorFeedback()
    x, _ = normals(comm, 3000, np.float64)
    outputs = np.zeros((size, 3000))
    for _ in range(20):
        outputs += mpiquant.allgather(x, comm=comm, codec="q2", feedback=feedback, algorithm="hd")
    rest = feedback.residual("") if size > 1 else np.zeros(3000)
    with together(comm):
        np.testing.assert_allclose(outputs[rank] + rest, 20 * x, rtol=1e-9, atol=1e-9)


def test_stochastic_calls_differ_and_repeat(comm):
    codec = mpiquant.UniformCodec(bits=4, rounding="stochastic", seed=5)
    x = normals(comm, 5000)[0]
    runs = []
    for _ in range(2):
        private = comm.Dup()
        runs.append(
            [mpiquant.allreduce(x, comm=private, codec=codec, algorithm="ring") for _ in range(2)]
        )
        private.Free()
    with together(comm):
        np.testing.assert_array_equal(runs[0], runs[1])
        assert comm.size == 1 or np.any(runs[0][0] != runs[0][1])


@pytest.mark.parametrize("codec", ["q8", "q2", "ternary"])
@pytest.mark.parametrize("algorithm", SCHEDULES)
def test_reduce_scatter_feedback_telescopes(comm, algorithm, codec):
    """Parts that a rank keeps unencoded leave no residual; non-finite steps leave no trace."""
    feedback = mpiquant.ErrorFeedback()
    run = lambda x: mpiquant.reduce_scatter(  # noqa: E731
        x, comm=comm, codec=codec, algorithm=algorithm, feedback=feedback
    )
    outputs, total = 0.0, np.zeros(3001)
    for step in range(30):
        x, exact = normals(comm, 3001, np.float64, seed=step)
        outputs = outputs + run(x)
        total += exact
    broken = np.where(np.arange(3001) == 0, np.nan, 1.0) if comm.rank == 0 else np.ones(3001)
    with np.errstate(invalid="ignore"):
        run(broken)
    whole = np.concatenate(comm.allgather(outputs))
    rest = feedback.residual("") if comm.size > 1 else np.zeros(3001)
    rests = comm.allreduce(rest)
    with together(comm):
        np.testing.assert_allclose(whole + rests, total, rtol=1e-9, atol=1e-9)


def test_a_lone_rank_loses_nothing():
    """What came with a checkpoint is added once; behind that, residuals are zeros."""
    feedback = mpiquant.ErrorFeedback()
    feedback.load_state_dict({"w": np.full((3, 4), 0.5, np.float32)})
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    once, twice = (
        mpiquant.allreduce(x, comm=MPI.COMM_SELF, codec="q2", feedback=feedback, name="w")
        for _ in range(2)
    )
    np.testing.assert_array_equal(once, x + 0.5)
    np.testing.assert_array_equal(twice, x)
    rest = feedback.residual("w")
    assert (rest.shape, rest.dtype, rest.any()) == (x.shape, x.dtype, False)
    state = feedback.state_dict()["w"]
    state += 1  # a copy like any other
    assert not feedback.residual("w").any()


def test_faces_take_what_users_have(comm):
    from collections import namedtuple

    size = comm.size
    pair = namedtuple("pair", "w b")(np.ones(3), np.arange(2.0))
    out = mpiquant.allreduce(pair, comm=comm)
    target = np.empty(2)
    listed = mpiquant.allreduce([1.0, 2.0], comm=comm, out=target)
    swapped, native = np.arange(5, dtype=">f4"), np.empty(5, np.float32)
    mixed = [swapped, native.copy()] if comm.rank % 2 else [np.arange(5, dtype="<f4"), native]
    mpiquant.Allreduce(*mixed, comm=comm)
    with together(comm):
        assert type(out) is type(pair)
        np.testing.assert_array_equal(out.b, size * pair.b)
        assert listed is target
        np.testing.assert_array_equal(target, [size, 2 * size])
        np.testing.assert_array_equal(mixed[1], size * np.arange(5))
    feedback = mpiquant.ErrorFeedback()
    errors = raised(
        comm, lambda: mpiquant.allreduce(np.ones(3), MPI.MAX, comm=comm, feedback=feedback)
    )
    with together(comm):
        assert all("ValueError" in e[0] and "feedback" in e[1] for e in errors)


def test_wrapped_metrics_stay_exact(comm):
    twice = mpiquant.wrap(mpiquant.wrap(comm), codec="q2")
    loss = np.array([0.1 * (comm.rank + 1), 1e6])
    out = twice.allreduce(loss)
    with together(comm):
        np.testing.assert_allclose(out, [0.05 * comm.size * (comm.size + 1), 1e6 * comm.size])


@pytest.mark.mpi(min_size=2)
def test_a_broken_communicator_says_so(comm):
    private = comm.Dup()
    x = np.ones(3000, np.float32)
    call = lambda **k: mpiquant.allreduce(x, comm=private, algorithm="ring", **k)  # noqa: E731
    call()
    late = comm.rank == 0
    if not late:
        with pytest.raises(mpiquant.CallTimeoutError):
            call(timeout=0.3)
        with pytest.raises(mpiquant.LifecycleError, match="cannot be used any more"):
            call()
    comm.Barrier()


@pytest.mark.parametrize("op", [MPI.SUM, MPI.MAX, MPI.BAND])
def test_error_statistics_of_integers(comm, op):
    _, stats = mpiquant.allreduce(np.arange(5), op, comm=comm, stats="error")
    with together(comm):
        assert stats.error == stats.max_error == 0
        assert comm.size == 1 or stats.algorithm == "native"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_exception_in_a_call_reaches_all_ranks(comm, algorithm):
    """A policy that fails before the first message, a codec that fails in the middle."""

    def policy(name, shape):
        if comm.rank == 0:
            raise KeyError(name)
        return "q8"

    class Fragile(mpiquant.Float16Codec):
        def decode(self, wire, out):
            if comm.rank == comm.size - 1:
                raise OSError("broken")
            return super().decode(wire, out)

    x = np.ones(300_000, np.float32)
    before = raised(
        comm, lambda: mpiquant.allreduce(x, comm=comm, codec=policy, algorithm=algorithm)
    )
    during = raised(
        comm, lambda: mpiquant.allreduce(x, comm=comm, codec=Fragile(), algorithm=algorithm)
    )
    after = mpiquant.allreduce(x, comm=comm, codec="q8", algorithm=algorithm)
    with together(comm):
        assert all(e and "KeyError" in str(e) for e in before), before
        assert all(e and ("broken" in e[1]) for e in during), during
        np.testing.assert_allclose(after, comm.size, rtol=1e-6)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [1, 2, 6000])
@pytest.mark.parametrize(
    ("call", "algorithm"),
    [
        *((mpiquant.allreduce, algorithm) for algorithm in ALGORITHMS),
        *((mpiquant.reduce_scatter, algorithm) for algorithm in SCHEDULES),
        *((mpiquant.allgather, algorithm) for algorithm in SCHEDULES),
    ],
)
def test_mixed_up_known_plans(comm, algorithm, call, count):
    """Both plans were agreed on before, so only the neighbours' headers tell them apart."""
    x = np.ones(count)
    run = lambda name: call(x, comm=comm, algorithm=algorithm, name=name)  # noqa: E731
    for odd in range(min(comm.size, 3)):
        run("a"), run("b")
        errors = raised(comm, lambda odd=odd: run("a" if comm.rank == odd else "b"))
        after = mpiquant.allreduce(x, comm=comm, algorithm=algorithm)
        with together(comm):
            assert all(e and "ValueError" in e[0] and "name" in e[1] for e in errors), errors
            np.testing.assert_array_equal(after, comm.size)


def test_outputs_must_not_overlap(comm):
    a, b = np.full(2000, 1.0, np.float32), np.full(2000, 10.0, np.float32)
    whole = np.zeros(4000, np.float32)
    for x, out in (
        ({"a": a, "b": b}, {"a": b, "b": a}),
        ([a, b], [whole[:2000], whole[1999:3999]]),
    ):
        errors = raised(comm, lambda x=x, out=out: mpiquant.allreduce(x, out=out, comm=comm))
        with together(comm):
            assert all(e and "ValueError" in e[0] and "overlaps" in e[1] for e in errors)
    halves = [whole[:2000], whole[2000:]]
    result = mpiquant.allreduce([a, b], out=halves, comm=comm)
    mine = {"a": a, "b": b}
    mpiquant.allreduce(mine, out=mine, comm=comm)
    with together(comm):
        assert result[1] is halves[1]
        np.testing.assert_array_equal(whole[::1999][:3], [comm.size, comm.size, 10 * comm.size])
        assert (a[0], b[0]) == (comm.size, 10 * comm.size)


@pytest.mark.mpi(min_size=2)
def test_more_disagreements(comm):
    odd = comm.rank == comm.size - 1
    whole, x = np.arange(5, dtype=np.int32), np.ones(3000, np.float32)
    ops = raised(comm, lambda: mpiquant.allreduce(whole, MPI.LAND if odd else MPI.LOR, comm=comm))
    measured = raised(
        comm,
        lambda: mpiquant.allreduce(
            x, comm=comm, codec="q8", algorithm="ring", stats="error" if odd else True
        ),
    )
    after = mpiquant.allreduce(x, comm=comm, codec="q8", algorithm="ring")
    with together(comm):
        assert all(e and "op is" in e[1] and "land" in e[1] for e in ops), ops
        assert all(e and "stats" in e[1] for e in measured), measured
        np.testing.assert_allclose(after, comm.size, rtol=1e-6)


@pytest.mark.mpi(min_size=2)
def test_faults_of_every_kind(comm):
    """A codec that fails in a reduce-scatter, odd texts, an op that MPI refuses."""
    last = comm.rank == comm.size - 1

    class Fragile(mpiquant.Float16Codec):
        calls = 0

        def decode_add(self, wire, addend, out):
            Fragile.calls += 1
            if last and Fragile.calls == 1:
                raise OSError("broken \udc80")
            return super().decode_add(wire, addend, out)

    x = np.ones(3000, np.float32)
    run = lambda: mpiquant.reduce_scatter(  # noqa: E731
        x,
        comm=comm,
        codec=Fragile(),
        algorithm="direct",
        feedback=mpiquant.ErrorFeedback(),
        timeout=20,
    )
    errors = raised(comm, run)
    again = run()
    begin = time.monotonic()
    refused = raised(comm, lambda: mpiquant.allreduce(x, MPI.BAND, comm=comm))
    took = time.monotonic() - begin
    after = mpiquant.allreduce(x, comm=comm, codec="q8", algorithm="ring")
    with together(comm):
        assert all(e and "broken" in e[1] for e in errors), errors
        np.testing.assert_allclose(again, comm.size, rtol=1e-3)
        assert all(refused)
        assert took < 8
        np.testing.assert_allclose(after, comm.size, rtol=1e-6)


@pytest.mark.mpi(min_size=2)
def test_an_interrupted_call_gives_the_communicator_up(comm):
    class Interrupted(mpiquant.Float16Codec):
        def decode(self, wire, out):
            if comm.rank == 0:
                raise KeyboardInterrupt
            return super().decode(wire, out)

    private = comm.Dup()
    call = lambda: mpiquant.allreduce(  # noqa: E731
        np.ones(3000, "f4"), comm=private, codec=Interrupted(), algorithm="ring", timeout=1
    )
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            call()
        with pytest.raises(mpiquant.LifecycleError, match="interrupted"):
            call()
    else:
        with suppress(mpiquant.CallTimeoutError):
            call()
    comm.Barrier()


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclasses_of_arrays(comm):
    matrix = np.asmatrix(np.ones((2, 3)))
    out = np.asmatrix(np.zeros((2, 3)))
    masked = np.ma.masked_array(np.ones(64), mask=np.arange(64) % 2 == 0)
    for algorithm in ("auto", "ring"):
        mpiquant.Allreduce(matrix, out, comm=comm, algorithm=algorithm)
        again = mpiquant.allreduce(matrix, out=out, comm=comm, algorithm=algorithm)
        plain = mpiquant.allreduce(masked, comm=comm, algorithm=algorithm)
        with together(comm):
            assert again is out
            np.testing.assert_array_equal(np.asarray(out), comm.size)
            np.testing.assert_array_equal(plain, comm.size)
    errors = raised(comm, lambda: mpiquant.Allreduce([np.ones(5), -1], [np.ones(5), -1], comm=comm))
    with together(comm):
        assert all("ValueError" in e[0] and "the count is -1" in e[1] for e in errors)
        assert mpiquant.allreduce([], comm=comm) == []


def test_wrap_checks_its_arguments(comm):
    class Mine(MPI.Intracomm):
        def hello(self):
            return "hello"

    mixed = mpiquant.wrap(mpiquant.wrap(comm, codec="q8"), algorithm="ring")
    truth = mixed.allreduce(np.array([comm.rank == 0]))
    with together(comm):
        assert mpiquant.wrap(Mine(comm)).hello() == "hello"
        assert mixed.mpiquant_preset.changes == {"codec": "q8", "algorithm": "ring"}
        assert truth.all()
        for bad, text in (
            ({"codec": "nonsense"}, "unknown codec"),
            ({"algorithm": "star"}, "unknown algorithm"),
            ({"timeout": -1}, "timeout is -1"),
        ):
            with pytest.raises(ValueError, match=text):
                mpiquant.wrap(comm, **bad)
        with pytest.raises(ValueError, match="COMM_NULL"):
            mpiquant.wrap(MPI.COMM_NULL)


def test_small_native_calls_in_a_loop(comm):
    """They take a short cut, which must know what it may not do."""
    total, size = comm.size * (comm.size + 1) / 2, comm.size
    mine = float(comm.rank + 1)
    for _ in range(3):
        x, out = np.full((2, 3), mine), np.zeros((2, 3))
        mpiquant.Allreduce(x, out, comm=comm)
        mean = mpiquant.allreduce(x, "mean", comm=comm)
        largest = mpiquant.allreduce(x, MPI.MAX, comm=comm)
        place, halves = x.copy(), np.full(12, mine)
        mpiquant.Allreduce(place, place, comm=comm)
        mpiquant.Allreduce(halves[:6], halves[6:], comm=comm)
        again = halves[:6]
        mpiquant.Allreduce(again, halves[:6], comm=comm)
        swapped = np.full((3, 2), mine, order="F").T
        turned = mpiquant.allreduce(swapped, comm=comm)
        frozen = np.zeros((2, 3))
        frozen.flags.writeable = False
        refused = raised(comm, lambda x=x, out=frozen: mpiquant.Allreduce(x, out, comm=comm))
        overlap = raised(comm, lambda h=halves: mpiquant.Allreduce(h[:6], h[3:9], comm=comm))
        big_endian = mpiquant.allreduce(x.astype(">f8"), comm=comm)
        with together(comm):
            for result in (out, place, halves, again, turned, big_endian):
                np.testing.assert_array_equal(result, total)
            np.testing.assert_allclose(mean, total / size)
            np.testing.assert_array_equal(largest, size)
            np.testing.assert_array_equal(x, mine)
            assert turned.shape == swapped.shape
            assert all(e and "read-only" in e[1] for e in refused)
            assert all(e and "overlaps" in e[1] for e in overlap)


def test_broadcast_is_for_allreduce(comm):
    for call in (mpiquant.reduce_scatter, mpiquant.allgather):
        errors = raised(comm, lambda call=call: call(np.ones(100), algorithm="broadcast"))
        with together(comm):
            assert comm.size == 1 or all("no algorithm 'broadcast'" in text for _, text in errors)
