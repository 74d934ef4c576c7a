"""What calls and messages cost beside their bytes and kernels, from calls that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from mpiquant.codecs import Codec
from mpiquant.planner.predict import predict
from mpiquant.planner.profile import Profile

FACTORS = (3.0, 1.7, 1.2, 1.07)
"""Steps of the search, of both costs that enter the simulation."""

GAIN = 1e-3
"""Share of the error that a step must take away to be made."""


class Sample(NamedTuple):
    """A call that was measured."""

    algorithm: str
    codec: Codec
    nbytes: int
    seconds: float


def fitted(profile: Profile, samples: Sequence[Sample]) -> Profile:
    """A profile with the costs of messages and calls with which predictions are least wrong.

    The latency of messages that ranks handle beside other ones is fitted as well: it is not that of
    one message back and forth.

    Parameters
    ----------
    profile : Profile
        Its costs are where the search begins.
    samples : sequence of Sample
    """
    best, least = _with_call_s(profile, samples)
    for factor in FACTORS:
        moved = True
        while moved:
            moved = False
            for name, up in product(("message_s", "latency_s"), (factor, 1 / factor)):
                tried, wrong = _with_call_s(_scaled(best, name, up), samples)
                if wrong < least * (1 - GAIN):
                    best, least, moved = tried, wrong, True
    return best


def _scaled(profile: Profile, name: str, factor: float) -> Profile:
    if name == "message_s":
        return replace(profile, message_s=factor * profile.message_s)
    wire = replace(profile.network, latency_s=factor * profile.network.latency_s)
    return replace(profile, network=wire)


def _with_call_s(profile: Profile, samples: Sequence[Sample]) -> tuple[Profile, float]:
    """With the cost of a call that fits best, and how wrong the times then are."""
    free = replace(profile, call_s=0.0)
    own = np.array([predict(free, s.algorithm, s.codec, s.nbytes).seconds for s in samples])
    measured = np.array([s.seconds for s in samples])
    left = measured - own
    costs = np.append(left[left > 0], 0.0)
    wrong = np.abs(np.log((own + costs[:, None]) / measured)).sum(axis=1)
    at = int(np.argmin(wrong))
    return replace(profile, call_s=float(costs[at])), float(wrong[at])
