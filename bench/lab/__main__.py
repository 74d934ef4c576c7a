"""The emulated cluster as a command: python bench/lab up | down | rate | status | run | exec."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import cluster
import launch


def main(argv: list[str]) -> int:
    if argv[:1] == ["agent"]:
        return _agent(argv[1:])
    if argv[:1] == ["exec"] and len(argv) > 2:
        cluster.enter(argv[1], argv[3:] if argv[2] == "--" else argv[2:])
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.work(arguments) or 0)
    except cluster.LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2


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
    up.add_argument("--rate", default="1gbit")
    up.set_defaults(work=lambda a: cluster.up(a.hosts, a.rate))
    down = commands.add_parser("down", help="remove all hosts and end what runs on them")
    down.set_defaults(work=lambda a: cluster.down())
    rate = commands.add_parser("rate", help="change the rate, also while a job runs")
    rate.add_argument("rate")
    rate.add_argument("--host", type=int, action="append", help="default: all")
    rate.add_argument("--direction", choices=("both", "egress", "ingress"), default="both")
    rate.set_defaults(work=_rate)
    status = commands.add_parser("status", help="limits and byte counters")
    status.set_defaults(work=lambda a: print(*cluster.status(), sep="\n"))
    run = commands.add_parser("run", help="make hosts, run a Python program on them, remove them")
    run.add_argument("-n", "--hosts", type=int, required=True)
    run.add_argument("--ppn", type=int, default=1, help="processes on each host")
    run.add_argument("--mpi", choices=launch.MPIS, default="mpich")
    run.add_argument("--binaries", type=Path, help="default: .venv/<mpi>/bin")
    run.add_argument("--rate", default="1gbit")
    run.add_argument("--limit", type=float, default=120, help="seconds")
    run.add_argument("command", nargs=argparse.REMAINDER, help="-- program and arguments")
    run.set_defaults(work=_run)
    commands.add_parser("exec", help="HOST -- command: run a command on a host that is up")
    return parser


def _rate(arguments: argparse.Namespace) -> None:
    chosen = None if arguments.host is None else {f"{cluster.PREFIX}{i}" for i in arguments.host}
    for host in cluster.hosts():
        if chosen is None or host in chosen:
            cluster.set_rate(host, cluster.parse_rate(arguments.rate), arguments.direction)


def _run(arguments: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parents[2]
    binaries = arguments.binaries or root / ".venv" / arguments.mpi / "bin"
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    python = [str(binaries / "python"), "-m", "mpi4py"]
    job = launch.Job(
        arguments.mpi,
        binaries,
        arguments.hosts,
        [*python, *command],
        arguments.ppn,
        arguments.limit,
    )
    cluster.up(arguments.hosts, arguments.rate)
    try:
        done = launch.run(job)
    finally:
        cluster.down()
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    print(f"lab: {shlex.join(command)}: exit code {done.returncode}", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
