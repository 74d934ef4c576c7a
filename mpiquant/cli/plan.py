"""`mpiquant plan`: what a call would take on a cluster, and what to use there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpiquant.cli.bench_collectives import parse_bandwidth, parse_codec, parse_size
from mpiquant.cli.sim import parse_seconds
from mpiquant.codecs import EXACT, Codec, split_names
from mpiquant.collectives import CODED, HIERARCHICAL, canonical
from mpiquant.plan import shown
from mpiquant.planner.advise import advise
from mpiquant.planner.predict import ENGINE_RANKS, Prediction, predict
from mpiquant.planner.profile import Profile
from mpiquant.sim import WORKLOADS, workload

ERROR_MAX = 0.05
"""Relative error that is advised: 8 bits have less of it on rings of up to 64 ranks."""


def add_parser(commands: Any) -> None:
    text = "predict times on a cluster and say what to use, or measure one (--calibrate)"
    parser = commands.add_parser("plan", help=text)
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="default: those of the profile")
    add("--ranks-per-node", type=int, default=1, metavar="N", help="default 1")
    add("--bandwidth", type=parse_bandwidth, metavar="RATE", help="of a node, such as 10Gbit")
    add("--latency", type=parse_seconds, metavar="TIME", help="one-way, such as 50us (default)")
    add("--size", type=parse_size, metavar="SIZE", help="of the array, such as 100M")
    add("--model", choices=WORKLOADS, help="the size of this model's gradient instead")
    add("--codec", default="bf16,q8,q4,q2", metavar="NAMES", help="default bf16,q8,q4,q2")
    add("--algo", metavar="NAMES", help="algorithms (default: all that fit)")
    add("--error", type=float, default=ERROR_MAX, metavar="E", help=f"allowed ({ERROR_MAX})")
    add("--profile", type=Path, metavar="FILE", help="what --calibrate stored")
    add("--calibrate", action="store_true", help="measure this job's cluster; run by mpiexec")
    add("--json", type=Path, metavar="FILE", help="write the table here as well")


def run(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        from mpiquant.cli import calibrate  # needs MPI, which a prediction does not

        return calibrate.run(arguments.profile)
    profile = _profile(arguments)
    nbytes = _nbytes(arguments)
    rows = list(predictions(profile, nbytes, _codecs(arguments), _algorithms(arguments, profile)))
    advice = advise(rows, arguments.error)
    print(f"# {_described(profile)}; {nbytes} bytes of float32")
    _print(rows, advice.best)
    print(f"\nRecommendation: {advice.sentence}.")
    if arguments.json:
        arguments.json.write_text(_json(profile, nbytes, rows, advice.sentence))
    return 0


# ---- arguments ----


def _profile(arguments: argparse.Namespace) -> Profile:
    """The cluster that was described, or the one that was measured; with other ranks, if asked."""
    a = arguments
    if a.profile is None:
        if a.ranks is None or a.bandwidth is None:
            raise ValueError("name --ranks and --bandwidth, or a --profile")
        return Profile.of(a.ranks, a.bandwidth / 8, a.latency or 50e-6, a.ranks_per_node)
    if a.bandwidth is not None or a.latency is not None:
        raise ValueError("--bandwidth and --latency are those of the --profile: name one or both")
    known = Profile.load(a.profile)
    if a.ranks is None:
        return known
    return known.with_hosts([rank // a.ranks_per_node for rank in range(a.ranks)])


def _nbytes(arguments: argparse.Namespace) -> int:
    if (arguments.size is None) == (arguments.model is None):
        raise ValueError("name --size or --model")
    if arguments.model is not None:
        return 4 * workload(arguments.model).parameters
    return int(arguments.size)


def _codecs(arguments: argparse.Namespace) -> list[Codec]:
    return [parse_codec(name) for name in split_names(arguments.codec)]


def _algorithms(arguments: argparse.Namespace, profile: Profile) -> list[str]:
    if arguments.algo is not None:
        return [canonical(name) for name in arguments.algo.split(",")]
    size = profile.size
    names: list[str] = ["ring", "halving_doubling", "direct"]
    if size > ENGINE_RANKS:
        names = ["ring", *(["halving_doubling"] if size & (size - 1) == 0 else [])]
    if profile.ranks_per_node > 1:
        names = [*(names if size <= ENGINE_RANKS else []), HIERARCHICAL]
    return [*names, CODED]


# ---- the table ----


def predictions(
    profile: Profile, nbytes: int, codecs: list[Codec], algorithms: list[str]
) -> Iterator[Prediction]:
    """MPI's own, then each algorithm with each codec that it can have."""
    yield predict(profile, "native", EXACT, nbytes)
    for algorithm in algorithms:
        if algorithm == "native":
            continue
        possible = [] if algorithm == CODED else [c for c in codecs if c.lossy]
        for codec in (EXACT, *possible):
            yield predict(profile, algorithm, codec, nbytes)


def _described(profile: Profile) -> str:
    hosts = len(set(profile.hosts))
    rate = 8e-9 * profile.network.bandwidth
    latency = shown(profile.network.latency_s)
    return f"{profile.size} ranks on {hosts} nodes, {rate:.3g} Gbit/s, {latency}"


def _print(rows: list[Prediction], best: Prediction) -> None:
    native = rows[0].seconds
    print(f"  {'algorithm':18}{'codec':14}{'time':>10}{'x native':>10}{'error':>10}")
    for row in rows:
        speed = native / row.seconds if row.seconds else 1.0
        mark = "*" if row is best else " "
        error = f"{row.error:.2g}" if row.error else "0"
        time = shown(row.seconds)
        print(f"{mark} {row.algorithm:18}{row.codec.spec:14}{time:>10}{speed:>10.3g}{error:>10}")


def _json(profile: Profile, nbytes: int, rows: list[Prediction], sentence: str) -> str:
    report = {
        "ranks": profile.size,
        "hosts": len(set(profile.hosts)),
        "nbytes": nbytes,
        "rows": [
            {
                "algorithm": row.algorithm,
                "codec": row.codec.spec,
                "seconds": row.seconds,
                "error": row.error,
            }
            for row in rows
        ],
        "recommendation": sentence,
    }
    return json.dumps(report, indent=1) + "\n"
