"""Nonblocking calls: requests, their order, their buffers, their errors."""

import gc
import math
import random
import threading
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ALGORITHMS, digests, normals, raised, together
from mpi4py import MPI

import mpiquant
from mpiquant import Request, _comm
from mpiquant._comm import TURN_S, Channel
from mpiquant.progress import CROWDED_FOR_S, CROWDED_NAP_S, Core, engine

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["manual", "thread"])
def progress(request):
    """Both ways in which calls move on."""
    with mpiquant.options(progress=request.param):
        yield request.param
    engine.stop_thread()


@pytest.mark.parametrize("codec", [None, "q8", "q1"])
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_same_bits_as_the_blocking_call(comm, algorithm, codec, progress):
    """Sums of a fresh communicator's first call, so that no random number differs either."""
    for count in (1, 5000, 300_000):
        x, _ = normals(comm, count, seed=count)
        outs = []
        for function in (mpiquant.allreduce, mpiquant.iallreduce):
            private = comm.Dup()
            result = function(x, comm=private, codec=codec, algorithm=algorithm)
            outs.append(result.wait() if isinstance(result, Request) else result)
            private.Free()
        same = digests(comm, outs[1])
        with together(comm):
            if algorithm != "auto" or codec:
                np.testing.assert_array_equal(outs[0], outs[1])
                assert len(same) == 1
            else:
                np.testing.assert_allclose(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def test_a_hundred_in_flight_waited_in_any_order(comm, progress):
    private = comm.Dup()
    requests = [
        mpiquant.iallreduce(
            np.full(1 + 997 * (k % 40), float(k + comm.rank)),
            comm=private,
            codec=(None, "q8", "q4")[k % 3],
            algorithm=("auto", *ALGORITHMS)[k % 4],
        )
        for k in range(100)
    ]
    order = list(range(100))
    random.Random(comm.rank).shuffle(order)
    results = {k: requests[k].wait() for k in order}
    with together(comm):
        for k, out in results.items():
            assert out.size == 1 + 997 * (k % 40)
            np.testing.assert_allclose(
                out, comm.size * k + comm.size * (comm.size - 1) / 2, rtol=1e-6, atol=1e-6
            )
    private.Free()


def test_waits_and_tests(comm, progress):
    start = lambda k: mpiquant.iallreduce(np.full(2000, float(k)), comm=comm, codec="q8")  # noqa: E731
    flags = []
    request = start(1)
    while True:
        flag, out = request.test()
        flags.append(flag)
        if flag:
            break
    several = [start(k) for k in range(5)]
    Request.Waitall(several)
    tested = [start(k) for k in range(3)]
    while not Request.Testall(tested):
        pass
    anys = [start(k) for k in range(4)]
    seen = {Request.Waitany(anys) for _ in range(4)}
    none_left = Request.Waitany(anys)
    results = Request.waitall([start(k) for k in range(3)])
    with together(comm):
        np.testing.assert_allclose(out, comm.size, rtol=1e-6)
        assert out is request.wait() is request.wait()
        assert request.Test()
        assert request.Wait()
        assert all(flag is False for flag in flags[:-1])
        assert [float(r.wait()[0]) for r in several] == pytest.approx(
            [k * comm.size for k in range(5)]
        )
        assert seen == {0, 1, 2, 3}
        assert none_left == MPI.UNDEFINED
        assert [float(r[0]) for r in results] == pytest.approx([k * comm.size for k in range(3)])


def test_ours_and_mpis_requests_together(comm, progress):
    mine = mpiquant.iallreduce(np.ones(300_000, np.float32), comm=comm, codec="q4")
    out = np.zeros(3)
    theirs = comm.Iallreduce(np.ones(3), out)
    Request.Waitall([mine, theirs])
    with together(comm):
        np.testing.assert_allclose(mine.wait(), comm.size, rtol=1e-6)
        np.testing.assert_array_equal(out, comm.size)


def test_as_mpi_completes_with_the_call(comm):
    mine = mpiquant.iallreduce(np.ones(10), comm=comm)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI's thread level 'multiple'")
    with pytest.raises(mpiquant.LifecycleError, match="progress='thread'"):
        mine.as_mpi()
    mine.wait()
    with mpiquant.options(progress="thread"):
        mine = mpiquant.iallreduce(np.ones(400_000, np.float32), comm=comm, codec="q4")
        mine.as_mpi().Wait()
        engine.stop_thread()
    with together(comm):
        np.testing.assert_allclose(mine.wait(), comm.size, rtol=1e-6)


def test_upper_case_and_wrapped(comm, progress):
    x = np.full(5000, float(comm.rank), np.float32)
    out = np.empty_like(x)
    mpiquant.Iallreduce([x, MPI.FLOAT], out, comm=comm, codec="q8").Wait()
    place = x.copy()
    mpiquant.Iallreduce(MPI.IN_PLACE, place, comm=comm).Wait()
    wrapped = mpiquant.wrap(comm, codec="q4")
    third = np.empty_like(x)
    wrapped.Iallreduce(x, third).Wait()
    pairs = np.zeros(2, "f4,i4")
    mpiquant.Iallreduce(
        [np.zeros(2, "f4,i4"), 2, MPI.FLOAT_INT], [pairs, 2, MPI.FLOAT_INT], MPI.MAXLOC, comm=comm
    ).Wait()
    expected = comm.size * (comm.size - 1) / 2
    with together(comm):
        for result in (out, place, third):
            np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_dicts_with_feedback_and_statistics(comm, progress):
    feedback = mpiquant.ErrorFeedback()
    total, outputs = np.zeros(4000), np.zeros(4000)
    for step in range(10):
        x, _ = normals(comm, 4000, np.float64, step)
        request = mpiquant.iallreduce(
            {"a": x, "b": np.ones(3)},
            comm=comm,
            codec="q2",
            feedback=feedback,
            stats=True,
        )
        result, stats = request.wait()
        outputs += result["a"]
        total += x
    rest = feedback.residual("a")
    found, true = comm.allreduce(0 if rest is None else rest), comm.allreduce(total)
    with together(comm):
        np.testing.assert_allclose(outputs + found, true, atol=1e-9)
        assert stats.messages > 0 or comm.size == 1


def test_b21_buffers_live_until_the_end(comm, progress):
    for count in (10, 1 << 20):
        request = mpiquant.iallreduce(np.full(count, float(comm.rank)), comm=comm, codec="q8")
        gc.collect()
        junk = [np.full(count, -7.0) for _ in range(10)]
        out = request.wait()
        with together(comm):
            np.testing.assert_allclose(out, comm.size * (comm.size - 1) / 2, rtol=1e-6)
            assert request.wait() is out
        del junk


def test_b21_input_is_read_only_meanwhile(comm):
    x = np.ones(100_000, np.float32)
    start = lambda: mpiquant.iallreduce(x, comm=comm, codec="q8", algorithm="ring")  # noqa: E731
    late = comm.rank == comm.size - 1
    if not late:  # nothing can end before the last rank has come
        first, second = start(), start()
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 5
    comm.Barrier()
    if late:
        first, second = start(), start()
    second.wait()
    first.wait()
    x[0] = 5  # as before
    place = np.ones(5000, np.float32)
    mpiquant.Iallreduce(MPI.IN_PLACE, place, comm=comm, codec="q8").Wait()
    with together(comm):
        np.testing.assert_allclose(first.wait(), comm.size, rtol=1e-6)
        np.testing.assert_allclose(place, comm.size, rtol=1e-6)


def test_b21_a_dropped_request_warns_and_harms_nobody(comm, progress):
    private = comm.Dup()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpiquant.iallreduce(np.ones(50_000), comm=private, codec="q8", name="lost")
        gc.collect()
    after = mpiquant.allreduce(np.ones(3), comm=private)
    with together(comm):
        assert [w for w in caught if w.category is ResourceWarning and "lost" in str(w.message)]
        np.testing.assert_array_equal(after, comm.size)


def test_b22_a_late_wait_and_manual_progress(comm):
    x = np.full(1 << 20, float(comm.rank), np.float32)
    request = mpiquant.iallreduce(x, comm=comm, codec="q8", algorithm="ring")
    if comm.rank == 1 % comm.size:
        time.sleep(1)
    out = request.wait()
    moving = mpiquant.iallreduce(x, comm=comm, codec="q8", algorithm="ring")
    deadline = time.monotonic() + 60
    while not moving.Test() and time.monotonic() < deadline:
        time.sleep(1e-4)
    with together(comm):
        np.testing.assert_allclose(out, comm.size * (comm.size - 1) / 2, rtol=1e-6)
        np.testing.assert_array_equal(moving.wait(), out)


def test_b22_more_ranks_than_cores(comm):
    begin = time.monotonic()
    for _ in range(200):
        out = mpiquant.allreduce(np.ones(10, np.float32), comm=comm, algorithm="ring")
    took = time.monotonic() - begin
    with together(comm):
        np.testing.assert_array_equal(out, comm.size)
        assert took < 30


def test_b23_calls_native_calls_and_messages_at_once(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    first = mpiquant.iallreduce(np.ones(50_000), comm=comm, codec="q8")
    native = np.zeros(4)
    comm.Allreduce(np.full(4, 10.0), native)
    got = np.zeros(10, np.int64)
    messages = [comm.Irecv(got[tag : tag + 1], left, tag) for tag in range(10)]
    values = np.arange(10) + 100 * comm.rank
    messages += [comm.Isend(values[tag : tag + 1], right, tag) for tag in range(10)]
    second = mpiquant.iallreduce(np.full(50_000, 100.0), comm=comm, codec="q8")
    hundreds, ones = second.wait(), first.wait()
    MPI.Request.Waitall(messages)
    with together(comm):
        np.testing.assert_allclose(ones, comm.size, rtol=1e-6)
        np.testing.assert_allclose(hundreds, 100 * comm.size, rtol=1e-6)
        np.testing.assert_array_equal(native, 10 * comm.size)
        np.testing.assert_array_equal(got, np.arange(10) + 100 * left)


def test_waits_in_different_communicators_serve_each_other(comm):
    """Rank 0 waits for one, the others first for another: all of them must move on."""
    one, two = comm.Dup(), comm.Dup()
    x = np.ones(300_000, np.float32)
    a = mpiquant.iallreduce(x, comm=one, codec="q8", algorithm="ring")
    b = mpiquant.iallreduce(x, comm=two, codec="q8", algorithm="ring")
    first, second = (a, b) if comm.rank == 0 else (b, a)
    outs = [first.wait(), second.wait()]
    with together(comm):
        for out in outs:
            np.testing.assert_allclose(out, comm.size, rtol=1e-6)
    one.Free()
    two.Free()


def test_b32_options_hold_for_the_next_call(comm):
    x, exact = normals(comm, 30_000, np.float64)
    with mpiquant.options(codec="q16"):
        request = mpiquant.iallreduce(x, comm=comm, stats=True)
        with mpiquant.options(codec="q1", algorithm="direct", segment=640):
            fine, stats = request.wait()
            coarse = mpiquant.allreduce(x, comm=comm)
    with together(comm):
        if comm.size > 1:
            assert stats.codec.startswith("q16")
            assert np.abs(fine - exact).max() < 1e-2 * comm.size
            assert np.abs(coarse - exact).max() > 0.1


@pytest.mark.mpi(min_size=2)
def test_an_error_comes_with_the_wait_and_only_there(comm):
    """A call that disagrees between two that agree, all in flight at once."""
    private = comm.Dup()
    count = 5000 + (comm.rank == 1)
    requests = [
        mpiquant.iallreduce(np.ones(5000), comm=private, codec="q8"),
        mpiquant.iallreduce(np.ones(count), comm=private, codec="q8", name="odd"),
        mpiquant.iallreduce(np.full(5000, 2.0), comm=private, codec="q8"),
    ]
    errors = [raised(comm, requests[k].wait) for k in (2, 1, 0)]
    again = raised(comm, requests[1].Test)
    after = mpiquant.allreduce(np.ones(7), comm=private)
    with together(comm):
        assert errors[0] == errors[2] == [None] * comm.size
        for error in (*errors[1], *again):
            assert "AgreementError" in error[0]
            for part in ("5000", "5001", "'odd'"):
                assert part in error[1]
        np.testing.assert_allclose(requests[2].wait(), 2 * comm.size, rtol=1e-6)
        np.testing.assert_array_equal(after, comm.size)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("repetition", range(4))
def test_native_calls_behind_a_refused_one_are_lost_alike(comm, repetition):
    """Ranks that began them cannot end them; every rank reports the same calls.

    Each rank hears of the refusal when it has begun some of them, which is a matter of chance.
    """
    private = comm.Dup()
    mpiquant.allreduce(np.ones(5), comm=private, name="w")
    requests = []
    for k in range(4):
        op = "max" if k == 1 and comm.rank == 0 else "sum"
        requests.append(mpiquant.iallreduce(np.ones(5), op, comm=private, name="w"))
        if k == 1 and comm.rank != 0:
            time.sleep(0.05)
    errors = [raised(comm, request.wait) for request in requests]
    after = [mpiquant.allreduce(np.ones(5), comm=private, name="w") for _ in range(3)]
    with together(comm):
        assert errors[0] == [None] * comm.size
        assert all("'max'" in e[1] for e in errors[1])
        for later in errors[2:]:
            assert len({e is None for e in later}) == 1, errors
        for out in after:
            np.testing.assert_array_equal(out, comm.size)


@pytest.mark.mpi(min_size=2)
def test_b23_threads_are_refused_or_served(comm):
    """While one thread waits, another may wait too, but not start calls."""
    private = comm.Dup()
    request = mpiquant.iallreduce(np.ones(300_000, np.float32), comm=private, codec="q4")
    found = []

    def wait():
        found.append(request.wait())

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI's thread level 'multiple'")
    thread = threading.Thread(target=wait)
    thread.start()
    out = request.wait()
    thread.join(30)
    with together(comm):
        assert (found and found[0] is out) or np.array_equal(found[0], out)
        np.testing.assert_allclose(out, comm.size, rtol=1e-6)


def test_the_progress_thread_moves_calls_without_us(comm, monkeypatch):
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("needs MPI's thread level 'multiple'")
    with mpiquant.options(progress="thread"):
        request = mpiquant.iallreduce(
            np.ones(300_000, np.float32), comm=comm, codec="q8", algorithm="ring"
        )
        deadline = time.monotonic() + 20
        while not request._done and time.monotonic() < deadline:
            time.sleep(0.005)
    done = request._done
    looks = []
    monkeypatch.setattr(engine, "advance", lambda: looks.append("one"))
    time.sleep(0.05)  # longer than any nap
    monkeypatch.undo()
    engine.stop_thread()
    with together(comm):
        assert done
        assert len(looks) <= 1  # the thread may have been on its way
        np.testing.assert_allclose(request.wait(), comm.size, rtol=1e-6)


def test_a_call_leaves_no_garbage_behind(comm):
    """What it held goes with it, and not when the collector of cycles comes by."""
    x = np.ones(200_000, np.float32)
    call = lambda: mpiquant.allreduce(x, comm=comm, codec="q8", algorithm="ring")  # noqa: E731
    call()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            call()
            mpiquant.iallreduce(x, comm=comm, codec="q8", algorithm="ring").wait()
        found = gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        call()
        gc.collect()
        arrays = [o for o in gc.garbage if isinstance(o, np.ndarray)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    with together(comm):
        assert not arrays
        assert found < 50


class _Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


class _Working:
    """A call that is busy for a while in each step."""

    def __init__(self, name, deadline, takes_s, clock, log):
        self.name, self.deadline, self.takes_s = name, deadline, takes_s
        self.clock, self.log = clock, log
        self.seq, self.done, self.opened, self.alone = 0, False, True, False

    def step(self):
        self.log.append(self.name)
        self.clock.now += self.takes_s
        return True


def test_what_is_due_first_is_moved_on_first_and_in_between(comm, monkeypatch):
    clock, log = _Clock(), []
    channel = Channel(comm, comm, (tuple(range(comm.size)),))
    monkeypatch.setattr(_comm, "time", clock)
    calls = (("late", 9.0, 0), ("later", math.inf, 2 * TURN_S))
    channel.running = [_Working(*call, clock, log) for call in calls]
    channel.queue.append(_Working("soon", 1.0, 0, clock, log))
    channel.advance()
    monkeypatch.undo()
    with together(comm):
        assert log == ["soon", "soon", "late", "later", "soon"]


def test_a_wait_naps_where_others_take_its_core(monkeypatch):
    now, away_s, naps = [100.0], [0.0], []

    def turn_of_others():
        now[0] += away_s[0]

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=naps.append)
    monkeypatch.setattr("mpiquant.progress.time", clock)
    monkeypatch.setattr("os.sched_yield", turn_of_others)
    core = Core()
    core.leave(now[0])
    core.leave(now[0])
    assert not naps
    away_s[0] = 1e-3
    core.leave(now[0])
    core.leave(now[0])
    assert naps == [CROWDED_NAP_S]
    now[0] += 2 * CROWDED_FOR_S
    core.leave(now[0])
    assert len(naps) == 1
