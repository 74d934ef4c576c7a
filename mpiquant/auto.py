"""The ways that calls with the codec "auto" may run, and the tuners that choose among them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpiquant._comm import Channel, Nodes, logger
from mpiquant.codecs import EXACT, AutoCodec
from mpiquant.collectives import HIERARCHICAL, canonical
from mpiquant.config import Options
from mpiquant.job import Job
from mpiquant.plan import MANY_RANKS, Tuner, Way
from mpiquant.planner.predict import predict
from mpiquant.planner.profile import Profile, default_file

CLASSES = 4
"""Classes of lengths for each factor of two: the lengths of one differ by 19 % at most."""


def ways_of(job: Job, codec: AutoCodec, algorithm: str, nodes: Nodes) -> list[Way]:
    """What a call may do, exactly first, then by falling bits."""
    size = sum(map(len, nodes))
    names = [algorithm]
    ways = [Way(algorithm, EXACT)]
    if algorithm == "auto":
        names = ["ring"]  # of two ranks, all schedules do the same
        if size > 2:
            names += ["halving_doubling", *(["direct"] if size <= MANY_RANKS else [])]
        if job.kind == "allreduce" and 1 < len(nodes) < size:
            names.append(HIERARCHICAL)
        ways = [Way("native", EXACT), Way("ring", EXACT)]
    raw = job.out.nbytes
    for choice in sorted(codec.choices, key=lambda choice: -choice.bits):
        if choice.nbytes(job.out.size, job.out.dtype) < raw:
            ways += [Way(name, choice) for name in names]
    return ways


def tuner_of(
    job: Job, codec: AutoCodec, options: Options, channel: Channel, *, blocking: bool
) -> Tuner:
    """The tuner of a job and of those like it; made alike on all ranks."""
    algorithm = canonical(options.algorithm)
    length = round(CLASSES * math.log2(max(job.out.nbytes, 1)))
    terms = options.segment, options.ranks_per_node, options.check, job.rest is not None, blocking
    key = job.kind, job.x.dtype, length, codec, algorithm, *terms
    found = channel.tuners.get(key)
    if found is None:
        found = Tuner(ways_of(job, codec, algorithm, channel.nodes))
        channel.tuners[key] = found
    return found


def expected(ways: Sequence[Way], nbytes: int, channel: Channel) -> list[float]:
    """What rank 0's profile says of each way, in seconds; infinite where nothing is known."""
    profile = _profile(channel) if channel.rank == 0 else None
    return [math.inf if profile is None else _predicted(profile, way, nbytes) for way in ways]


def _profile(channel: Channel) -> Profile | None:
    """The profile of such a job, if it was calibrated."""
    file = default_file(channel.vendor, channel.hosts)
    if not file.exists():
        return None
    try:
        return Profile.load(file).with_hosts(channel.hosts)
    except (OSError, ValueError) as error:
        logger.warning("auto goes without a profile: %s", error)
        return None


def _predicted(profile: Profile, way: Way, nbytes: int) -> float:
    try:
        return predict(profile, way.algorithm, way.codec, nbytes).seconds
    except ValueError:  # not everything can be predicted
        return math.inf
