"""Messages of all ranks at a time, on links whose bandwidths change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiquant.sim.traces import Bandwidths

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """Hosts of as many ranks each, one behind the other.

    Attributes
    ----------
    ranks : int
    bandwidths : Bandwidths
        Of the hosts' interfaces, in each direction.
    latency_s : float
        From when a message has been sent until it is there.
    ranks_per_node : int
    memory : float
        Bytes per second between two ranks of a host.
    memory_latency_s : float

    Raises
    ------
    ValueError
        If the ranks do not fill the hosts.
    """

    ranks: int
    bandwidths: Bandwidths
    latency_s: float = 0.0
    ranks_per_node: int = 1
    memory: float = 5e9
    memory_latency_s: float = 1e-6

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks_per_node < 1 or self.ranks % self.ranks_per_node:
            raise ValueError(f"{self.ranks} ranks do not fill nodes of {self.ranks_per_node}")

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def of_nodes(self) -> Cluster:
        """The same hosts with one rank each."""
        return Cluster(self.nodes, self.bandwidths, self.latency_s)


class Route:
    """From each rank to another one.

    Parameters
    ----------
    cluster : Cluster
    targets : (ranks,) array of int, or None
        None: to hosts whose interfaces are not looked at.
    share : int
        Ranks of a host that send at the same time, of which each gets as much of the interface.
    """

    def __init__(self, cluster: Cluster, targets: NDArray[np.intp] | None, share: int = 1) -> None:
        self.bandwidths, self.share, self.memory = cluster.bandwidths, share, cluster.memory
        hosts = np.arange(cluster.ranks) // cluster.ranks_per_node
        self.targets = np.arange(cluster.ranks) if targets is None else targets
        near = (hosts == hosts[self.targets]) & (targets is not None)
        self._near = near if near.any() else None
        common = cluster.bandwidths.common
        self._alike = common or targets is None
        self._here = np.zeros_like(hosts) if common else hosts
        self._there = np.zeros_like(hosts) if common else hosts[self.targets]
        latency = np.where(near, cluster.memory_latency_s, cluster.latency_s)
        self.latency_s: float | Floats = latency if self._near is not None else cluster.latency_s

    def end(self, begin: Floats, nbytes: float | Floats) -> Floats:
        """When messages that begin at these times have been sent."""
        bandwidths = self.bandwidths
        if bandwidths.steady:
            return np.asarray(begin + nbytes / self._rate(np.zeros(len(begin), np.intp)))
        bandwidths.upto(float(begin.max()))
        step = np.searchsorted(bandwidths.times, begin, side="right") - 1
        now, left = begin, np.broadcast_to(np.asarray(nbytes, np.float64), begin.shape)
        while True:
            rate = self._rate(step)
            until = np.append(bandwidths.times, np.inf)[step + 1]
            room = rate * np.maximum(until - now, 0.0)
            fits = left <= room
            after = now + left / rate
            if fits.all():
                return after
            left = np.where(fits, 0.0, left - room)
            now = np.where(fits, after, until)
            step = step + ~fits
            bandwidths.upto(float(now.max()))

    def _rate(self, step: NDArray[np.intp]) -> Floats:
        """Bytes per second of each rank's messages."""
        table = self.bandwidths.table
        rate = table[step, self._here]
        if not self._alike:
            rate = np.minimum(rate, table[step, self._there])
        rate = rate / self.share
        return rate if self._near is None else np.where(self._near, self.memory, rate)


def ahead(ranks: int, distance: int) -> NDArray[np.intp]:
    """Numbers of the ranks at a distance, around the ring."""
    return (np.arange(ranks) + distance) % ranks


def behind(values: Floats, distance: int) -> Floats:
    """What the rank at a distance behind each one has."""
    distance %= len(values)
    return np.concatenate([values[len(values) - distance :], values[: len(values) - distance]])


def windowed(
    values: Floats, first: int, count: int, join: Callable[[Floats, Floats], Floats] = np.maximum
) -> Floats:
    """Most of what some ranks behind each one have: those at distances first ... first + count - 1.

    Parameters
    ----------
    values : (ranks,) array
    first, count : int
        More than all ranks are all of them.
    join : callable
        Of two arrays; `numpy.minimum` for the least.
    """
    count = min(count, len(values))
    if count == 1:
        return behind(values, first)
    found = np.concatenate([values[len(values) - count + 1 :], values])
    length = 1  # each entry stands for so many values, from its own backwards
    while 2 * length <= count:
        found = join(found[length:], found[:-length])
        length *= 2
    rest = count - length
    if rest:
        found = join(found[rest:], found[:-rest])
    return behind(found, first)


def window_mean(values: Floats, first: int, count: int) -> Floats:
    """Mean of what ranks at distances first ... first + count - 1 behind each one have."""
    if count == 1:
        return behind(values, first)
    size = len(values)
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values]))])
    ends = np.arange(size) + size + 1
    return behind((sums[ends] - sums[ends - count]) / count, first)
