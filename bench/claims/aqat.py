"""`make claims-aqat`: bits that follow the clock, on emulated wires that change meanwhile.

Exit code 1 if a point falls short.  Run it on an otherwise idle machine, as root on Linux, with
.venv/mpich and .venv/openmpi (which `make claims-aqat` makes).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _report import ROOT, Claims, launcher, run_parts

sys.path.insert(0, str(ROOT / "bench" / "lab"))
import cluster
import measure
import replay

from mpiquant.codecs.aqat import LEVELS, AqatCodec
from mpiquant.rate import Trace, Window, oracle

Result = dict[str, Any]

HOSTS = 4
FRAMING = 1.046
"""Bytes on the wire for each one of a message, with 1500 bytes to a packet."""

FIXED = ("exact", "q16", "q8", "q4", "q2")

LAYERS = (16 << 10, *[512 << 10] * 7)


def train(
    mpi: str,
    rate: str,
    task: Result,
    *,
    hosts: int = HOSTS,
    changes: list[replay.Change] | None = None,
    what: str = "train",
) -> Result:
    """What rank 0 of a training run on a new cluster prints."""
    with measure.wire(hosts, rate):
        return on_hosts(mpi, hosts, task, changes, what)


def on_hosts(
    mpi: str, hosts: int, task: Result, changes: list[replay.Change] | None, what: str
) -> Result:
    """The same on a cluster that is up."""
    command = ("aqat_ranks.py", what, json.dumps(task))
    replaying = replay.replaying(changes) if changes else contextlib.nullcontext()
    before = core_seconds()
    with replaying:
        result, done = measure.script(mpi, hosts, *command, limit_s=180)
    busy, idle = core_seconds() - before
    if "-v" in sys.argv:
        print(done.err, file=sys.stderr)
    result["busy"] = 100 * busy / (busy + idle)
    return result


def core_seconds() -> Any:
    """Seconds that all cores of the machine have been busy, and idle: what hosts of a cluster,
    which have cores of their own, would not have to share."""
    words = Path("/proc/stat").read_text().split()
    ticks = np.array(words[1:8], float)  # user, nice, system, idle, iowait, irq, softirq
    idle = ticks[3] + ticks[4]
    return np.array([ticks.sum() - idle, idle]) / os.sysconf("SC_CLK_TCK")


# ---- figures of a run ----


def mean_bits(result: Result, which: str) -> float:
    """Mean over all values of `partial_bits`, of `final_bits`, or of "both"."""
    names = ("partial_bits", "final_bits") if which == "both" else (which,)
    weights = [row["values"] for row in result["rows"]]
    return float(
        np.mean([np.average([r[n] for r in result["rows"]], weights=weights) for n in names])
    )


def hidden_s(result: Result) -> float:
    """Hidden share of the communication of all buckets."""
    shares = [(row["hidden"], row["values"]) for row in result["rows"]]
    return float(np.average([h for h, _ in shares], weights=[v for _, v in shares]))


def windows_of(result: Result, hosts: int = HOSTS) -> list[Window]:
    """When each bucket was ready and due in the median step, without the waits."""
    steps = min(len(turns) for ranks in result["turns"] for turns in ranks)
    # By rank, bucket, step: ready, need, done, wait.
    turns = np.array([[t[-steps:] for t in ranks] for ranks in result["turns"]], float)[..., :4]
    first = turns[:, 0, :, 0].mean(axis=0)
    ready = np.median(turns[..., 0].max(axis=0) - first, axis=1)
    spans = [row["overlappable_s"] for row in result["rows"]]
    return [
        Window(float(begin), float(begin + span), 2 * (hosts - 1) / hosts * row["values"])
        for begin, span, row in zip(ready, spans, result["rows"], strict=True)
    ]


def best_bits(windows: list[Window], rate: float, lowest: float = 2.0) -> float:
    """The oracle's mean width on a steady link of so many bits per second, without the scales."""
    sent = oracle(Trace([-1e9], [rate / 8 / FRAMING]), windows, lowest).bits
    levels = AqatCodec(lowest=1).levels(np.dtype(np.float32))
    return float(np.interp(sent, levels.costs, levels.bits))


def place(bits: float) -> float:
    """Place among the levels: 3.5 between the fourth and the fifth."""
    return float(np.interp(bits, LEVELS, range(len(LEVELS))))


# ---- steady links ----


STEADY = {"200mbit": 0.2, "1gbit": 0.15}
"""Rates, and the computation of a step: some 6 bits fit, and more than 16."""


def steady(claims: Claims) -> None:
    for (rate, step_s), mpi in itertools.product(STEADY.items(), ("mpich", "openmpi")):
        result = train(mpi, rate, {"step_s": step_s, "run_s": 14})
        name = f"{mpi}, 4 hosts, {rate}, 8 buckets"
        share = 100 * result["wire_wait_ms"] / result["median_step_ms"]
        claims.at_most(f"{name}: waiting for the wire, % of the step", share, 5)
        best = best_bits(windows_of(result), cluster.parse_rate(rate))
        bits = mean_bits(result, "both")
        shown = f"{bits:.2f} (b* {best:.2f})"
        if mpi == "mpich":
            holds = place(bits) >= place(best) - 1
            claims.check(f"{name}: mean bits", shown, "a level below", holds)
        else:
            claims.report(f"{name}: mean bits", shown)
        halves = [place(mean_bits(result, half)) for half in ("partial_bits", "final_bits")]
        claims.at_most(f"{name}: levels of RS and AG apart", abs(halves[0] - halves[1]), 1)
        claims.report(f"{name}: cores busy, %", result["busy"])


# ---- a link that changes ----

PERIOD_S = 12.0
SLOWEST = 100e6


def changing(hosts: int = HOSTS) -> list[replay.Change]:
    """Steps between 1 Gbit/s, 300 and 100 Mbit/s, and one slow link out of all."""
    changes = []
    for begin in np.arange(0.0, 120.0, PERIOD_S):
        for at_s, rate in ((0, 1e9), (3, 300e6), (6, 100e6), (9, 1e9)):
            changes.append(replay.Change(begin + at_s, int(rate), None))
        changes.append(replay.Change(begin + 9, int(SLOWEST), hosts - 1))
    return changes


def step_for_two_bits(hosts: int = HOSTS) -> float:
    """Computation of a step in which 2 bits just hide on the slowest link."""
    values = 2 * (hosts - 1) / hosts * sum(LAYERS)
    # Nothing hides before the first gradient of a step, a twelfth of it, nor behind the last
    # one's need, two thirds of a twelfth; and a tenth is in reserve.
    return values * (2 + 32 / 512) / 8 * FRAMING / (SLOWEST / 8) * 1.25


def trace(claims: Claims) -> None:
    step_s, run_s = step_for_two_bits(), 3 * PERIOD_S
    task = {"step_s": step_s, "run_s": run_s}
    runs = {
        codec: train("mpich", "1gbit", {**task, "codec": codec}, changes=changing())
        for codec in ("aqat", *FIXED)
    }
    runs["AQGB"] = train("mpich", "1gbit", {**task, "algorithm": "broadcast"}, changes=changing())
    print(
        f"{'codec':>8} {'step ms':>9} {'wire wait ms':>13} {'peer wait ms':>13} {'RS bits':>8} "
        f"{'AG bits':>8} {'error':>9} {'ROW':>7} {'loss at 1/6, 1/3 and all':>29}"
    )
    for codec, run in runs.items():
        widths = [float(codec[1:])] * 2 if codec[0] == "q" else [32.0] * 2
        if codec in ("aqat", "AQGB"):
            widths = [mean_bits(run, "partial_bits"), mean_bits(run, "final_bits")]
        waited, shown = run["wire_wait_ms"], [row["row"] for row in run["rows"]]
        loss = " ".join(f"{loss_at(run, at_s):>9.3g}" for at_s in (run_s / 6, run_s / 3, run_s - 1))
        print(
            f"{codec:>8} {run['step_ms']:>9.1f} {waited:>13.2f} {run['peer_wait_ms']:>13.2f} "
            f"{widths[0]:>8.2f} {widths[1]:>8.2f} {np.mean(run['errors']):>9.4f} "
            f"{np.median(shown):>7.0f} {loss}"
        )
    ours, two = runs["aqat"], runs["q2"]
    more = 100 * (ours["wire_wait_ms"] - two["wire_wait_ms"]) / (1e3 * step_s)
    claims.at_most("changing links: more waiting than 2 bits, % of T", more, 2)
    claims.at_least("changing links: mean bits / 2", mean_bits(ours, "both") / 2, 1.5)
    claims.report("changing links: cores busy, %", ours["busy"])


def loss_at(run: Result, time_s: float) -> float:
    """Of the last step that had begun by then."""
    return float([loss for at, loss in run["losses"] if at <= time_s][-1])


# ---- a link that collapses, and one that recovers ----


def one_change(task: Result, rate: int, delay_s: float, hosts: Iterable[int] = (1,)) -> Result:
    """Calls during which the rate of some hosts changes, some time into the marked one."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "now"

        over = threading.Event()

        def change() -> None:
            while not marker.exists():
                if over.wait(0.001):
                    return
            time.sleep(delay_s)
            for host in hosts:
                cluster.set_rate(f"{cluster.PREFIX}{host}", rate)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            return on_hosts("mpich", HOSTS, {**task, "marker": str(marker)}, None, "calls")
        finally:
            over.set()
            thread.join()


def collapse(claims: Claims) -> None:
    count = 8 << 20
    budget_s = 1.5 * count * 8.06 / 200e6 * FRAMING / 0.95  # 8 bits fit
    task = {"count": count, "budget_s": budget_s, "calls": 6, "mark_at": 4}
    for in_parts in (True, False):
        with measure.wire(HOSTS, "200mbit"):
            found = one_change({**task, "in_parts": in_parts}, 20_000_000, budget_s / 4)
        call = found["calls"][4]
        how = "in parts" if in_parts else "in one piece"
        over = 1e3 * (call["taken_s"] - budget_s)
        claims.report(f"link collapses 10x in a call, messages {how}: late, ms", over)
        point = f"link collapses 10x in a call, messages {how}: late groups"
        if in_parts:
            claims.at_most(point, call["late_parts"], 2)
        else:
            claims.report(point, call["late_parts"])
        claims.report(f"the same: messages cut, {how}", call["cut"])
        claims.at_most("the same: what outputs and residuals lack of the sums", found["lost"], 1e-2)
        claims.check(
            "the same: all ranks alike", str(found["identical"]), "True", found["identical"]
        )


def recovery(claims: Claims) -> None:
    count, budget_s = 4 << 20, 0.25
    with measure.wire(HOSTS, "100mbit"):
        task = {"count": count, "budget_s": budget_s, "calls": 20, "mark_at": 8}
        found = one_change(task, 10**9, 0.0, range(HOSTS))
    bits = [float(np.mean(call["bits"])) for call in found["calls"]]
    claims.report("100 -> 1000 Mbit/s: bits before", bits[7])
    steady_bits = float(np.median(bits[14:]))
    back = place(steady_bits) - 1
    reached = next((k for k, b in enumerate(bits[8:], 1) if place(b) >= back), 99)
    claims.report("100 -> 1000 Mbit/s: bits of the calls", " ".join(f"{b:.0f}" for b in bits[7:14]))
    claims.report("100 -> 1000 Mbit/s: bits in the end", steady_bits)
    claims.at_most("100 -> 1000 Mbit/s: calls until the bits are back", reached, 5)


# ---- what control costs ----


def costs(claims: Claims) -> None:
    count, budget_s = 8 << 20, 0.25
    task = {"count": count, "budget_s": budget_s, "calls": 12}
    with measure.wire(HOSTS, "1gbit"):
        ours = on_hosts("mpich", HOSTS, task, None, "calls")
        fixed = on_hosts("mpich", HOSTS, {**task, "codec": "q8"}, None, "calls")
    mine, other = ours["calls"][-1], fixed["calls"][-1]
    control_s = float(np.median([call["controller_s"] for call in ours["calls"][2:]]))
    claims.at_most(
        "control, % of the CPU time of a call at 8 bits", 100 * control_s / fixed["cpu_s"], 1
    )
    more = mine["header_bytes"] - other["header_bytes"]
    claims.at_most("more headers, % of the bytes at 8 bits", 100 * more / other["wire_bytes"], 1)
    claims.report("CPU time of a call, ours / at 8 bits", ours["cpu_s"] / fixed["cpu_s"])


# ---- the same everywhere, and exact where there is time ----


def identity(claims: Claims) -> None:
    for mpi in ("mpich", "openmpi"):
        task = {"step_s": 0.15, "run_s": 14, "check": True}
        found = train(mpi, "1gbit", task, changes=changing())
        point = f"{mpi}, changing links, {found['steps']} steps: all sums of all ranks alike"
        claims.check(point, str(found["identical"]), "True", found["identical"])


def exact(claims: Claims) -> None:
    for mpi in ("mpich", "openmpi"):
        found = train(mpi, "1gbit", {"step_s": 1.5, "run_s": 16, "late_s": 6})
        bits = [t[4:] for turns in found["turns"][0][:-1] for t in turns[3:]]
        least = float(np.min(bits))
        claims.check(f"{mpi}, long steps: least bits", least, "32", least == 32)


# ---- whole steps ----


def overlap(claims: Claims) -> None:
    for mpi in ("mpich", "openmpi"):
        real = {"step_s": 0, "batch": 256, "run_s": 15, "layers": [4096, *[512 << 10] * 8]}
        found = train(mpi, "1gbit", real, hosts=2)
        claims.at_least(
            f"{mpi}, 2 hosts, 16 MiB, NumPy computes: hidden, %", 100 * hidden_s(found), 90
        )
        found = train(mpi, "1gbit", {"step_s": 0.2, "run_s": 12})
        claims.at_least(f"{mpi}, 4 hosts, stand-in: hidden, %", 100 * hidden_s(found), 90)


def survivors(claims: Claims) -> None:
    script = str(ROOT / "bench" / "claims" / "aqat_ranks.py")
    options = json.dumps({"steps": 60, "lost": 2, "lost_at": 25})
    mpiexec, environment = launcher(ROOT / ".venv" / "openmpi" / "bin")
    python = str(ROOT / ".venv" / "openmpi" / "bin" / "python")
    ulfm = ["--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"]
    command = [*mpiexec, *ulfm, "-n", "4", python, "-m", "mpi4py", script]
    done = subprocess.run(
        [*command, "survive", options], env=environment, capture_output=True, text=True, timeout=120
    )
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    well = found["ranks"] == 3 and found["alike"] and found["right"] and found["steps"] == 60
    point = "Open MPI, ULFM, one of 4 ranks is killed in a step: 3 go on, replicas alike"
    claims.check(point, str(well), "True", well)
    claims.report("the same: time lost, ms", 1e3 * found["lost_s"])
    claims.report("the same: a step, ms", 1e3 * found["step_s"])


PARTS = {
    "steady": steady,
    "trace": trace,
    "collapse": collapse,
    "recovery": recovery,
    "costs": costs,
    "identity": identity,
    "exact": exact,
    "overlap": overlap,
    "survivors": survivors,
}


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
