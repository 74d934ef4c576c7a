"""`make claims-cerar`: the coded ring, against its formulas, the ring and MPI's own allreduce.

Exit code 1 if a point falls short.  Run it on an otherwise idle machine, as root on Linux, with
.venv/mpich (which `make claims-cerar` makes).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from _report import ROOT, Claims, rows_on_ranks, run_parts

sys.path.insert(0, str(ROOT / "bench" / "lab"))
sys.path.insert(0, str(ROOT / "tests" / "unit"))
import measure
from coded_ring_oracle import outputs, worst_error

from mpiquant import _kernels
from mpiquant.collectives.coding import Perturbed, RootsOfUnity, design
from mpiquant.execute import WINDOW

TABLE = {  # c / N: eps, error and condition number in float32; eps and error in float64
    2: (3e-4, 2.3e-4, 6.7e3, 1e-8, 1.3e-8),
    3: (1e-2, 5.2e-3, 9.0e4, 1e-5, 6.6e-6),
    4: (3e-2, 2.8e-2, 1.7e6, 3e-4, 1.5e-4),
}


# ---- errors ----


def errors(claims: Claims) -> None:
    """On N(0,1) data, with rounding at each hop, against the table."""
    rng = np.random.default_rng(0)
    for size in (3, 4, 5, 8):
        for per_token, (eps, error, condition, eps64, error64) in TABLE.items():
            g = rng.standard_normal((size, per_token * size, 2000))
            for dtype, spread, bound in ((np.float32, eps, error), (np.float64, eps64, error64)):
                code = Perturbed(size, per_token * size, spread)
                typed = g.astype(dtype)
                found = worst_error(outputs(code, typed, dtype), typed.astype(np.float64))
                name = f"N = {size}, c = {per_token}N, {np.dtype(dtype)}"
                holds = bound / 2 < found < bound * 2
                claims.check(f"{name}: error", found, f"{bound:.2g} x/: 2", holds)
            code = Perturbed(size, per_token * size, eps)
            off = abs(code.condition / condition - 1)
            claims.at_most(f"N = {size}, c = {per_token}N: condition number off by", off, 0.1)
            plain = design(size, per_token * size, balanced=False)
            gain = plain.error / design(size, per_token * size).error
            claims.report(f"N = {size}, c = {per_token}N: balanced weights, times less error", gain)


def laws(claims: Claims) -> None:
    """How error and condition number follow eps, for all c in N+1 ... 3N."""
    spreads = np.geomspace(1e-3, 1e-2, 4)
    for size in (3, 4, 5, 8):
        rows = []
        for components in range(size + 1, 3 * size + 1):
            kinds = [RootsOfUnity] + [Perturbed] * (components % size == 0)
            for kind in kinds:
                codes = [kind(size, components, eps) for eps in spreads]
                bias = _slope(spreads, [code.bias for code in codes])
                power = _slope(1 / spreads, [code.condition for code in codes])
                rows.append((bias, abs(power - codes[0].order)))
        low, high = min(r[0] for r in rows), max(r[0] for r in rows)
        shown = f"{low:.3f} to {high:.3f}"
        holds = low >= 0.9 and high <= 1.1
        claims.check(f"N = {size}: slopes of the error", shown, "0.9 to 1.1", holds)
        claims.at_most(f"N = {size}: slopes of the condition off by", max(r[1] for r in rows), 0.1)


def _slope(xs: Any, ys: Any) -> float:
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def lasting(claims: Claims) -> None:
    """What many calls of one array add up to, and whether a sender could do anything about it."""
    for size in (4, 8):
        for per_token in (2, 3, 4):
            found = design(size, per_token * size).code
            assert isinstance(found, Perturbed)
            name = f"N = {size}, c = {per_token}N, float32, what lasts"
            plain, flipped = (_weights(replace(found, flipped=flip)) for flip in (False, True))
            own_exact = _weights(replace(found, balanced=False))
            for way, weights in (("own values exact", own_exact), ("balanced", plain)):
                claims.report(f"{name}: error / eps, {way}", _lasting_error(weights) / found.eps)
            both = _lasting_error((plain + flipped) / 2) / found.eps**2
            claims.at_most(f"{name}: error / eps^2, every other call flipped", both, 1)
            # The best factor for a source minimizes the sum of (s w - 1)^2 over its receivers.
            best = plain.sum(axis=1, keepdims=True) / (plain**2).sum(axis=1, keepdims=True)
            gain = 1 - _lasting_error(best * plain) / _lasting_error(plain)
            claims.at_most(f"{name}: less error by any correction of a sender, %", 100 * gain, 1)


def _weights(code: Perturbed) -> Any:
    """(R, N, N) array: of a source's values, along the last axis, at a receiver."""
    return np.array([code.weights(q) for q in range(code.per_token)])


def _lasting_error(weights: Any) -> float:
    """Relative error of independent sources, in exact arithmetic."""
    return float(np.sqrt(np.mean((weights - 1) ** 2)))


def precision(claims: Claims) -> None:
    """Fewer bits on the wire: tokens rounded to float32 for float64 data, to bfloat16 for float32.

    Each hop rounds, so the best eps is that of the narrower format; beside it, the error of a ring
    with the same bytes and that rounding.
    """
    rng = np.random.default_rng(0)
    size, count = 4, 4000
    for wide, narrow, spacing in (
        ("float64", "float32", float(np.finfo(np.float32).eps)),
        ("float32", "bfloat16", 2.0**-7),
    ):
        for per_token in (2, 3):
            code = _best_code(size, per_token, spacing)
            g = rng.standard_normal((size, code.components, count))
            found = worst_error(_rounded(code, g, spacing), g)
            whole = design(size, code.components, wide, balanced=False).error
            name = f"N = {size}, c = {per_token}N, {wide} data"
            claims.report(f"{name}: error with tokens in {narrow}", found)
            claims.report(f"{name}: the same / error with tokens in {wide}", found / whole)
        ring = Perturbed(size, size, 0.0)
        g = rng.standard_normal((size, size, count))
        claims.report(
            f"N = {size}, {wide} data: error of a ring in {narrow}",
            worst_error(_rounded(ring, g, spacing), g),
        )


def _best_code(size: int, per_token: int, spacing: float) -> Perturbed:
    """The code with the least error for a format of this spacing at 1."""
    unit = float(np.finfo(np.float64).eps)
    codes = [Perturbed(size, per_token * size, eps) for eps in np.geomspace(1e-4, 0.5, 200)]
    return min(codes, key=lambda code: math.hypot(code.bias, code.rounding("f8") * spacing / unit))


def _rounded(code: Perturbed, g: Any, spacing: float) -> Any:
    """The oracle's outputs, with tokens in a format of this spacing at 1."""

    def rounded(values: Any) -> Any:
        mantissa, exponent = np.frexp(values)
        step = spacing / 2
        return np.ldexp(np.round(mantissa / step) * step, exponent)

    return outputs(code, g, np.float64, rounded)


# ---- time ----


def wire(claims: Claims) -> None:
    """4 and 8 hosts at 1 Gbit/s, 64 MiB: time against the ring's and native's in one run."""
    for size in (4, 8):
        for dtype in ("float32", "float64"):
            rows = _on_hosts(size, "64", dtype, "9")
            ring_rate = 2 * (size - 1) / size
            for per_token in (2, 3):
                c = per_token * size
                row, rate = rows[f"cerar {per_token}N"], (c + size - 2) / c
                name = f"{size} hosts, 1gbit, 64 MiB {dtype}, c = {per_token}N"
                claims.check(
                    f"{name}: bytes sent, times the array",
                    row["sent"],
                    f"{rate:.4g}",
                    math.isclose(row["sent"], rate, rel_tol=1e-4),
                )
                figure = row["ms"] / rows["ring"]["ms"] / (rate / ring_rate)
                point = f"{name}: time / ring's, over the ratio of rates"
                claims.check(point, figure, "1 +- 0.1", abs(figure - 1) <= 0.1)
                claims.report(f"{name}: time / native's", row["ms"] / rows["native"]["ms"])
            _print_table(f"{size} hosts, {dtype}", rows)


def _on_hosts(size: int, *arguments: str) -> dict[str, Any]:
    with measure.wire(size, "1gbit"):
        command = ("cerar_ranks.py", "wire", *arguments)
        found: dict[str, Any] = measure.script("mpich", size, *command, limit_s=600)[0]
    return found


def _print_table(name: str, rows: dict[str, Any]) -> None:
    print(f"\n{name:>24} {'ms':>9} {'sent / array':>13} {'error':>10}  identical")
    for way, row in sorted(rows.items(), key=lambda item: -item[1]["ms"]):
        print(
            f"{way:>24} {row['ms']:>9.1f} {row['sent']:>13.3f} {row['error']:>10.1e}  "
            f"{'yes' if row['identical'] else 'no'}"
        )
    print()


# ---- kernels ----


HOP = 1 << 17
"""About what a segment has."""


def kernels(claims: Claims) -> None:
    """Encoding and decoding against copies that move as many bytes."""
    for dtype in (np.float32, np.float64):
        for per_token in (2, 3, 4):
            code = Perturbed(4, 4 * per_token, 1e-2)
            n = (32 << 20) // np.dtype(dtype).itemsize // per_token
            blocks = [np.ones(n, dtype) for _ in range(per_token + 1)]
            name = f"{np.dtype(dtype)}, R = {per_token}: times a copy's throughput"
            figure = _against_copy(code.encoding(0), blocks[:per_token], blocks)
            claims.at_least(f"encode, {name}", figure, 0.9)
            figure = _against_copy(code.decoding(0), blocks[1:], blocks[:per_token])
            claims.at_least(f"decode, {name}", figure, 0.9)
        point = f"a hop of {HOP} values, {np.dtype(dtype)}: time / np.add's"
        claims.at_most(point, _hop_over_add(dtype), 1.05)


def _hop_over_add(dtype: Any) -> float:
    values, token = np.ones((2, HOP), dtype)
    wire = token.view(np.uint8)
    return _times_as_fast(
        lambda: np.add(values, token, out=values), lambda: _kernels.add(wire, values)
    )


def _against_copy(matrix: Any, sources: list[Any], outs: list[Any]) -> float:
    """Throughput of mixing over that of a copy that reads and writes as many bytes."""
    n = len(sources[0]) * (len(sources) + len(outs)) // 2
    a, b = np.ones((2, n), sources[0].dtype)
    return _times_as_fast(lambda: _kernels.mix(matrix, sources, outs), lambda: np.copyto(a, b))


def _times_as_fast(ours: Callable[[], Any], theirs: Callable[[], Any]) -> float:
    """Median ratio of times, in turn."""
    ratios = []
    for _ in range(31):
        begin = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        ratios.append((time.perf_counter() - middle) / (middle - begin))
    return float(np.median(ratios[1:]))


def rounds(claims: Claims) -> None:
    """Messages and bytes, counted, for each kind of c; and the ring that c = N is."""
    for size in (3, 4, 8):
        for row in rows_on_ranks(size, "cerar_ranks.py", "rounds"):
            c = row["components"]
            name = f"{size} ranks, c = {c}"
            expected = c + size - 2
            claims.check(f"{name}: rounds", row["rounds"], f"{expected}", row["rounds"] == expected)
            rate = expected / c
            holds = math.isclose(row["sent"], rate, rel_tol=1e-12)
            claims.check(f"{name}: bytes sent, times the array", row["sent"], f"{rate:.4g}", holds)
            if c == size:
                claims.at_most(f"{name}: away from the ring's sum", row["away"], 1e-15)


def memory(claims: Claims) -> None:
    """A call's memory beside its arrays: N components, and receives of a segment each."""
    for row in rows_on_ranks(4, "cerar_ranks.py", "memory"):
        name = f"4 ranks, 64 MiB, c = {row['components']}: memory beside the arrays"
        claims.report(f"{name}, times the array", row["array"])
        claims.at_most(f"{name} and N components, in segments", row["segments"], WINDOW)


# ---- training ----


SEEDS, STEPS = 8, 500


def training(claims: Claims) -> None:
    """The digits network on 4 ranks, c = 2N, against exact training, paired by seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_on_ranks(4, "cerar_ranks.py", "train", str(SEEDS), str(STEPS)):
        found.setdefault(row["way"], []).append(row)

    def figures(way: str, name: str) -> Any:
        return np.array([row[name] for row in found[way]])

    for way in ("cerar", "cerar, resync"):
        name = f"digits, 4 ranks, c = 2N, {SEEDS} seeds, {way}"
        more = 100 * abs(figures(way, "loss").mean() / figures("exact", "loss").mean() - 1)
        claims.at_most(f"{name}: final loss differs by, %", more, 1)
        lost = figures("exact", "accuracy") - figures(way, "accuracy")
        claims.accuracy(f"{name}: points of accuracy lost", lost, 0.3)
        drifts = np.median(figures(way, "drifts"), axis=0)
        shown = " ".join(f"{drift:.1e}" for drift in drifts[1 :: len(drifts) // 5])
        claims.report(f"{name}: drift, over the training", shown)
    apart = figures("exact", "drifts").max()
    claims.check("the same, exact: drift", float(apart), "0", apart == 0)


PARTS = {
    "errors": errors,
    "laws": laws,
    "lasting": lasting,
    "precision": precision,
    "kernels": kernels,
    "rounds": rounds,
    "memory": memory,
    "wire": wire,
    "training": training,
}


if __name__ == "__main__":
    sys.exit(run_parts(__doc__, PARTS))
