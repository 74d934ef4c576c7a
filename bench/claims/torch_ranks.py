"""The points of `make claims-sparse` about PyTorch that are measured on ranks.

torch_ranks.py overhead REPEAT
torch_ranks.py resumed STEPS
"""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _on_ranks import comm, point

import mpiquant.torch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
import gpt

BATCH = 16

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's `mallopt`."""


def _model() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return gpt.GPT(gpt.text()[2])


def _step(model: Any, optimizer: Any, step: int) -> float:
    rng = np.random.default_rng([step, comm.rank])
    codes = gpt.windows(gpt.text()[0], BATCH, model.context + 1, rng)
    begin = time.perf_counter()
    optimizer.zero_grad()
    model.loss(codes).backward()
    optimizer.step()
    return time.perf_counter() - begin


def keep_memory() -> None:
    """Have what is freed not given back to the system.

    By itself either model makes glibc give back, and the system zero again, some 1,500 to 1,800
    pages in each step; with both in one process, only one of the two has that done to it, by where
    its arrays happen to lie: 2 to 3 % of a step.
    """
    with suppress(AttributeError):  # another libc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 1 << 25)
        library.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def overhead(repeat: int) -> None:
    """Steps of one rank, for which the link is free, with the plain and the wrapped optimizer."""
    keep_memory()
    plain, wrapped = _model(), _model()
    adam = torch.optim.Adam(plain.parameters())
    inner = torch.optim.Adam(wrapped.parameters())
    named = wrapped.named_parameters()
    options = {"codec": "q4", "comm": comm}
    distributed = mpiquant.torch.DistributedOptimizer(inner, named, **options)
    seconds: dict[str, list[float]] = {"plain": [], "wrapped": []}
    for step in range(repeat):
        turn = [("plain", plain, adam), ("wrapped", wrapped, distributed)]
        for name, model, optimizer in turn if step % 2 else turn[::-1]:
            seconds[name].append(_step(model, optimizer, step))
    pairs = np.array([seconds["wrapped"], seconds["plain"]])[:, 2:]
    wrapped_s, plain_s = np.median(pairs, axis=1)
    # Of neighbours: the speed of the machine drifts.
    point(wrapped=wrapped_s, plain=plain_s, ratio=float(np.median(pairs[0] / pairs[1])))


def resumed(steps: int) -> None:
    """Whether training from a checkpoint goes as it would have gone without a break."""

    def train(until: int, state: Any = None, first: int = 0) -> tuple[Any, Any]:
        model = _model()
        adam = torch.optim.Adam(model.parameters())
        optimizer = mpiquant.torch.DistributedOptimizer(
            adam, model.named_parameters(), codec="q4", comm=comm
        )
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for step in range(first, until):
            _step(model, optimizer, step)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        optimizer.close()
        return whole, {n: p.detach().numpy().copy() for n, p in model.named_parameters()}

    _, right = train(2 * steps)
    half, _ = train(steps)
    file = Path(f"/tmp/mpiquant-resumed-{comm.rank}.pt")
    torch.save(half, file)
    _, found = train(2 * steps, torch.load(file, weights_only=False), steps)
    file.unlink()
    same = all(np.array_equal(right[name], found[name]) for name in right)
    point(same=all(comm.allgather(same)), parameters=sum(p.size for p in right.values()))


if __name__ == "__main__":
    what, argument = sys.argv[1:]
    {"overhead": overhead, "resumed": resumed}[what](int(argument))
