"""How long a call takes, and how wrong its result is, without making it.

Schedules are simulated (`mpiquant.sim`); what no schedule describes has a formula here: MPI's own
allreduce where nobody measured it, the coded ring, and calls in two levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mpiquant.codecs import EXACT, Codec, WithoutFormat
from mpiquant.collectives import CODED, HIERARCHICAL
from mpiquant.plan import choose_across, segment_length
from mpiquant.planner.profile import Profile
from mpiquant.sim import KernelCost, simulate
from mpiquant.sim.fast import Links, simulate_fast
from mpiquant.sim.noise import Loss, Partial

FEW_RANKS, ENGINE_RANKS = 8, 64
"""From more ranks on, what is alike on all of them is simulated on arrays over the ranks; and
nothing else."""

SIMULATED_SEGMENTS = (4, 8)
"""Of each chunk of a longer array."""


FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Prediction:
    """A call that was not made.

    Attributes
    ----------
    algorithm : str
    codec : Codec
    seconds : float
    error : float
        2-norm of the error over that of the result, for normal deviates.
    """

    algorithm: str
    codec: Codec
    seconds: float
    error: float


def predict(profile: Profile, algorithm: str, codec: Codec, nbytes: int) -> Prediction:
    """An allreduce of float32 values.

    Parameters
    ----------
    profile : Profile
    algorithm : str
        "native", "hierarchical", "cerar" or a schedule; canonical.
    codec : Codec
        Neither adaptive nor sparse; of "native" and "cerar": exact.
    nbytes : int
        Of the array.

    Raises
    ------
    ValueError
        For what cannot be predicted: a codec whose cost changes from call to call, or ranks that
        are too many for the simulation of that algorithm.
    """
    if codec.adaptive or isinstance(codec, WithoutFormat):
        raise ValueError(f"the cost of {codec.spec!r} depends on the values or on the clock")
    count = max(nbytes // 4, 1)
    if profile.size == 1:
        return Prediction(algorithm, EXACT, 0.0, 0.0)
    if algorithm == "native":
        seconds = _native_s(profile, nbytes)
    elif algorithm == CODED:
        seconds = _coded_s(profile, count)
    elif algorithm == HIERARCHICAL:
        seconds = _hierarchical_s(profile, codec, count)
    else:
        seconds = profile.call_s + _schedule_s(profile, algorithm, codec, count)
    return Prediction(algorithm, codec, seconds, expected_error(algorithm, codec, profile.size))


def _schedule_s(profile: Profile, algorithm: str, codec: Codec, count: int) -> float:
    """Of many segments, only some are simulated: each further one takes as long as the last ones.

    What begins and ends a call is in both of the simulated ones, and so in the difference of none.
    """
    size = profile.size
    length = segment_length(None, algorithm, codec, FLOAT32, profile.mpi, count // size)
    few, more = (size * length * segments for segments in SIMULATED_SEGMENTS)
    if count <= 2 * more:
        return _simulated_s(profile, algorithm, codec, count, length)
    first, second = (
        _simulated_s(profile, algorithm, codec, values, length) for values in (few, more)
    )
    return second + (second - first) / (more - few) * (count - more)


def _simulated_s(profile: Profile, algorithm: str, codec: Codec, count: int, length: int) -> float:
    segment = length if length * profile.size < count else None
    size, network, machine = profile.size, profile.network, profile.machine
    if size > ENGINE_RANKS and profile.ranks_per_node > 1:
        raise ValueError(f"{size} ranks, several on a host, are too many to simulate")
    if size > ENGINE_RANKS and algorithm == "halving_doubling":
        segment = None  # where only the engine could simulate them
    alike = size > FEW_RANKS and profile.ranks_per_node == 1 and algorithm != "halving_doubling"
    if alike or size > ENGINE_RANKS:
        links = Links(size, network.bandwidth, network.latency_s, network.burst_s)
        return simulate_fast(algorithm, count, codec, links, machine, segment=segment).time_s
    return simulate(algorithm, count, codec, profile.wires(), machine, segment=segment).time_s


# ---- formulas ----


def _native_s(profile: Profile, nbytes: int) -> float:
    if profile.native:
        sizes, times = zip(*profile.native, strict=True)
        inside = float(np.exp(np.interp(math.log(nbytes), np.log(sizes), np.log(times))))
        if nbytes <= sizes[-1]:
            return inside
        slope = profile.native[-2:]
        rate = (slope[1][0] - slope[0][0]) / (slope[1][1] - slope[0][1])
        return float(times[-1] + (nbytes - sizes[-1]) / rate)
    return min(_doubling_s(profile, nbytes), _native_ring_s(profile, nbytes))


def _step_s(profile: Profile, nbytes: float) -> float:
    """One exchange of messages that cross the network, where there is one."""
    crossing = len(set(profile.hosts)) > 1
    wire = profile.network if crossing else profile.memory
    sharing = profile.ranks_per_node if crossing else 1
    return wire.latency_s + sharing * nbytes / wire.bandwidth


def _doubling_s(profile: Profile, nbytes: int) -> float:
    """Recursive doubling: whole arrays, few steps."""
    return math.ceil(math.log2(profile.size)) * _step_s(profile, nbytes)


def _native_ring_s(profile: Profile, nbytes: int) -> float:
    """A ring without Python: only one rank of a host sends to another host."""
    size = profile.size
    alone = replace(profile, hosts=tuple(range(len(set(profile.hosts)))))
    one = alone if alone.size > 1 else profile
    return 2 * (size - 1) * _step_s(one, nbytes / size)


def _coded_s(profile: Profile, count: int) -> float:
    """c components, by default 2N: c + N - 2 rounds of messages of 1 / c of the array, and kernels
    around."""
    size = profile.size
    components = 2 * size if size > 2 else size  # of two ranks, more gain nothing
    cost = profile.kernels.get(CODED, KernelCost())
    rounds, values = components + size - 2, count / components
    each = _step_s(profile, 4 * values) + 2 * profile.message_s
    piece = min(values, segment_length(None, "ring", EXACT, FLOAT32, "", count // size))
    # Kernels run while other pieces are on the wire; before the first one and behind the last one
    # there is none.
    around = (cost.encode + cost.decode) * components * piece
    kernels = (cost.encode + cost.decode) * count + rounds * values * cost.hop
    return profile.call_s + max(rounds * each + around, kernels)


def _hierarchical_s(profile: Profile, codec: Codec, count: int) -> float:
    """Sums within hosts, then in lanes across them, then back: each rank carries a part."""
    nodes, inside = len(set(profile.hosts)), profile.ranks_per_node
    lane = max(count // inside, 1)
    within = 0.0
    if inside > 1:
        moved = (inside - 1) * 4 * lane / profile.memory.bandwidth
        sums = profile.kernels.get("exact", KernelCost()).decode_add * (inside - 1) * lane
        within = 2 * moved + sums + 2 * (inside - 1) * profile.message_s
    across = 0.0
    if nodes > 1:
        wire = replace(profile.network, bandwidth=profile.network.bandwidth / inside)
        lanes = replace(profile, hosts=tuple(range(nodes)), network=wire)
        way = choose_across(nodes, codec.nbytes(lane, FLOAT32))
        across = _schedule_s(lanes, way, codec, lane)
    return profile.call_s + within + across


# ---- errors ----


def expected_error(algorithm: str, codec: Codec, ranks: int) -> float:
    """Relative error of a sum of independent normal deviates, without error feedback.

    A ring encodes partial sums of 1, 2, ..., N - 1 ranks; halving and doubling of 1, 2, 4, ...; the
    other schedules each rank's own values; all of them the whole sum once.
    """
    if not codec.lossy:
        return 0.0
    loss, own = Loss.of(codec), Partial()
    total = own
    if algorithm in ("ring", HIERARCHICAL):
        for _ in range(ranks - 1):
            total = total.encoded(loss).plus(own)
    elif algorithm == "halving_doubling":
        for _ in range(ranks.bit_length() - 1):
            total = total.encoded(loss).plus(total)
    else:
        total = own.plus(own.encoded(loss).times(ranks - 1))
    return math.sqrt(total.encoded(loss).squared_error)
