"""`make claims-sparse`: sparse sums, what they cost and what training makes of them.

Exit code 1 if a point falls short.  Run it on an otherwise idle machine, as root on Linux, with
.venv/mpich (which `make claims-sparse` makes).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _report import ROOT, Claims, rows_on_ranks, run_parts

sys.path.insert(0, str(ROOT / "bench" / "lab"))
import measure

from mpiquant import SGD
from mpiquant.codecs import BlockRandomKCodec, RandomKCodec, Sparsifier, ThresholdCodec, TopKCodec

# ---- sums ----


def identity(claims: Claims) -> None:
    """Nothing is lost; and what is drawn is not sent."""
    for ranks in (2, 4, 8):
        for row in rows_on_ranks(ranks, "sparse_ranks.py", "identity"):
            name = f"{ranks} ranks, {row['way']}"
            claims.at_most(f"{name}: sent and kept, away from the inputs", row["away"], 1e-9)
            if row["drawn"]:
                # Each rank's values cross as many links as a ring of them all needs.
                shared = "allreduce" in row["way"]
                links = 2 * (ranks - 1) if shared else ranks * (ranks - 1)
                more = row["sent"] - links * row["values"]
                claims.check(f"{name}: bytes beside the values", more, "0", more == 0)


def selection(claims: Claims) -> None:
    """Choosing positions, on one core: gigabytes of the array a second; beside np.argpartition."""
    x = np.random.default_rng(0).standard_normal(1 << 24).astype(np.float32)
    sgd = SGD({"w": np.zeros_like(x)}, rate=0.1, momentum=0.9)
    update_s = _median(lambda: sgd.update("w", x), 5)
    for codec in (TopKCodec(), ThresholdCodec(), RandomKCodec(), BlockRandomKCodec()):
        claims.report(f"{_name(codec)} 1 %, 64 MiB float32: selection, GB/s", _speed(codec, x))
        ratio = _median(lambda codec=codec: _encode(codec, x), 5) / update_s
        claims.report(f"{_name(codec)} 1 %: encoding / an SGD update of as many values", ratio)
    top_k = _speed(TopKCodec(), x)
    claims.at_least("top_k 1 %: selection, GB/s", top_k, 1.0)
    k = TopKCodec().most(x.size)
    plain = x.nbytes / 1e9 / _median(lambda: np.argpartition(np.abs(x), -k), 3)
    claims.report("np.argpartition of magnitudes, GB/s", plain)


def _encode(codec: Sparsifier, rest: Any) -> Any:
    """What a rank does before it sends, but for the codec of the values."""
    at = codec.positions(rest, 1)
    values = rest[at]
    rest[at] = values
    return values


def _speed(codec: Sparsifier, x: Any) -> float:
    return float(x.nbytes / 1e9 / _median(lambda: codec.positions(x, 1), 9))


def _name(codec: Sparsifier) -> str:
    return codec.spec.partition("(")[0]


def _median(function: Callable[[], Any], repeat: int) -> float:
    taken = []
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))


def aggregation(claims: Claims) -> None:
    """16 MiB at 1 Gbit/s: what adding up costs as ranks grow."""
    rows = {}
    for hosts in (2, 4, 8):
        with measure.wire(hosts, "1gbit"):
            command = ("sparse_ranks.py", "aggregation", "16", "9")
            rows[hosts] = measure.script("mpich", hosts, *command, limit_s=300)[0]
    for way in rows[2]:
        shown = " ".join(f"{row[way]:.1f}" for row in rows.values())
        claims.report(f"{way}: ms at 2, 4, 8 hosts", shown)
    for hosts, row in rows.items():
        ratio = row["block_random_k, allgather"] / row["block_random_k, allreduce"]
        point = f"{hosts} hosts, block_random_k: time of allgather / allreduce"
        claims.report(point, ratio)


def hierarchical(claims: Claims) -> None:
    """4 hosts, q8, 16 MiB: bytes that leave a host, by its interface, with 1 and 2 ranks each."""
    sent = {}
    for ppn in (1, 2):
        with measure.wire(4, "1gbit"):
            command = ("sparse_ranks.py", "hierarchical", "16")
            row, done = measure.script("mpich", 4, *command, limit_s=120, ppn=ppn)
        least = row["calls"] * 2 * 3 / 4 * row["bytes"]
        sent[ppn] = max(done.sent.values())
        point = f"hierarchical, 4 hosts of {ppn}: bytes of a host / 2(M-1)/M of the encoded array"
        claims.report(point, sent[ppn] / least)
    claims.at_most("bytes of a host with 2 ranks / with 1 rank", sent[2] / sent[1], 1.02)


# ---- training ----


SEEDS, STEPS = 5, 500


def training(claims: Claims) -> None:
    """The digits network on 4 ranks, 1 % of the values, paired by seed."""
    found: dict[str, dict[int, float]] = {}
    for row in rows_on_ranks(4, "sparse_ranks.py", "train", str(SEEDS), str(STEPS), limit=1800):
        found.setdefault(row["way"], {})[row["seed"]] = row["accuracy"]
    figures = {way: np.array([of[seed] for seed in sorted(of)]) for way, of in found.items()}
    for way, accuracy in figures.items():
        claims.report(f"digits, {way}: accuracy, %", _with_error(accuracy))
    for better, worse in (
        ("top_k", "top_k, global"),
        ("block_random_k", "block_random_k, global"),
        ("random_k", "random_k, global"),
        ("top_k", "block_random_k"),
        ("block_random_k", "random_k"),
        ("top_k", "random_k"),
        ("exact", "top_k"),
    ):
        gain = figures[better] - figures[worse]
        claims.report(f"{better} over {worse}, points", f"{_with_error(gain)}: {_verdict(gain)}")


def _with_error(values: Any) -> str:
    return f"{values.mean():.2f} +- {values.std(ddof=1) / len(values) ** 0.5:.2f}"


def _verdict(gain: Any) -> str:
    """What paired differences say about "the first is better"."""
    error = 2 * gain.std(ddof=1) / len(gain) ** 0.5
    if gain.mean() > error:
        return "confirmed"
    return "refuted" if gain.mean() < -error else "no difference seen"


PARTS = {
    "identity": identity,
    "selection": selection,
    "aggregation": aggregation,
    "hierarchical": hierarchical,
    "training": training,
}


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
