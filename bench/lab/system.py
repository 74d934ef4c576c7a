"""Commands of the system, and whether it has what the emulation needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


class LabError(RuntimeError):
    """What the emulation needs is missing or failed."""


def sh(*command: str, text: str | None = None, check: bool = True) -> str:
    """Output of a command, which gets `text` as its input; LabError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, input=text)
    if check and done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def check_capabilities(*, latency: bool = False) -> None:
    """LabError that names what is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LabError("the emulated cluster needs Linux and root")
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
    if latency:
        packages["gcc"] = "gcc"
    for tool, package in packages.items():
        if shutil.which(tool) is None:
            raise LabError(f"the emulated cluster needs the command {tool!r} (package {package})")
    if latency and not os.path.exists("/dev/net/tun"):
        raise LabError("a latency needs /dev/net/tun")
    # A namespace and a queue of the kind that limits the rate, made and thrown away.
    attempt = ["unshare", "--net", "--uts", "--ipc", "--mount"]
    attempt += ["tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb"]
    done = subprocess.run(attempt, capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"no namespaces or no tc htb on this system: {done.stderr.strip()}")


def busy_s() -> float:
    """Core-seconds that all processes and the kernel have worked since the machine started."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")
