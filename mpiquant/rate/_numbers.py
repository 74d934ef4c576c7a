"""Numbers and arrays alike."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]


def floats(values: ArrayLike) -> Floats:
    """A number, or numbers, as an array."""
    return np.asarray(values, np.float64)
