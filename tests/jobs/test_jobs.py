"""Life and death of jobs: ranks that stop or leave, Ctrl-C, initialization, forks."""

import json
import os
import signal
import time


def test_b26_a_rank_that_raises_ends_the_job(start):
    begin = time.monotonic()
    job = start(
        3,
        """
        mpiquant.allreduce(x, codec="q8")
        if rank == 1:
            raise RuntimeError("lost my data")
        mpiquant.allreduce(x, codec="q8")
        """,
    )
    code, output = job.finish()
    assert code != 0
    assert "lost my data" in output
    assert time.monotonic() - begin < 20


STOPPED = """
mpiquant.allreduce(x, codec="q8", name="w", algorithm="ring")
comm.Barrier()
if rank == 1:
    say("pid", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
begin = time.monotonic()
try:
    out = mpiquant.allreduce(x, codec="q8", name="w", algorithm="ring", timeout={timeout})
    say("sum", out[0], out[-1])
except mpiquant.CallTimeoutError as error:
    say("raised after", round(time.monotonic() - begin, 1), error)
    time.sleep(3)
    comm.Abort(3)
"""


def test_b26_a_stopped_rank_is_named(start):
    job = start(3, STOPPED.format(timeout=2))
    first, second = (job.read_until("raised after") for _ in range(2))
    for line in (first, second):
        assert "rank 1" in line
        assert "missing" in line or "gave up" in line
        assert "number 1 of 'w'" in line
        assert float(line.split("raised after")[1].split()[0]) <= 4


def test_b26_a_resumed_rank_lets_the_call_end(start):
    job = start(3, STOPPED.format(timeout=None))
    pid = int(job.read_until("pid").split()[-1])
    time.sleep(3)
    os.kill(pid, signal.SIGCONT)
    code, output = job.finish()
    assert code == 0
    assert output.count("sum 6.0 6.0") == 3


def test_b26_a_rank_that_leaves_without_waiting(start):
    job = start(
        3,
        """
        mpiquant.allreduce(x, codec="q8", name="w")
        request = mpiquant.iallreduce(x, codec="q8", name="w", timeout=2, algorithm="ring")
        if rank == 1:
            sys.exit()
        try:
            say("sum", request.wait()[0])
        except mpiquant.CallTimeoutError as error:
            say("raised", error)
            time.sleep(1)
            comm.Abort(3)
        """,
    )
    _, output = job.finish()
    lines = [line for line in output.splitlines() if "raised" in line or "sum" in line]
    assert lines
    assert all("rank 1" in line for line in lines if "raised" in line)


def test_b26_ctrl_c_leaves_nothing_behind(start):
    job = start(
        3,
        """
        mpiquant.allreduce(x, codec="q8")
        say("ready")
        if rank == 1:
            time.sleep(60)
        mpiquant.allreduce(x, codec="q8")
        """,
    )
    for _ in range(3):
        job.read_until("ready")
    assert len(job.pids()) > 3
    os.kill(job.process.pid, signal.SIGINT)
    deadline = time.monotonic() + 5
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not job.pids()


def test_b21_finalize_ends_what_nobody_waited_for(start):
    begin = time.monotonic()
    job = start(
        2,
        """
        with mpiquant.options(progress=sys.argv[1] if len(sys.argv) > 1 else "manual"):
            mpiquant.iallreduce(x, codec="q8", algorithm="ring")
            request = mpiquant.iallreduce(np.ones(3_000_000, "f4"), codec="q4", algorithm="ring")
        if rank == 0:
            request.wait()
        MPI.Finalize()
        say("finalized")
        try:
            mpiquant.allreduce(x)
        except mpiquant.LifecycleError as error:
            say("error", error)
        """,
    )
    code, output = job.finish()
    assert code == 0, output
    assert output.count("finalized") == 2
    assert output.count("MPI is not running") == 2
    assert time.monotonic() - begin < 20


def test_the_progress_thread_ends_with_the_process(start):
    job = start(
        2,
        """
        with mpiquant.options(progress="thread"):
            request = mpiquant.iallreduce(x, codec="q8", algorithm="ring")
            forgotten = mpiquant.iallreduce(x, codec="q8", algorithm="ring")
        request.wait()
        say("leaving")
        """,
    )
    code, output = job.finish()
    assert code == 0, output
    assert output.count("leaving") == 2
    assert "Fatal" not in output


def test_b27_importing_does_not_start_mpi(start):
    job = start(
        1,
        """
        import os, subprocess
        def refuse(*a, **k): raise AssertionError("started something")
        os.fork = subprocess.Popen = refuse
        import mpi4py
        mpi4py.rc.initialize = False
        import mpiquant, mpiquant.api
        from mpiquant import *
        from mpi4py import MPI
        assert not MPI.Is_initialized()
        try:
            mpiquant.allreduce([1.0])
        except RuntimeError as error:
            print("refused:", error)
        MPI.Init()
        print("sum", mpiquant.allreduce([1.0]))
        MPI.Finalize()
        """,
        preamble="",
    )
    code, output = job.finish()
    assert code == 0, output
    assert "refused: MPI is not running" in output
    assert "sum [1.]" in output


def test_b27_thread_level(start):
    job = start(
        2,
        """
        import mpi4py
        mpi4py.rc.thread_level = "single"
        import numpy as np, mpiquant, threading
        from mpi4py import MPI
        level = MPI.Query_thread()
        with mpiquant.options(progress="thread"):
            try:
                out = mpiquant.iallreduce(np.ones(5000), codec="q8").wait()
            except RuntimeError as error:
                assert level < MPI.THREAD_MULTIPLE and "'multiple'" in str(error), error
                print("refused", flush=True)
            else:
                assert level == MPI.THREAD_MULTIPLE
                print("refused: not, MPI gave more than asked", flush=True)
        assert level == MPI.THREAD_MULTIPLE or threading.active_count() == 1
        out = mpiquant.iallreduce(np.ones(5000), codec="q8").wait()
        assert abs(out[0] - 2) < 1e-6
        """,
        preamble="",
    )
    code, output = job.finish()
    assert code == 0, output
    assert output.count("refused") == 2


def test_b27_a_forked_child_is_refused(start):
    job = start(
        2,
        """
        mpiquant.allreduce(x)
        comm.Barrier()
        child = os.fork()
        if child == 0:
            try:
                mpiquant.allreduce(x)
            except RuntimeError as error:
                say("child:", error)
            os._exit(0)
        os.waitpid(child, 0)
        say("sum", mpiquant.allreduce(x)[0])
        """,
    )
    code, output = job.finish()
    assert code == 0, output
    assert output.count("forked") == 2
    assert output.count("sum 3.0") == 2


def test_the_timeline_of_all_ranks(start, tmp_path, monkeypatch):
    file = tmp_path / "timeline.json"
    monkeypatch.setenv("MPIQUANT_TIMELINE", str(file))
    job = start(
        3,
        """
        with mpiquant.options(progress="thread"):
            for codec in ("q4", "q8"):
                request = mpiquant.iallreduce(x, codec=codec, name="w", algorithm="ring")
                with mpiquant.mark("backward"):
                    np.tanh(x)
                request.wait()
        mpiquant.allreduce(np.ones(3))
        """,
    )
    code, output = job.finish()
    assert code == 0, output
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    names = {e["name"] for e in events}
    assert {"backward", "encode", "hop", "decode", "native allreduce"} <= names
    bits = [e["args"]["bits"] for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert bits == [4, 8]
    for event in events:
        assert event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    opened = sorted(e["id"] for e in events if e["ph"] == "b")
    assert opened == sorted(e["id"] for e in events if e["ph"] == "e")
    assert not list(tmp_path.glob("timeline.json.*"))


def test_the_timeline_shows_buckets_and_their_bits(start, tmp_path, monkeypatch):
    file = tmp_path / "timeline.json"
    monkeypatch.setenv("MPIQUANT_TIMELINE", str(file))
    job = start(
        2,
        """
        sync = mpiquant.GradientSynchronizer({"a": x, "b": x}, bucket_bytes=1)
        for _ in range(3):
            for name in ("b", "a"):
                with mpiquant.mark(f"backward of {name}"):
                    np.tanh(x)
                sync.ready(name, x)
            sync.wait_all()
        """,
    )
    code, output = job.finish()
    assert code == 0, output
    events = json.loads(file.read_text())["traceEvents"]
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        buckets = [e for e in mine if e.get("cat") == "bucket" and e["ph"] == "b"]
        assert [e["name"] for e in buckets].count("a") == 3
        assert all(2 <= e["args"]["bits_rs"] <= 32 for e in buckets)
        assert sum(e["name"] == "backward of b" for e in mine) == 3
