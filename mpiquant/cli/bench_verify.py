"""Data of a benchmark, and what the results must be: computed by MPI or alone, not by mpiquant."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from mpi4py import MPI

from mpiquant.cli.bench_figures import plausible, tolerance
from mpiquant.codecs import Codec
from mpiquant.codecs._block import BlockCodec
from mpiquant.collectives import own_part
from mpiquant.typing import Array

PIECE = 1 << 20
"""Values compared at a time."""


def make_data(op: str, dtype: np.dtype, count: int, seed: int, rank: int, ranks: int) -> Array:
    """Values of a rank whose reduction neither overflows nor vanishes."""
    rng = np.random.default_rng([seed, rank])
    if dtype.kind == "f":
        if op == "prod":
            return rng.uniform(0.8, 1.25, count).astype(dtype)
        return rng.standard_normal(count, np.result_type(dtype, np.float32).type).astype(dtype)
    if op == "prod":
        return rng.integers(1, 3 if rank < 6 else 2, count, dtype)
    high = max(1, min(1000, np.iinfo(dtype).max // ranks))
    return rng.integers(0 if dtype.kind == "u" else -high, high + 1, count, dtype)


class Reference:
    """What one rank's result of a collective must be.

    Making one, `peaks`, `check` and `differs` are collective.
    """

    def __init__(self, comm: MPI.Intracomm, kind: str, op: str, x: Array, seed: int) -> None:
        self.comm, self.kind, self.op, self.x = comm, kind, op, x
        self.terms = 1 if kind == "allgather" else comm.size
        self.begin = 0
        if kind == "allgather":
            args = (op, x.dtype, x.size, seed)
            every = [make_data(*args, rank, comm.size) for rank in range(comm.size)]
            self.x = np.concatenate(every)
            self.values = self.x.astype(_wide(x.dtype))
            self.magnitudes = np.abs(self.values).astype(np.float32)
        else:
            self._reduce(op, x)
        self._peaks: dict[int, Array] = {}

    def _reduce(self, op: str, x: Array) -> None:
        wide = x.astype(_wide(x.dtype))
        self.values = np.empty_like(wide)
        self.comm.Allreduce(wide, self.values, mpi_op(op))
        self.magnitudes = np.zeros(x.size, np.float32)
        if op in ("sum", "mean"):
            self.comm.Allreduce(np.abs(wide), wide, MPI.SUM)
            self.magnitudes[...] = wide
        elif op == "prod":
            self.magnitudes[...] = self.values
        if op == "mean":
            self.values = self.values / self.comm.size
        if self.kind == "reduce_scatter":
            own = own_part(x.size, self.comm.rank, self.comm.size)
            self.begin = own.start
            self.values, self.magnitudes = self.values[own], self.magnitudes[own]

    def peaks(self, codec: Codec | None) -> Array:
        """For each value, the largest magnitude of all ranks in any block that may hold it.

        Where blocks begin depends on the algorithm; a block that holds a value lies within the
        aligned block of that value and its two neighbours.
        """
        if not isinstance(codec, BlockCodec):
            return np.zeros(self.values.size)  # no bound depends on blocks
        block = codec.block
        if block not in self._peaks:
            starts = np.arange(0, self.x.size, block)
            largest = np.maximum.reduceat(np.abs(self.x), starts).astype(np.float64)
            self.comm.Allreduce(MPI.IN_PLACE, largest, MPI.MAX)
            padded = np.pad(largest, 1)
            self._peaks[block] = np.maximum(largest, np.maximum(padded[:-2], padded[2:]))
        places = np.arange(self.begin, self.begin + self.values.size)
        return self._peaks[block][places // block]

    def check(self, out: Array, codec: Codec | None) -> tuple[int, float]:
        """Number of values outside the bound, and the relative error in the 2-norm.

        None as codec means that nothing was compressed.
        """
        exact = self.values.dtype.kind != "f" or self.x.dtype.kind != "f"
        with np.errstate(all="ignore"):  # a broken result may hold anything
            wrong, sums = self._exactly(out) if exact else self._nearly(out, codec)
        totals = np.array([wrong, *sums[:2]])
        whole = MPI.SUM if self.kind == "reduce_scatter" else MPI.MAX
        self.comm.Allreduce(MPI.IN_PLACE, totals, whole)
        _, squared, size = totals
        return int(totals[0]), float((squared / size if size else squared) ** 0.5)

    def _exactly(self, out: Array) -> tuple[int, Array]:
        difference = out.astype(np.float64) - self.values
        sums = np.array([np.sum(difference**2), np.sum(self.values.astype(np.float64) ** 2)])
        return int(np.count_nonzero(out != self.values)), sums

    def _nearly(self, out: Array, codec: Codec | None) -> tuple[int, Array]:
        wrong, sums = 0, np.zeros(3)  # squares of error and values, and their product
        peaks = self.peaks(codec)
        scale = self.comm.size if self.op == "mean" else 1
        for begin in range(0, out.size, PIECE):
            part = slice(begin, begin + PIECE)
            values, magnitudes = self.values[part], self.magnitudes[part].astype(np.float64)
            allowed = tolerance(codec, self.terms, out.dtype, magnitudes, peaks[part]) / scale
            difference = out[part].astype(np.float64) - values
            wrong += int(np.count_nonzero(~(np.abs(difference) <= allowed)))
            sums += [difference @ difference, values @ values, difference @ values]
        if not plausible(codec, self.terms, out.size, *sums):
            wrong = out.size
        return wrong, sums

    def differs(self, out: Array) -> bool:
        """Whether a result that all ranks should have has other bits on some."""
        if self.kind == "reduce_scatter":
            return False
        return len(set(self.comm.allgather(hashlib.sha256(out.data).digest()))) > 1


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype({"f": np.float64, "i": np.int64, "u": np.uint64}[dtype.kind])


def mpi_op(op: str) -> Any:
    """MPI's op; that of the sum for a mean, and where nothing is reduced."""
    return MPI.SUM if op in ("mean", "none") else getattr(MPI, op.upper())
