"""The one chooser of algorithm, codec and segment; pure."""

from mpiquant.plan.choose import Choice, choose
from mpiquant.plan.segment import segment_length

__all__ = ["Choice", "choose", "segment_length"]
