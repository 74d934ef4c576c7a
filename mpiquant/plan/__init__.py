"""The one chooser of algorithm, codec, segment and buckets; pure."""

from mpiquant.plan.bucket import OPEN_CALLS, Parameter, bucket_limits, plan_buckets
from mpiquant.plan.choose import MANY_RANKS, Choice, choose, choose_across, choose_sparse
from mpiquant.plan.segment import segment_length
from mpiquant.plan.shown import shown
from mpiquant.plan.tune import Tuner, Turn, Way

__all__ = [
    "MANY_RANKS",
    "OPEN_CALLS",
    "Choice",
    "Parameter",
    "Tuner",
    "Turn",
    "Way",
    "bucket_limits",
    "choose",
    "choose_across",
    "choose_sparse",
    "plan_buckets",
    "segment_length",
    "shown",
]
