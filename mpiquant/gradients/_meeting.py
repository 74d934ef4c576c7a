"""All ranks come together, or raise together."""

from __future__ import annotations

import numpy as np

from mpiquant import api
from mpiquant._comm import Channel, channel_of
from mpiquant.typing import CommLike


def meet(
    comm: CommLike | None, name: str, problem: Exception | None, timeout: float | None
) -> Channel:
    """Wait for all ranks to come to a call of this name; raises on all if one has a problem.

    What follows may wait without a limit: nobody is missing.
    """
    channel = channel_of(comm, timeout)
    if problem is not None:
        with channel.entered():
            refused = api.refuse(channel, name, problem)
        refused.wait()
    api.allreduce(np.zeros(1), comm=comm, codec="exact", name=name, timeout=timeout)
    return channel
