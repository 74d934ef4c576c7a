"""What to use, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpiquant.plan import shown
from mpiquant.planner.predict import Prediction

GAIN = 1.05
"""Times as fast as exact values a codec must be to be advised."""


@dataclass(frozen=True)
class Advice:
    """The best of some predictions, and why."""

    best: Prediction
    sentence: str


def advise(predictions: Sequence[Prediction], error_max: float) -> Advice:
    """Choose the fastest way whose error is small enough; exact values, if nothing is gained.

    Parameters
    ----------
    predictions : sequence of Prediction
        At least one of them exact.
    error_max : float
        Relative error that the result may have.
    """
    exact = min((p for p in predictions if not p.error), key=lambda p: p.seconds)
    allowed = [p for p in predictions if p.error <= error_max]
    best = min(allowed, key=lambda p: p.seconds)
    coarse = [p for p in predictions if p.error > error_max and p.seconds < best.seconds]
    more = ""
    if coarse:
        fastest = min(coarse, key=lambda p: p.seconds)
        more = (
            f"; {fastest.codec.spec} would take {shown(fastest.seconds)}, but at a relative error "
            f"of {fastest.error:.2g}"
        )
    if not best.error or exact.seconds < GAIN * best.seconds:
        why = "no codec of a small enough error is faster" if more else "no codec is faster"
        sentence = f"do not compress: {exact.algorithm} takes {shown(exact.seconds)}, {why}{more}"
        return Advice(exact, sentence)
    sentence = (
        f"use {best.algorithm} with {best.codec.spec}: {shown(best.seconds)}, "
        f"{exact.seconds / best.seconds:.3g} times as fast as exact values "
        f"({exact.algorithm}, {shown(exact.seconds)}), at a relative error of {best.error:.2g}"
        f"{more}"
    )
    return Advice(best, sentence)
