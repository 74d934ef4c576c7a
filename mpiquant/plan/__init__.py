"""The one chooser of algorithm, codec and segment; pure."""

from mpiquant.plan.choose import Choice, choose, choose_across, choose_sparse
from mpiquant.plan.segment import segment_length

__all__ = ["Choice", "choose", "choose_across", "choose_sparse", "segment_length"]
