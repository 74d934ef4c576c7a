"""What is known of a cluster: its wires, its processors, its MPI.

`mpiquant plan --calibrate` measures one and stores it; what nobody measured is the user's to say.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mpiquant.sim import TYPICAL, KernelCost, Machine, Network

VERSION = 1
"""Of the file; others are refused."""


@dataclass(frozen=True)
class Wire:
    """What joins two ranks.

    Attributes
    ----------
    bandwidth : float
        Payload bytes per second.
    latency_s : float
        From when a message has been sent until it is there.
    burst_s : float
        How much of its time a wire can save up (see `mpiquant.sim.Network`).
    """

    bandwidth: float
    latency_s: float
    burst_s: float = 0.0


KERNELS = {**TYPICAL.kernels, "cerar": KernelCost(1e-9, 1e-9, 6e-10, 6e-10)}
"""Where nothing was measured."""


@dataclass(frozen=True)
class Profile:
    """A cluster.

    Attributes
    ----------
    hosts : tuple of int
        Host of each rank.
    network, memory : Wire
        Between ranks of different hosts, and of one.
    kernels : dict of str to KernelCost
        Seconds per value, by the names of codecs; "cerar" for that algorithm.
    message_s : float
        Processor time for one message, at each of its ends.
    call_s : float
        What each call takes beside its messages.
    eager_nbytes : int
        Longest message that is sent at once; for longer ones the receiver is asked first.  For the
        reader: no prediction goes by it.
    native : tuple of (int, float)
        Bytes of an array and seconds of MPI's own allreduce, as measured; empty if it was not.
    mpi : str
        Name of the MPI; segments depend on it.
    """

    hosts: tuple[int, ...]
    network: Wire
    memory: Wire = Wire(5e9, 2e-6)
    kernels: dict[str, KernelCost] = field(default_factory=lambda: dict(KERNELS))
    message_s: float = TYPICAL.message_s
    call_s: float = 100e-6
    eager_nbytes: int = 64 << 10
    native: tuple[tuple[int, float], ...] = ()
    mpi: str = ""

    @classmethod
    def of(
        cls, ranks: int, bandwidth: float, latency_s: float = 50e-6, ranks_per_node: int = 1
    ) -> Profile:
        """Ranks on as many hosts as they need, with typical processors."""
        hosts = tuple(rank // ranks_per_node for rank in range(ranks))
        return cls(hosts, Wire(bandwidth, latency_s))

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def ranks_per_node(self) -> int:
        """Of the fullest host."""
        return max(Counter(self.hosts).values())

    @property
    def machine(self) -> Machine:
        return Machine(self.kernels, self.message_s)

    def wires(self) -> Network:
        """The network of all ranks."""
        return Network(
            self.hosts,
            self.network.bandwidth,
            self.network.latency_s,
            memory=self.memory.bandwidth,
            memory_latency_s=self.memory.latency_s,
            burst_s=self.network.burst_s,
        )

    def with_hosts(self, hosts: Sequence[int]) -> Profile:
        """The same cluster with other ranks on it; MPI's own times do not hold for them."""
        if tuple(hosts) == self.hosts:
            return self
        return replace(self, hosts=tuple(hosts), native=())

    # ---- files ----

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": VERSION, **asdict(self)}, indent=1)
        unfinished = file.with_name(file.name + ".part")
        unfinished.write_text(text + "\n")
        unfinished.replace(file)

    @classmethod
    def load(cls, file: Path) -> Profile:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            If it is no profile, or one of another version.
        """
        try:
            read: dict[str, Any] = json.loads(file.read_text())
            if read.pop("version") != VERSION:
                raise ValueError("of another version: calibrate again")
            read["kernels"] = {name: KernelCost(**cost) for name, cost in read["kernels"].items()}
            read["hosts"] = tuple(read["hosts"])
            read["native"] = tuple((int(nbytes), float(s)) for nbytes, s in read["native"])
            for name in ("network", "memory"):
                read[name] = Wire(**read[name])
            return cls(**read)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{file} is no profile: {error}") from None


def default_file(mpi: str, hosts: Sequence[int]) -> Path:
    """Where the profile of such a job is kept: MPIQUANT_PROFILE, or the user's cache."""
    given = os.environ.get("MPIQUANT_PROFILE")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = mpi.lower().replace(" ", "-") or "mpi"
    return Path(cache) / "mpiquant" / f"{name}-{len(hosts)}-ranks-{len(set(hosts))}-hosts.json"
