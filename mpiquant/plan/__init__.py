"""The one chooser of algorithm, codec, segment and buckets; pure."""

from mpiquant.plan.bucket import OPEN_CALLS, Parameter, bucket_limits, plan_buckets
from mpiquant.plan.choose import Choice, choose, choose_across, choose_sparse
from mpiquant.plan.segment import segment_length

__all__ = [
    "OPEN_CALLS",
    "Choice",
    "Parameter",
    "bucket_limits",
    "choose",
    "choose_across",
    "choose_sparse",
    "plan_buckets",
    "segment_length",
]
