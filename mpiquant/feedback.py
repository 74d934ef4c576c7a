"""Error feedback: what a call's quantization left out is added to the next call's input.

Every encoding of a call, at every hop, leaves the part it lost in the residual of the rank that
encoded; over a call each element is encoded just once on each rank, so a rank's residual is one
copy of the array.  Then, up to float rounding::

    sum over steps of outputs + sum over ranks of residuals = sum over steps of exact sums
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpiquant.typing import Array


def nothing(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """A residual of zeros: read-only, and without memory for each of them."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def is_nothing(residual: Array | None) -> bool:
    """Whether there is none, or one that `nothing` made."""
    return residual is None or not (residual.flags.writeable or any(residual.strides))


class ErrorFeedback:
    """Residuals of one rank, by parameter name.

    Pass one instance as `feedback=` to all calls of a training run.  Arrays are told apart by
    `name=` or by their key in a dict; a lone array without a name has the name "".  Residuals
    have the dtype in which the array is quantized (float32 for 16-bit arrays) and the units of
    the sum, whatever the op.

    They are kept only if the call's result is finite on all ranks: a step that overflowed leaves
    no trace.

    Memory: one copy of each array; another one of the array at hand during a call.  A lone rank
    loses nothing: its residuals are zeros that take no memory.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Array] = {}

    def __len__(self) -> int:
        return len(self._residuals)

    def residual(self, name: str) -> Array | None:
        """The residual kept under a name, or None."""
        return self._residuals.get(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Array | None:
        """The residual of an array of this shape and dtype.

        Raises
        ------
        ValueError
            If another shape or dtype was kept under the name.
        """
        found = self._residuals.get(name)
        if found is None:
            return None
        if found.shape != shape:
            raise ValueError(
                f"the residual of {name!r} has shape {found.shape}, the array has {shape}; "
                "use another name, or reset() for a new start"
            )
        if found.dtype != dtype:
            raise ValueError(f"the residual of {name!r} is {found.dtype}, the array is {dtype}")
        return found

    def put(self, name: str, residual: Array) -> None:
        """Keep a residual; the array belongs to this object from now on."""
        self._residuals[name] = residual

    def reset(self, name: str | None = None) -> None:
        """Forget one residual, or all."""
        if name is None:
            self._residuals.clear()
        else:
            self._residuals.pop(name, None)

    def state_dict(self) -> dict[str, Array]:
        """Copies of all residuals, by name."""
        return {name: residual.copy() for name, residual in self._residuals.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Replace all residuals by copies of these."""
        self._residuals = {name: np.array(residual) for name, residual in state.items()}
