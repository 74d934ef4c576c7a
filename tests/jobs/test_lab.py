"""The emulated cluster: its wire is as slow as asked for, and nothing is left of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "lab"))
import cluster
import delay
import launch
import replay
import system

LAB = Path(launch.__file__).parent
BIN = Path(sys.executable).parent
MPI = "openmpi" if (BIN / "ompi_info").exists() else "mpich"


def _missing():
    try:
        system.check_capabilities()
    except system.LabError as error:
        return str(error)
    return None


MISSING = _missing()
needs_cluster = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def hosts():
    """Makes hosts; removed when the test is over."""
    yield cluster.up
    cluster.down()
    assert not cluster.hosts()


SERVER = """
import socket
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    while data := peer.recv(1 << 20):
        peer.sendall(b"." * (len(data) == 1))
    peer.sendall(b"!")
"""
CLIENT = """
import socket, sys, time
peer = socket.create_connection(("mq1", 7000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(5):
    begin = time.perf_counter()
    peer.sendall(b"x"), peer.recv(1)
    trips.append(time.perf_counter() - begin)
begin = time.perf_counter()
peer.sendall(bytes(int(sys.argv[1])))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(min(trips), time.perf_counter() - begin)
"""


def on(host, script, *arguments):
    command = [sys.executable, str(LAB), "exec", host, "--", sys.executable, "-c", script]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)


def transfer(nbytes):
    """Seconds of a round trip, and of a transfer from mq0 to mq1."""
    server = on("mq1", SERVER)
    try:
        assert server.stdout.readline() == "ready\n"
        out, _ = on("mq0", CLIENT, str(nbytes)).communicate(timeout=50)
    finally:
        server.kill()
        server.communicate()
    return tuple(map(float, out.split()))


@needs_cluster
@pytest.mark.parametrize("latency_s", [0.0, 3e-3])
def test_the_wire_is_as_slow_as_asked_for(hosts, latency_s):
    nbytes = 2_000_000
    hosts(2, "20mbit", latency_s)
    trip_s, transfer_s = transfer(nbytes)
    assert trip_s >= 2 * latency_s
    assert transfer_s >= 0.95 * nbytes * 8 / 20e6  # a burst passes at once
    assert cluster.sent_bytes()["mq0"] >= nbytes
    assert "20Mbit" in cluster.status()[0]


@needs_cluster
@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
@pytest.mark.parametrize("direction", ["egress", "ingress"])
def test_each_direction_has_its_own_rate(hosts, direction, latency_s):
    hosts(2, "1gbit", latency_s)
    cluster.set_rate("mq0" if direction == "egress" else "mq1", 20_000_000, direction)
    assert transfer(2_000_000)[1] >= 0.9 * 2_000_000 * 8 / 20e6


@needs_cluster
def test_a_trace_changes_the_rate_of_a_transfer_under_way(hosts, tmp_path):
    hosts(2, "4mbit")
    trace = tmp_path / "trace"
    trace.write_text("# seconds, rate, host\n0 4mbit\n1.0 1gbit 0\n1.0 1gbit 1\n")
    with replay.replaying(replay.read(trace)):
        _, transfer_s = transfer(8_000_000)
    assert transfer_s < 14  # 16 s without the change


@pytest.mark.parametrize(
    ("text", "named"),
    [("1 fast", ":1"), ("0 1gbit\n\n0.5\n", ":3"), ("2 1gbit\n1 1gbit\n", ":2"), ("# x\n", "no")],
)
def test_a_bad_trace_names_its_line(tmp_path, text, named):
    trace = tmp_path / "trace"
    trace.write_text(text)
    with pytest.raises(system.LabError, match=named):
        replay.read(trace)


JOB = """
import numpy as np, socket
import mpiquant
from mpi4py import MPI
comm = MPI.COMM_WORLD
x = np.ones(1 << 20, np.float32)
assert mpiquant.allreduce(x)[0] == comm.size
names = comm.allgather(socket.gethostname())
shared = comm.Split_type(MPI.COMM_TYPE_SHARED).size
comm.rank == 0 and print(names, shared)
"""


@needs_cluster
@pytest.mark.parametrize(("ppn", "latency_s"), [(1, 0.0), (2, 0.0), (1, 1e-4)])
def test_a_job_uses_the_wire(hosts, ppn, latency_s):
    hosts(2, "1gbit", latency_s)
    command = ["python", "-m", "mpi4py", "-c", JOB]
    done = launch.run(launch.Job(MPI, 2, command, ppn, BIN, limit_s=40))
    assert done.code == 0, done.err
    names = [name for name in ("mq0", "mq1") for _ in range(ppn)]
    assert f"{names} {ppn}" in done.out
    assert done.busy_s > 0
    done.require(2 << 20)  # half of the sum, twice
    with pytest.raises(system.LabError, match="crossed the wire"):
        done.require(1 << 30)


@needs_cluster
def test_a_job_that_hangs_is_ended(hosts):
    hosts(2)
    command = ["python", "-c", "import time; time.sleep(100)"]
    begin = time.monotonic()
    assert launch.run(launch.Job(MPI, 2, command, 1, BIN, limit_s=2)).code == 124
    assert time.monotonic() - begin < 30


@needs_cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(number):
    command = [sys.executable, str(LAB), "run", "-n", "2", "--mpi", MPI, "--binaries", str(BIN)]
    command += ["--latency", "100us", "--", "python", "-c", "import time; time.sleep(100)"]
    process = subprocess.Popen(command, start_new_session=True)
    timer = threading.Timer(3, os.killpg, (process.pid, number))
    timer.start()
    assert process.wait(30) == 130
    assert not cluster.hosts()
    assert not delay.is_up()


@needs_cluster
def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(system.LabError, match="'ip'"):
        cluster.up(2)


def test_an_unknown_rate_or_mpi_is_refused():
    for options in (["--rate", "fast"], ["--mpi", "none"], ["--latency", "1"]):
        command = [sys.executable, str(LAB), "run", "-n", "2", *options, "--", "true"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
