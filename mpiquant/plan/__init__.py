"""The one chooser of algorithm and codec; pure."""

from mpiquant.plan.choose import Choice, choose

__all__ = ["Choice", "choose"]
