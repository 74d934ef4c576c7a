"""Entry point: picks the sub-command, and ends the whole MPI job if it fails on one rank."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from mpiquant import __version__
from mpiquant.cli import (
    bench_collectives,
    bench_compare,
    bench_kernels,
    info,
    job,
    plan,
    report,
    sim,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except job.UsageError as error:
        world = job.several_ranks()
        if world is None or world.rank == 0:
            print(f"mpiquant: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # What is left in the buffer must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return job.exit_code(141)
    except (ValueError, OSError) as error:
        print(f"mpiquant: {error}", file=sys.stderr)
        return job.exit_code(2)
    except KeyboardInterrupt:
        return job.exit_code(130)
    except Exception:
        world = job.several_ranks()
        if world is None:
            raise
        job.abort(world, 1, traceback.format_exc())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mpiquant", description="Quantized allreduce on mpi4py.")
    parser.add_argument("--version", action="version", version=f"mpiquant {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info.add_parser(commands)
    report.add_parser(commands)
    plan.add_parser(commands)
    sim.add_parser(commands)
    bench = commands.add_parser("bench", help="measure on this machine")
    files: dict[str, Any] = {"nargs": 2, "type": Path, "metavar": ("A", "B")}
    bench.add_argument("--compare", help="two files of --json, side by side", **files)
    bench.set_defaults(run=lambda arguments: _compare(bench, arguments))
    benches = bench.add_subparsers(metavar="WHAT")
    bench_kernels.add_parser(benches)
    bench_collectives.add_parsers(benches)
    return parser


def _compare(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """`bench` without a sub-command."""
    if arguments.compare is None:
        parser.error("name what to measure, or --compare two results")
    return bench_compare.compare(*arguments.compare)


if __name__ == "__main__":
    sys.exit(main())
