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

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "bench" / "lab"))
sys.path.insert(0, str(ROOT / "docs" / "examples"))
import compare
import compare_report
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


# ---- a bound on the error ----

ARRAYS = 10_000


def bounded(claims: Claims) -> None:
    """Errors over their bounds, of 10^4 arrays on 2 to 8 ranks; and how much is sent."""
    tried, refused, worst = 0, 0, {}
    for ranks in range(2, 9):
        # Some more than a seventh: bounds below the rounding of the dtype are refused.
        count = str(ARRAYS // 7 + 100)
        (row,) = rows_on_ranks(ranks, "bounded_ranks.py", "errors", count)
        tried, refused = tried + row["tried"], refused + sum(row["refused"].values())
        for kind, ratio in row["worst"].items():
            worst[kind] = max(worst.get(kind, 0.0), ratio)
    claims.at_least("arrays whose error was measured", tried, ARRAYS)
    claims.report("arrays whose bound was refused as below rounding", refused)
    for kind, ratio in worst.items():
        claims.at_most(f"bounded, {kind}: largest error / bound", ratio, 1.0)
    published = {"smooth": "ZCCL: 25", "N(0,1)": "ZCCL: 3.2"}
    for row in rows_on_ranks(4, "bounded_ranks.py", "ratios", "64"):
        point = f"bounded, {row['data']}, relative {row['relative']:g}: raw / sent"
        claims.report(point, f"{row['ratio']:.1f} ({published[row['data']]})")


# ---- training ----


SEEDS, STEPS, GPT_STEPS = 5, 500, 500


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
        ("block_random_k 10 %", "block_random_k"),
        ("exact", "block_random_k 10 %"),
        ("exact", "local SGD 8"),
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


# ---- PyTorch ----


def pytorch(claims: Claims) -> None:
    """What the optimizer adds to a step, and a checkpoint that is resumed."""
    (row,) = rows_on_ranks(1, "torch_ranks.py", "overhead", "160", mpi="torch")
    claims.at_most("wrapped optimizer, one rank: time of a step / plain", row["ratio"], 1.05)
    for ranks in (1, 2, 4):
        (row,) = rows_on_ranks(ranks, "torch_ranks.py", "resumed", "5", mpi="torch")
        point = f"{ranks} ranks, q4: parameters behind a resumed checkpoint, bit for bit"
        claims.check(point, "same" if row["same"] else "other", "same", row["same"])


FASTER, CLOSE = 5.0, 1.01
LOSSY = ("8 bit", "4 bit", "4 bit direct", "local SGD 2 at 4 bit")


def transformer(claims: Claims) -> None:
    """The GPT of docs/examples at 100 Mbit/s: seconds to the loss that exact training ends with.

    Steps are measured without a limit of the network, seconds as the median of 50 steps with it.
    """
    methods = ",".join(("exact", *LOSSY))
    steps = compare.unlimited("gpt", methods=methods, steps=GPT_STEPS, every=20)
    short = compare.limited("gpt", "100mbit", methods=methods, steps=compare.SHORT, every=0)
    rows = compare_report.summarize({"steps": steps, "rates": {"100mbit": short}})
    exact = rows[0]
    for row in rows:
        name, ratio = row["method"], row["loss"][0] / exact["loss"][0]
        claims.report(f"gpt, {name}: validation loss / that of exact", ratio)
        taken = compare_report.seconds(row, "100mbit")
        shown = "not reached" if taken is None else f"{taken:.0f}"
        claims.report(f"gpt, {name}: seconds to the loss of exact, 100 Mbit/s", shown)
    good = [r for r in rows[1:] if r["loss"][0] <= CLOSE * exact["loss"][0] and r["identical"]]
    timed = [(compare_report.seconds(r, "100mbit"), r["method"]) for r in good if r["steps"]]
    claims.at_least("gpt: lossy methods within 1 % of its loss, replicas alike", len(timed), 1)
    best, name = min(timed)
    faster = compare_report.seconds(exact, "100mbit") / best
    claims.at_least(f"gpt, {name}: times as fast as exact, 100 Mbit/s", faster, FASTER)


PARTS = {
    "identity": identity,
    "selection": selection,
    "bounded": bounded,
    "aggregation": aggregation,
    "hierarchical": hierarchical,
    "training": training,
    "pytorch": pytorch,
    "transformer": transformer,
}


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
