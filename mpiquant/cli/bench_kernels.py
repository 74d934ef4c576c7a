"""`mpiquant bench kernels`: the kernels against np.copyto of the same array.

Every kernel's repeats alternate with np.copyto's, and both figures are medians, so that the ratio
holds on a machine whose speed drifts.  An array is processed as the runner does: in segments, whose
wires are the buffers of a small pool.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpiquant import __version__, _kernels
from mpiquant.codecs import Codec, LowBitCodec, Sparsifier, UniformCodec, by_name, split_names
from mpiquant.codecs.sparse_message import decode_message, encode_message
from mpiquant.execute import WINDOW
from mpiquant.plan.segment import LENGTHS
from mpiquant.program import cut
from mpiquant.typing import Array, Bytes

DEFAULT_CODECS = "q8,q4,q2,q1,q8s,q4s,ternary,bf16,fp16"


@dataclass(frozen=True)
class Row:
    """One measured kernel; gbps counts the bytes of the array, not of the wire."""

    kernel: str
    codec: str
    bits: float
    rounding: str
    dtype: str
    isa: str
    gbps: float
    vs_copyto: float


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("kernels", help="codec kernels against np.copyto")
    parser.add_argument("--size", type=float, default=64, help="MiB of the array (default 64)")
    parser.add_argument("--codecs", default=DEFAULT_CODECS, help="names; q4s is q4 stochastic")
    parser.add_argument("--dtypes", default="float32,float64")
    parser.add_argument("--isas", default=_kernels.isa(), help="instruction sets, or all")
    parser.add_argument("--block", type=int, default=0, help="block (default: the codec's)")
    parser.add_argument("--segment", type=int, default=LENGTHS[0], help="values a call")
    parser.add_argument(
        "--pool",
        type=int,
        default=2 * WINDOW,
        help="wire buffers used in turn, as by the runner (0: one for each segment)",
    )
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    isas = _kernels.available_isas() if arguments.isas == "all" else arguments.isas.split(",")
    print(f"{'kernel':12}{'codec':22}{'bits':>5}{'dtype':>9}{'isa':>10}{'GB/s':>8}{'x copyto':>10}")
    rows = []
    for isa in isas:
        _kernels.use_isa(isa)
        for dtype in arguments.dtypes.split(","):
            for name in split_names(arguments.codecs):
                for row in measure(_codec(name, arguments.block), dtype, arguments):
                    rows.append(row)
                    print(
                        f"{row.kernel:12}{row.codec:22}{row.bits:5g}{row.dtype:>9}{row.isa:>10}"
                        f"{row.gbps:8.1f}{row.vs_copyto:10.2f}",
                        flush=True,
                    )
    if arguments.json:
        report = {
            "version": __version__,
            "args": _plain(arguments),
            "results": list(map(asdict, rows)),
        }
        arguments.json.write_text(json.dumps(report, indent=1))
    return 0


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    values = {k: v for k, v in vars(arguments).items() if k != "run"}
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}


def _codec(name: str, block: int) -> Codec:
    """A codec by name; a trailing s asks for stochastic rounding."""
    if name[:1] != "q" or "(" in name:
        return by_name(name)
    bits = int(name[1:].rstrip("s"))
    if bits < 3:
        return LowBitCodec(bits=bits, block=block)
    return UniformCodec(
        bits=bits, block=block, rounding="stochastic" if name[-1] == "s" else "nearest"
    )


def measure(codec: Codec, dtype: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Rows of all kernels of one codec."""
    count = int(arguments.size * 2**20) // np.dtype(dtype).itemsize
    x = np.random.default_rng(0).standard_normal(count, np.float32).astype(dtype)
    y = np.zeros_like(x)
    for kernel, work in _works(codec, x, y, arguments).items():
        ours, copy = _alternate(work, lambda: np.copyto(y, x), arguments.repeat)
        yield Row(
            kernel=kernel,
            codec=codec.spec,
            bits=codec.bits,
            rounding=getattr(
                codec, "rounding", "nearest" if codec.spec != "ternary" else "stochastic"
            ),
            dtype=dtype,
            isa=_kernels.isa(),
            gbps=round(x.nbytes / ours / 1e9, 3),
            vs_copyto=round(copy / ours, 4),
        )


def _works(
    codec: Codec, x: Array, y: Array, arguments: argparse.Namespace
) -> dict[str, Callable[[], object]]:
    """What to time of a codec."""
    if isinstance(codec, Sparsifier):
        return _sparse_kernels(codec, x, y)
    granule = codec.granule
    length = max(granule, arguments.segment // granule * granule)
    return kernels_of(codec, x, y, length, arguments.pool)


def _sparse_kernels(codec: Sparsifier, x: Array, y: Array) -> dict[str, Callable[[], object]]:
    """Choosing positions; a message of them, the residual too; and adding it to a sum."""
    rest = x.copy()

    def message() -> Bytes:
        at = codec.positions(x, 1)
        values = x[at]
        wire = encode_message(at, values, x.size, codec.values)
        rest[at] = values
        return wire

    wire = message()

    def decode_add() -> None:
        at, values, _ = decode_message(wire, y.size, codec.values, y.dtype)
        y[at] += values

    return {
        "select": lambda: codec.positions(x, 1),
        "encode": message,
        "decode_add": decode_add,
    }


def kernels_of(
    codec: Codec, x: Array, y: Array, length: int, pool: int
) -> dict[str, Callable[[], object]]:
    """What to time; `unfused` is the hop as decode, np.add and encode one after the other."""
    pieces = list(cut(0, x.size, length))
    wires, outs = (_wires(codec, pieces, x.dtype, pool) for _ in range(2))
    scratch = np.zeros(length, x.dtype)
    total = np.zeros(length, x.dtype)

    def encode() -> None:
        for (a, b), wire in zip(pieces, wires, strict=True):
            codec.encode(x[a:b], wire, index=a)

    def decode() -> None:
        for (a, b), wire in zip(pieces, wires, strict=True):
            codec.decode(wire, y[a:b])

    def decode_add() -> None:
        for (a, b), wire in zip(pieces, wires, strict=True):
            codec.decode_add(wire, y[a:b], y[a:b])

    def hop() -> None:
        for (a, b), wire, out in zip(pieces, wires, outs, strict=True):
            codec.hop(wire, x[a:b], out, index=a)

    def unfused() -> None:
        for (a, b), wire, out in zip(pieces, wires, outs, strict=True):
            codec.decode(wire, scratch[: b - a])
            np.add(x[a:b], scratch[: b - a], out=total[: b - a])
            codec.encode(total[: b - a], out, index=a)

    return {
        "encode": encode,
        "decode": decode,
        "decode_add": decode_add,
        "hop": hop,
        "unfused": unfused,
    }


def _wires(codec: Codec, pieces: list[tuple[int, int]], dtype: np.dtype, pool: int) -> list[Bytes]:
    """A wire for each segment, in the memory of as many wires as the pool has."""
    sizes = [codec.nbytes(b - a, dtype) for a, b in pieces]
    pool = pool or len(pieces)
    memory = [np.zeros(max(sizes), np.uint8) for _ in range(min(pool, len(pieces)))]
    return [memory[i % len(memory)][:nbytes] for i, nbytes in enumerate(sizes)]


def _alternate(
    first: Callable[[], object], second: Callable[[], object], repeat: int
) -> tuple[float, float]:
    """Median seconds of two functions, called in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat + 1):
        for function, taken in zip((first, second), times, strict=True):
            begin = time.perf_counter()
            function()
            taken.append(time.perf_counter() - begin)
    return float(np.median(times[0][1:])), float(np.median(times[1][1:]))
