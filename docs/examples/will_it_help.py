"""Where compression pays: predicted times on networks of 1, 10, 25 and 100 Gbit/s.

    python docs/examples/will_it_help.py docs/images

Processors are the planner's typical ones: one core with AVX2 or AVX-512.  No MPI is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

from mpiquant.codecs import EXACT, by_name
from mpiquant.planner.predict import predict
from mpiquant.planner.profile import Profile

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RATES = {1: 50e-6, 10: 20e-6, 25: 10e-6, 100: 3e-6}
"""Gbit/s, and the latency of such networks in seconds."""

SIZES = [4**k for k in range(6, 15)]
RANKS = 8


def speedup(profile: Profile, codec: str, nbytes: int) -> float:
    """Times as fast as MPI's own allreduce."""
    native = predict(profile, "native", EXACT, nbytes).seconds
    names = ("ring", "halving_doubling", "direct")
    return native / min(predict(profile, n, by_name(codec), nbytes).seconds for n in names)


def main() -> None:
    """Draw a panel for each codec, with a line for each network."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, codec in zip(panels, ("q8", "q4"), strict=True):
        for rate, latency in RATES.items():
            profile = Profile.of(RANKS, rate * 1.25e8, latency)
            speeds = [speedup(profile, codec, nbytes) for nbytes in SIZES]
            panel.plot(SIZES, speeds, marker=".", label=f"{rate} Gbit/s")
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel="bytes of the array", title=codec)
    panels[0].set_ylabel("times as fast as native")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(Path(sys.argv[1]) / "will_it_help.png", dpi=110)


if __name__ == "__main__":
    main()
