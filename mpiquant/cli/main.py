"""Entry point: picks the sub-command."""

from __future__ import annotations

import argparse
import sys

from mpiquant import __version__
from mpiquant.cli import bench_kernels, info


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="mpiquant", description="Quantized allreduce on mpi4py.")
    parser.add_argument("--version", action="version", version=f"mpiquant {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info.add_parser(commands)
    bench = commands.add_parser("bench", help="measure on this machine")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    bench_kernels.add_parser(benches)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError) as error:
        print(f"mpiquant: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 141


if __name__ == "__main__":
    sys.exit(main())
