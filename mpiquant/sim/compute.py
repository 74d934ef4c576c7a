"""When ranks compute: what lies between the buckets of a model, with jitter and stragglers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpiquant.codecs import EXACT
from mpiquant.plan import Parameter, bucket_limits, plan_buckets
from mpiquant.sim.workloads import Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Part:
    """A bucket and the layers whose passes lie between it and the one that is ready before.

    Attributes
    ----------
    values : int
        Gradients of the bucket.
    forward_s, backward_s : float
        Seconds of those layers' passes.  The bucket is ready behind the backward one, and needed
        before the forward one.
    """

    values: int
    forward_s: float
    backward_s: float


def parts_of(workload: Workload, bucket_bytes: int | None = None) -> list[Part]:
    """The buckets of a model's float32 gradients, in the order in which they are ready.

    The plan is that of real runs.  They are needed in the reverse order.

    Parameters
    ----------
    workload : Workload
    bucket_bytes : int, optional
        As of `mpiquant.gradients.GradientSynchronizer`.
    """
    float32 = np.dtype(np.float32)
    layer_of, parameters = {}, []
    for number, layer in enumerate(workload.layers):
        for i, shape in enumerate(layer.shapes):
            parameter = Parameter(f"{layer.name}.{i}", shape, float32, EXACT)
            layer_of[parameter.name] = number
            parameters.append(parameter)
    total = sum(p.nbytes for p in parameters)
    forward, backward = workload.forward_s(), workload.backward_s()
    parts, behind = [], len(workload.layers)
    for bucket in plan_buckets(parameters, *bucket_limits(total, bucket_bytes)):
        first = min(layer_of[p.name] for p in bucket)
        values = sum(p.size for p in bucket)
        parts.append(Part(values, sum(forward[first:behind]), sum(backward[first:behind])))
        behind = first
    return parts


@dataclass(frozen=True)
class Load:
    """How computation differs between ranks and iterations.

    Attributes
    ----------
    jitter : float
        Relative standard deviation of a pass, drawn for each rank and iteration (lognormal, so that
        the mean stays).
    stragglers : float
        Chance of a rank to be slow in an iteration.
    slowdown : float
        By what its passes are longer then.

    Raises
    ------
    ValueError
        If one makes no sense.
    """

    jitter: float = 0.0
    stragglers: float = 0.0
    slowdown: float = 1.5

    def __post_init__(self) -> None:
        if self.jitter < 0 or not 0 <= self.stragglers <= 1 or self.slowdown < 1:
            expected = "jitter >= 0, stragglers from 0 to 1, slowdown >= 1"
            raise ValueError(f"{self} makes no sense, expected {expected}")

    def draw(self, ranks: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Factors of the forward and the backward pass of each rank, for one iteration.

        One seed draws the same jitter with and without stragglers.
        """
        spread = np.sqrt(np.log1p(self.jitter**2))
        factors = np.exp(spread * rng.standard_normal((2, ranks)) - spread**2 / 2)
        slow = rng.random(ranks) < self.stragglers
        forward, backward = factors * np.where(slow, self.slowdown, 1.0)
        return forward, backward
