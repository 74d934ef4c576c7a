"""An emulated cluster on one machine: hosts are network namespaces, joined by a bridge.

Each host has its own network, hostname, shared memory and IPC namespace, so that no MPI finds a
way around the wire; `tc htb` limits what it may send and receive.  Needs Linux, root and iproute2.
The bridge has a namespace of its own and no way out: nothing leaves the machine.  Where a latency
is asked for, a program of ours takes the place of the bridge (see `delay`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import delay
from system import LabError, check_capabilities, sh

PREFIX, SWITCH = "mq", "mqsw"
SUBNET = "198.18.77"
"""Of the range that RFC 2544 reserves for benchmarks."""

BUFFER_S = 0.02
"""Queue of a port, in seconds at its rate."""

PACKET_S = 1.28e-3
"""Largest packet, in seconds at its rate; 64 KiB if that is less."""


def parse_rate(text: str) -> int:
    """Bit/s of "1gbit", "200mbit", "2.5Gbit" or a plain number."""
    match = re.fullmatch(r"([\d.]+)\s*([kmg]?)(bit)?", text.lower())
    if match is None:
        raise LabError(f"rate is {text!r}, expected for example '1gbit'")
    return int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]])


def hosts() -> list[str]:
    """Names of the hosts that are up."""
    names = [line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line]
    mine = [name for name in names if re.fullmatch(PREFIX + r"\d+", name)]
    return sorted(mine, key=lambda name: int(name[len(PREFIX) :]))


def _burst(rate: int) -> int:
    """Bytes that pass at full speed after a pause: a millisecond's worth, or two large packets."""
    return max(131072 if rate >= 10**9 else 9000, rate // 8000)


def _shape(namespace: str, device: str, rate: int, verb: str) -> None:
    burst, queue = _burst(rate), max(262144, int(rate / 8 * BUFFER_S))
    place = f"dev {device}"
    lines = [
        f"class {verb} {place} parent 1: classid 1:1 htb rate {rate}bit burst {burst} "
        f"cburst {burst}",
        f"qdisc {verb} {place} parent 1:1 handle 2: bfifo limit {queue}",
    ]
    if verb == "add":
        lines.insert(0, f"qdisc add {place} root handle 1: htb default 1")
    sh("tc", "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")


def set_rate(host: str, rate: int, direction: str = "both", verb: str = "change") -> None:
    """Limit what a host sends ("egress"), receives ("ingress"), or both; also while jobs run."""
    number = int(host[len(PREFIX) :])
    if direction in ("both", "egress"):
        _shape(host, "eth0", rate, verb)
    if direction in ("both", "ingress"):
        if delay.is_up():
            delay.set_rate(number, rate)
        else:
            _shape(SWITCH, f"p{number}", rate, verb)


def up(count: int, rate: str = "1gbit", latency_s: float = 0.0) -> None:
    """Make a cluster; one that is up already is taken down first.

    A latency is one-way, between any two hosts, and comes on top of that of the kernel.
    """
    check_capabilities(latency=latency_s > 0)
    bits = parse_rate(rate)
    down()
    try:
        _allow_cubic()
        names = [f"{PREFIX}{i}" for i in range(count)]
        for host in names:
            sh("ip", "netns", "add", host)
        if latency_s:
            delay.up(names, latency_s)
        else:
            _add_bridge(names)
        for i in range(count):
            _set_up_host(i, count, bits)
    except BaseException:
        down()
        raise


def _add_bridge(names: list[str]) -> None:
    sh("ip", "netns", "add", SWITCH)
    lines = ["link add br0 type bridge", "link set br0 up", "link set lo up"]
    for i, host in enumerate(names):
        lines += [f"link add p{i} type veth peer name eth0 netns {host}"]
        lines += [f"link set p{i} master br0", f"link set p{i} up"]
    sh("ip", "-n", SWITCH, "-batch", "-", text="\n".join(lines) + "\n")


def _allow_cubic() -> None:
    """Let namespaces choose cubic: the usual one of clusters, whatever this machine's default."""
    file = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    allowed = file.read_text().split()
    if "cubic" not in allowed:
        file.write_text(" ".join([*allowed, "cubic"]))


def _set_up_host(i: int, count: int, rate: int) -> None:
    host = f"{PREFIX}{i}"
    folder = Path("/etc/netns") / host  # mounted over /etc for processes of the namespace
    folder.mkdir(parents=True, exist_ok=True)
    names = "".join(f"{SUBNET}.{j + 1} {PREFIX}{j}\n" for j in range(count))
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
    (folder / "resolv.conf").write_text("")  # no name server, no waiting for one
    neighbours = "".join(
        f"neigh replace {SUBNET}.{j + 1} lladdr {_mac(j)} dev eth0 nud permanent\n"
        for j in range(count)
        if j != i
    )
    sh(
        *("ip", "-n", host, "-batch", "-"),
        text=f"link set lo up\nlink set eth0 address {_mac(i)}\n"
        f"addr add {SUBNET}.{i + 1}/24 dev eth0\nlink set eth0 up\n{neighbours}",
    )
    settings = ("net.ipv4.tcp_congestion_control=cubic", "net.ipv6.conf.all.disable_ipv6=1")
    sh("ip", "netns", "exec", host, "sysctl", "-qw", *settings)
    # The larger the packets, the less of the cores the emulation takes from the ranks; but one must
    # not fill the wire for long.  Sockets read this when they connect.
    largest = min(65536, max(4000, int(rate / 8 * PACKET_S)))
    sh("ip", "-n", host, "link", "set", "eth0", "gso_max_size", str(largest))
    set_rate(host, rate, verb="add")


def _mac(i: int) -> str:
    return f"02:77:00:00:00:{i + 1:02x}"


def down() -> None:
    """End what runs on the hosts, and remove them."""
    delay.down()
    for host in hosts():
        for pid in sh("ip", "netns", "pids", host, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        sh("ip", "netns", "del", host, check=False)
        shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)
    sh("ip", "netns", "del", SWITCH, check=False)


def sent_bytes() -> dict[str, int]:
    """Bytes that each host has sent over its wire since it is up."""
    found = {}
    for host in hosts():
        (link,) = json.loads(sh("ip", "-n", host, "-j", "-s", "link", "show", "eth0"))
        found[host] = int(link["stats64"]["tx"]["bytes"])
    return found


def status() -> list[str]:
    """A line for each host: its limits and counters."""
    lines = []
    for host, sent in sent_bytes().items():
        limits = {"egress": _limit(host, "eth0")}
        if not delay.is_up():
            limits["ingress"] = _limit(SWITCH, f"p{host[len(PREFIX) :]}")
        shown = ", ".join(f"{direction} {rate}" for direction, rate in limits.items())
        lines.append(f"{host}: {shown}, sent {sent} bytes")
    return lines


def _limit(namespace: str, device: str) -> str:
    found = re.search(r"rate (\S+)", sh("tc", "-n", namespace, "class", "show", "dev", device))
    return found[1] if found else "none"


def enter(host: str, command: list[str]) -> None:
    """Become a process on a host; does not return.

    Besides the network it gets its own hostname, IPC and /dev/shm: without them some MPIs go
    through shared memory, and some hang.
    """
    prepare = f"hostname {host}; mount -t tmpfs -o size=8g tmpfs /dev/shm; "
    argv = ["ip", "netns", "exec", host, "unshare", "--uts", "--ipc", "--mount"]
    argv += ["bash", "-c", prepare + 'cd "$0"; exec "$@"', os.getcwd(), *command]
    os.execvp("ip", argv)
