"""Allreduce of gloo through torch.distributed: plain, and with the casts of DDP's fp16 hook.

One process for each rank, started by a launcher of the hydra kind (MPICH's), whose variables tell
the ranks apart; they then find each other through the first host.  Rank 0 prints the report of
`mpiquant bench`, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def plain(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    dist.all_reduce(out)


def fp16(x: torch.Tensor, out: torch.Tensor) -> None:
    """What `fp16_compress_hook` does with a bucket, for a sum instead of a mean."""
    half = x.to(torch.float16)
    dist.all_reduce(half)
    out.copy_(half)


VARIANTS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], None], int]] = {
    "exact": (plain, 32),
    "fp16": (fp16, 16),
}


def row(name: str, size: int, iters: int, warmup: int, bandwidth: int) -> dict[str, Any]:
    """Time and check one variant; collective."""
    call, bits = VARIANTS[name]
    ranks, count = dist.get_world_size(), size // 4
    generator = np.random.default_rng(dist.get_rank())
    x = torch.from_numpy(generator.standard_normal(count, dtype=np.float32))
    out = torch.zeros_like(x)
    seconds = torch.zeros(warmup + iters, dtype=torch.float64)
    for i in range(warmup + iters):
        dist.barrier()
        begin = time.perf_counter()
        call(x, out)
        seconds[i] = time.perf_counter() - begin
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    right = x.double()
    dist.all_reduce(right)
    error = float((out.double() - right).norm() / right.norm())
    typical, slow = np.percentile(seconds[warmup:].numpy(), (50, 95))
    sent = 2 * (ranks - 1) / ranks * count * bits / 8
    return {
        "size": size,
        "count": count,
        "dtype": "float32",
        "op": "sum",
        "codec": name,
        "bits": bits,
        "algo": "gloo",
        "time_us": typical * 1e6,
        "p95_us": slow * 1e6,
        "algbw": size / typical / 1e9,
        "busbw": size / typical / 1e9 * 2 * (ranks - 1) / ranks,
        "wirebw": sent / typical / 1e9,
        "ratio": 32 / bits,
        "err": error,
        "wrong": 0 if error < (1e-5 if bits == 32 else 1e-2) else count,
        "limit_ratio": typical / (8 * sent / bandwidth) if bandwidth else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", type=int, nargs="+", help="bytes")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--bandwidth", type=int, default=0, help="bit/s")
    parser.add_argument("--host", default="mq0", help="of rank 0")
    parser.add_argument("--port", type=int, default=29500)
    a = parser.parse_args()
    rank, ranks = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    torch.set_num_threads(1)
    where = f"tcp://{a.host}:{a.port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    rows = [
        row(name, size, a.iters, a.warmup, a.bandwidth) for size in a.sizes for name in VARIANTS
    ]
    hosts: list[Any] = [None] * ranks
    dist.all_gather_object(hosts, socket.gethostname())
    if rank == 0:
        environment = {"mpi": f"gloo, torch {torch.__version__}", "hosts": hosts}
        args = {"kind": "allreduce", "bandwidth": a.bandwidth or None, "iters": a.iters}
        report = {"version": torch.__version__, "args": args, "env": environment, "ranks": ranks}
        print(json.dumps({**report, "results": rows}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
