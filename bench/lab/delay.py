"""A switch with a latency (switch.c), where the kernel has no netem: compiled, started, ended.

It runs on its own until `down`; a named pipe tells it the rates of its ports.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from system import LabError, sh

STATE = Path("/run/mpiquant-lab")
PROGRAM, CONTROL, PID = STATE / "switch", STATE / "control", STATE / "pid"
SOURCE = Path(__file__).with_name("switch.c")


def up(hosts: list[str], latency_s: float) -> None:
    """Give each host a network device and join them; they have no rate limit yet."""
    down()
    STATE.mkdir(exist_ok=True)
    sh("gcc", "-O2", "-o", str(PROGRAM), str(SOURCE))
    os.mkfifo(CONTROL)
    with open(STATE / "errors", "w") as errors:
        process = subprocess.Popen(
            [str(PROGRAM), str(round(latency_s * 1e9)), str(CONTROL), *hosts],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    PID.write_text(str(process.pid))
    assert process.stdout is not None
    with process.stdout as output:
        if output.readline() != b"ready\n":
            raise LabError(f"the switch did not start: {(STATE / 'errors').read_text().strip()}")


def is_up() -> bool:
    return PID.exists()


def set_rate(port: int, rate: int) -> None:
    """Limit what a host receives; the rate is in bit/s."""
    with CONTROL.open("w") as pipe:
        pipe.write(f"{port} {rate}\n")


def down() -> None:
    if not is_up():
        return
    pid = int(PID.read_text())
    with suppress(OSError):  # it has ended, and the number may be another process's by now
        if os.readlink(f"/proc/{pid}/exe").startswith(str(PROGRAM)):
            os.kill(pid, signal.SIGKILL)
            _wait_for(pid)
    for file in STATE.iterdir():
        file.unlink()


def _wait_for(pid: int) -> None:
    deadline = time.monotonic() + 5
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
