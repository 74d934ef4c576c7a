"""The emulated cluster as a command: python bench/lab COMMAND."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import FrameType

import cluster
import launch
import replay
from system import LabError


def main(argv: list[str]) -> int:
    if argv[:1] == ["agent"]:
        return _agent(argv[1:])
    if argv[:1] == ["exec"] and len(argv) > 2:
        cluster.enter(argv[1], argv[3:] if argv[2] == "--" else argv[2:])
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # clean up as after Ctrl-C
    try:
        return int(arguments.work(arguments) or 0)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _agent(argv: list[str]) -> int:
    """What ssh would do: swallow its options, join the words and run them on the host."""
    while argv and argv[0].startswith("-"):
        if argv.pop(0) in ("-l", "-p", "-o", "-i"):
            argv.pop(0)
    cluster.enter(argv[0].split("@")[-1], ["bash", "-c", " ".join(argv[1:])])
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python bench/lab", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make hosts mq0, mq1, ...")
    up.add_argument("hosts", type=int)
    _add_wire(up)
    up.set_defaults(work=lambda a: cluster.up(a.hosts, a.rate, a.latency))
    down = commands.add_parser("down", help="remove all hosts and end what runs on them")
    down.set_defaults(work=lambda a: cluster.down())
    rate = commands.add_parser("rate", help="change the rate, also while a job runs")
    rate.add_argument("rate")
    rate.add_argument("--host", type=int, action="append", help="default: all")
    rate.add_argument("--direction", choices=("both", "egress", "ingress"), default="both")
    rate.set_defaults(work=_rate)
    trace = commands.add_parser("trace", help="change the rates as a file says, until its end")
    trace.add_argument("file", type=Path, help="lines SECONDS RATE [HOST]")
    trace.set_defaults(work=lambda a: replay.replay(replay.read(a.file), threading.Event()))
    status = commands.add_parser("status", help="limits and byte counters")
    status.set_defaults(work=lambda a: print(*cluster.status(), sep="\n"))
    _add_run(commands.add_parser("run", help="make hosts, run a command on them, remove them"))
    commands.add_parser("exec", help="HOST -- command: run a command on a host that is up")
    return parser


def _add_wire(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", default="1gbit", help="of each host (default 1gbit)")
    latency = "one-way, such as 250us (default: that of the kernel)"
    parser.add_argument("--latency", type=_seconds, default=0.0, help=latency)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--hosts", type=int, required=True)
    parser.add_argument("--ppn", type=int, default=1, help="processes on each host")
    parser.add_argument("--mpi", choices=launch.MPIS, default="mpich")
    parser.add_argument("--default", action="store_true", help="leave the MPI as it comes")
    parser.add_argument("--binaries", type=Path, help="default: .venv/<mpi>/bin")
    _add_wire(parser)
    parser.add_argument("--trace", type=Path, help="replay this trace meanwhile")
    parser.add_argument("--limit", type=float, default=120, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- command and its arguments")
    parser.set_defaults(work=_run)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([\d.]+)(us|ms|s)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time, expected such as 250us or 1ms")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def _rate(arguments: argparse.Namespace) -> None:
    chosen = None if arguments.host is None else {f"{cluster.PREFIX}{i}" for i in arguments.host}
    for host in cluster.hosts():
        if chosen is None or host in chosen:
            cluster.set_rate(host, cluster.parse_rate(arguments.rate), arguments.direction)


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    job = launch.Job(
        mpi=arguments.mpi,
        hosts=arguments.hosts,
        command=command,
        ppn=arguments.ppn,
        binaries=arguments.binaries,
        limit_s=arguments.limit,
        default=arguments.default,
    )
    changes = replay.read(arguments.trace) if arguments.trace else None
    try:
        cluster.up(arguments.hosts, arguments.rate, arguments.latency)
        with replay.replaying(changes) if changes else nullcontext():
            done = launch.run(job)
    finally:
        cluster.down()
    print(done.out, end="")
    print(done.err, end="", file=sys.stderr)
    summary = f"exit code {done.code}, {done.summary()}"
    print(f"lab: {shlex.join(command)}: {summary}", file=sys.stderr)
    return done.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
