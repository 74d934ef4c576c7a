"""Types of the public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiquant.codecs import Codec

Array: TypeAlias = npt.NDArray[Any]
Bytes: TypeAlias = npt.NDArray[np.uint8]
CommLike: TypeAlias = "MPI.Intracomm"
OpLike: TypeAlias = "str | MPI.Op"
CodecLike: TypeAlias = "str | Codec | Callable[[str, tuple[int, ...]], str | Codec | None] | None"
BufSpec: TypeAlias = Any
"""What mpi4py takes as a buffer: an array, or [array, count, datatype]."""
