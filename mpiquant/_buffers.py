"""From what a user passes to flat NumPy arrays, and back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from mpiquant.typing import Array, BufSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of a call."""

    name: str
    array: Array
    is_scalar: bool

    @property
    def work_dtype(self) -> np.dtype:
        """The dtype in which sums are made."""
        return work_dtype(self.array.dtype)


def is_half(dtype: np.dtype) -> bool:
    """Whether sums of this dtype need a wider one: float16 and ml_dtypes' bfloat16."""
    return dtype.itemsize == 2 and dtype.name in ("float16", "bfloat16")


def work_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if is_half(dtype) else dtype.newbyteorder("=")


def check_dtype(dtype: np.dtype, name: str) -> None:
    """TypeError unless MPI can sum values of this dtype."""
    if dtype.kind not in "biufc" and not is_half(dtype):
        named = f" of {name!r}" if name else ""
        raise TypeError(f"dtype {dtype}{named} cannot be reduced")


def make_entry(x: Any, name: str) -> Entry:
    array = np.asarray(x)
    check_dtype(array.dtype, name)
    return Entry(name, array, not isinstance(x, np.ndarray) and array.ndim == 0)


def flatten(x: Any, name: str) -> tuple[list[Entry], Callable[[list[Any]], Any]]:
    """Entries of an array, a list or tuple of arrays, or a dict of arrays, and the way back.

    Entries of a dict come in the order of their sorted names, so that ranks that inserted them in
    different orders agree.
    """
    if isinstance(x, Mapping):
        keys = sorted(x)
        prefix = f"{name}." if name else ""
        entries = [make_entry(x[key], f"{prefix}{key}") for key in keys]

        def rebuild_dict(results: list[Any]) -> dict[str, Any]:
            by_key = dict(zip(keys, results, strict=True))
            return {key: by_key[key] for key in x}

        return entries, rebuild_dict
    if is_sequence(x):
        entries = [make_entry(item, f"{name}[{i}]") for i, item in enumerate(x)]
        # A named tuple takes its fields one by one.
        rebuild = type(x) if not hasattr(x, "_fields") else lambda results: type(x)(*results)
        return entries, rebuild
    return [make_entry(x, name)], lambda results: results[0]


def is_sequence(x: Any) -> bool:
    """Whether x is a list of arrays, rather than an array written as a list of numbers."""
    arrays = isinstance(x, (list, tuple)) and (not x or any(isinstance(i, np.ndarray) for i in x))
    return arrays


def flatten_like(out: Any, x: Any) -> list[Any]:
    """Outputs in the order of the entries of x; None for each if out is None."""
    if isinstance(x, Mapping):
        return [None if out is None else out[key] for key in sorted(x)]
    if is_sequence(x):
        return [None] * len(x) if out is None else list(out)
    return [out]


def flat_input(array: Array, dtype: np.dtype) -> Array:
    """A contiguous 1-d array with the values; the array's own memory where possible."""
    return np.ascontiguousarray(array, dtype=dtype).reshape(-1)


def check_out(out: Any, x: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """The output array itself, if the result can be written to it.

    Raises
    ------
    TypeError
        If it is no array or of another dtype.
    ValueError
        If it is read-only, not contiguous, of another shape, or overlaps x without being x.
    """
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out is a {type(out).__name__}, expected an array")
    array: Array = np.asarray(out)  # a matrix or masked array has ideas of its own about shapes
    if array.dtype.newbyteorder("=") != dtype:
        raise TypeError(f"out has dtype {array.dtype}, the result has {dtype}")
    if array.shape != shape:
        raise ValueError(f"out has shape {array.shape}, the result has {shape}")
    if not array.flags.writeable:
        raise ValueError("out is read-only")
    if not array.flags.c_contiguous:
        raise ValueError("out is not contiguous")
    if np.may_share_memory(array, x) and not same_memory(array, x) and np.shares_memory(array, x):
        raise ValueError("out overlaps x; pass x itself or memory of its own")
    return array


def check_disjoint(inputs: list[Array], outs: list[Array | None]) -> None:
    """ValueError if the output of one entry overlaps the input or output of another one."""
    if len(inputs) < 2:
        return
    written = sorted((byte_bounds(out), i) for i, out in enumerate(outs) if out is not None)
    if not written:
        return
    for (first, i), (second, j) in pairwise(written):
        if first[1] > second[0]:
            raise ValueError(f"out of entry {i} overlaps out of entry {j}")
    starts = [bounds[0] for bounds, _ in written]
    for j, array in enumerate(inputs):
        begin, end = byte_bounds(array)
        place = max(0, bisect_right(starts, begin) - 1)
        for bounds, i in written[place:]:
            if bounds[0] >= end:
                break
            if i != j and bounds[1] > begin and np.shares_memory(array, outs[i]):
                raise ValueError(f"out of entry {i} overlaps the input of entry {j}")


def same_memory(a: Array, b: Array) -> bool:
    """Whether two arrays are the same values at the same place."""
    if a is b:
        return True
    place = a.__array_interface__["data"][0] == b.__array_interface__["data"][0]
    return place and a.strides == b.strides and a.shape == b.shape and a.dtype == b.dtype


_locked: dict[int, list[Any]] = {}
"""Arrays that calls in flight have made read-only, by id: the array and how many calls."""


def lock(arrays: list[Array]) -> Callable[[], None]:
    """Make arrays read-only; the function returned makes them writable again.

    An array that several calls have locked stays so until the last has unlocked it.
    """
    mine = []
    for array in arrays:
        entry = _locked.get(id(array))
        if entry is not None:
            entry[1] += 1
            mine.append(array)
        elif array.flags.writeable and array.base is None:
            array.flags.writeable = False
            _locked[id(array)] = [array, 1]
            mine.append(array)

    def unlock() -> None:
        while mine:
            entry = _locked[id(mine.pop())]
            entry[1] -= 1
            if entry[1] == 0:
                entry[0].flags.writeable = True
                del _locked[id(entry[0])]

    return unlock


def from_spec(spec: BufSpec, what: str) -> Array | None:
    """The array of an mpi4py buffer spec, or None if only MPI can tell.

    Understands an array or buffer, and [buffer, count], [buffer, datatype] and
    [buffer, count, datatype] with the datatype of the buffer's items.

    Raises
    ------
    ValueError
        For an array that is not contiguous, or a count beyond its end.
    """
    from mpi4py import MPI
    from mpi4py.util.dtlib import to_numpy_dtype

    count: int | None = None
    dtype: np.dtype | None = None
    data = spec
    if isinstance(spec, (list, tuple)):
        data, *rest = spec
        for item in rest:
            if isinstance(item, MPI.Datatype):
                if not item.is_predefined:
                    return None
                dtype = to_numpy_dtype(item)
            elif isinstance(item, (int, np.integer)):
                count = int(item)
            elif item is not None:
                return None
    try:
        array = np.asarray(data if isinstance(data, np.ndarray) else memoryview(data))
    except TypeError:
        return None
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise ValueError(f"{what} is not contiguous")
    flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
    if dtype is not None and dtype != flat.dtype:
        return None
    if count is not None and not 0 <= count <= flat.size:
        raise ValueError(f"{what} has {flat.size} elements, the count is {count}")
    return flat[:count]
