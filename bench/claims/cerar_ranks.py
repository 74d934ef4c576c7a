"""The points of `make claims-cerar` that are measured on ranks.

cerar_ranks.py wire MIB DTYPE REPEAT
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from _on_ranks import alternate, comm, point

import mpiquant


def ways(dtype: str) -> dict[str, dict[str, Any]]:
    """Options of an allreduce, by what the table calls it."""
    found: dict[str, dict[str, Any]] = {
        "native": {"algorithm": "native"},
        "ring": {"algorithm": "ring"},
    }
    for per_token in (2, 3):
        options = {"algorithm": "cerar", "components": per_token * comm.size}
        found[f"cerar {per_token}N"] = options
    if dtype == "float32":
        found["bf16 ring"] = {"algorithm": "ring", "codec": "bf16"}
        found["q8 ring"] = {"algorithm": "ring", "codec": "q8"}
    return found


def wire(mib: int, dtype: str, repeat: int) -> None:
    """Times, bytes and errors of all ways, in turn."""
    count = (mib << 20) // np.dtype(dtype).itemsize
    x = np.random.default_rng(comm.rank).standard_normal(count).astype(dtype)
    exact = np.empty(count)
    comm.Allreduce(x.astype(np.float64), exact)
    out = np.empty_like(x)

    def run(options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: mpiquant.Allreduce(x, out, comm=comm, **options)

    functions = {name: run(options) for name, options in ways(dtype).items()}
    facts = {}
    for name, options in ways(dtype).items():
        stats = mpiquant.Allreduce(x, out, comm=comm, stats=True, **options)
        error = float(np.linalg.norm(out - exact) / np.linalg.norm(exact))
        every = comm.allgather((error, zlib.crc32(out)))
        facts[name] = {
            "sent": stats.wire_bytes / x.nbytes,
            "messages": stats.messages,
            "error": max(e for e, _ in every),
            "identical": len({h for _, h in every}) == 1,
        }
    times = alternate(functions, 1, repeat)
    point(**{name: {**facts[name], "ms": times[name] / 1e3} for name in facts})


if __name__ == "__main__":
    what, mib, dtype, repeat = sys.argv[1:]
    assert what == "wire"
    wire(int(mib), dtype, int(repeat))
