"""The one chooser of algorithm, codec and segment; pure."""

from mpiquant.plan.choose import Choice, choose
from mpiquant.plan.segment import EAGER_NBYTES, segment_length

__all__ = ["EAGER_NBYTES", "Choice", "choose", "segment_length"]
