"""The one chooser of algorithm, codec and segment; pure."""

from mpiquant.plan.choose import MANY_RANKS, Choice, choose, choose_across, choose_sparse
from mpiquant.plan.segment import segment_length
from mpiquant.plan.tune import Tuner, Turn, Way

__all__ = [
    "Choice",
    "MANY_RANKS",
    "Tuner",
    "Turn",
    "Way",
    "choose",
    "choose_across",
    "choose_sparse",
    "segment_length",
]
