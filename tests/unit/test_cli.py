"""The command line, in processes of its own."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from run_mpi import launcher

from mpiquant.cli import bench_collectives, bench_figures, job
from mpiquant.cli import main as cli
from mpiquant.codecs import by_name


def run(*arguments, **environment):
    command = [sys.executable, "-m", "mpiquant.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_info_shows_the_forced_instruction_set():
    done = run("info", MPIQUANT_ISA="baseline", MPIQUANT_CODEC="q4")
    assert done.returncode == 0, done.stderr
    assert "baseline (of" in done.stdout
    assert "codec=q4" in done.stdout
    assert "halving_doubling" in done.stdout


def test_unknown_instruction_set_is_an_error():
    done = run("info", MPIQUANT_ISA="mmx")
    assert done.returncode != 0
    assert "unknown instruction set 'mmx'" in done.stderr


def test_kernel_benchmark(tmp_path):
    file = tmp_path / "kernels.json"
    done = run(
        "bench", "kernels", "--size", "0.5", "--repeat", "2", "--isas", "all", "--json", str(file)
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["results"]
    keys = {"kernel", "codec", "bits", "rounding", "dtype", "isa", "gbps", "vs_copyto"}
    assert all(set(row) == keys for row in rows)
    assert {"encode", "decode", "decode_add", "hop"} <= {row["kernel"] for row in rows}
    assert {"float32", "float64"} == {row["dtype"] for row in rows}
    assert all(row["gbps"] > 0 and row["vs_copyto"] > 0 for row in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("bench",),
        ("bench", "kernels", "--codecs", "q99"),
        ("bench", "allreduce", "--codec", "q99"),
        ("bench", "allreduce", "--minbytes", "4X"),
        ("bench", "allgather", "--op", "sum"),
    ],
)
def test_bad_usage_ends_with_two(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# ---- bench of collectives: what needs no MPI ----


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("32K", 32768), ("4m", 4 << 20), ("1G", 1 << 30), ("1.5K", 1536)],
)
def test_sizes(text, size):
    assert bench_collectives.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "K", "-8", "4T", "4 K", "1e3", "0.1"])
def test_bad_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        bench_collectives.parse_size(text)


def test_bandwidths():
    assert bench_collectives.parse_bandwidth("1gbit") == 10**9
    assert bench_collectives.parse_bandwidth("2.5Gbit") == 2_500_000_000
    assert bench_collectives.parse_bandwidth("800") == 800
    for text in ("1g", "fast", "0mbit", "1gbit/s"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no bandwidth"):
            bench_collectives.parse_bandwidth(text)


def steps(**changes):
    given = {"minbytes": 8, "maxbytes": 128, "stepfactor": 4, "stepbytes": None, **changes}
    return list(bench_collectives.sizes(argparse.Namespace(**given)))


def test_steps():
    assert steps() == [8, 32, 128]
    assert steps(stepbytes=50) == [8, 58, 108]
    assert steps(maxbytes=8) == [8]


def test_counts_are_of_the_whole_array():
    counts = bench_collectives.counts
    assert counts("allreduce", [2, 8, 32], 4, 3) == [1, 2, 8]
    assert counts("reduce_scatter", [8, 32], 4, 3) == [2, 8]
    assert counts("allgather", [8, 12, 32], 4, 3) == [3, 6]


def test_bus_factors_are_those_of_nccl_tests():
    assert bench_figures.bus_factor("allreduce", 4) == 1.5
    assert bench_figures.bus_factor("reduce_scatter", 4) == 0.75
    assert bench_figures.bus_factor("allgather", 4) == 0.75
    assert bench_figures.bus_factor("allreduce", 1) == 0


def test_overlap():
    alone, compute, together = np.array([[10.0, 10, 10, 10], [10.0] * 4, [10.0, 15, 20, 25]])
    overlap = bench_figures.overlap_percent(alone, compute, together)
    np.testing.assert_allclose(overlap, [100, 50, 0, 0])


def ring_sum(codec, every):
    """The sum as a ring makes it of one chunk, and the exact one."""

    def sent(values):
        wire = np.empty(codec.nbytes(values.size, values.dtype), np.uint8)
        codec.encode(values, wire, stream=rank)
        decoded = np.empty_like(values)
        codec.decode(wire, decoded)
        return decoded

    total = every[0]
    for rank in range(1, len(every)):
        total = sent(total) + every[rank]
    rank = len(every)
    return sent(total), np.sum(every, axis=0, dtype=np.float64)


def judge(codec, every, out, exact):
    """Values outside the bound, and whether the whole is plausible."""
    magnitudes = np.sum(np.abs(every), axis=0, dtype=np.float64)
    peaks = np.full(exact.size, np.max(np.abs(every)))
    allowed = bench_figures.tolerance(codec, len(every), out.dtype, magnitudes, peaks)
    difference = out - exact
    sums = (difference @ difference, exact @ exact, difference @ exact)
    plausible = bench_figures.plausible(codec, len(every), exact.size, *sums)
    return np.count_nonzero(~(np.abs(difference) <= allowed)), plausible


@pytest.mark.parametrize(
    "name", ["exact", "fp16", "bf16", "q16", "q8", "q4", "q3", "q4s", "q2", "q1", "ternary"]
)
@pytest.mark.parametrize("terms", [1, 2, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bounds_hold(name, terms, dtype):
    codec = bench_collectives.parse_codec(name)
    for count in (2, 50, 100, 1000, 20_000):
        every = np.random.default_rng(count).standard_normal((terms, count)).astype(dtype)
        assert judge(codec, every, *ring_sum(codec, every)) == (0, True)


@pytest.mark.parametrize("name", ["exact", "fp16", "q8", "q4", "q3", "q2", "q1", "ternary"])
@pytest.mark.parametrize("broken", ["zero", "sign", "double", "shifted", "nan"])
@pytest.mark.parametrize("terms", [1, 2, 5])
def test_bounds_find_what_is_broken(name, broken, terms):
    codec = by_name(name)
    every = np.random.default_rng(0).standard_normal((terms, 20_000)).astype(np.float32)
    out, exact = ring_sum(codec, every)
    changed = {
        "zero": 0 * out,
        "sign": -out,
        "double": 2 * out if codec.bits > 2 else 3 * out,
        "shifted": np.roll(out, 1),
        "nan": np.where(np.arange(out.size) == 7, np.nan, out),
    }
    wrong, plausible = judge(codec, every, changed[broken], exact)
    assert wrong or not plausible


# ---- the end of a job ----


def fail_on_rank_1(error, *arguments):
    """Exit code and output of two ranks whose second raises; the first one waits for it."""
    code = f"""
        import sys
        from mpi4py import MPI
        from mpiquant.cli import info, main

        def run(arguments):
            if MPI.COMM_WORLD.rank == 1:
                raise {error}
            MPI.COMM_WORLD.Barrier()

        info.run = run
        sys.exit(main.main(["info"]))
    """
    script = "\n".join(line[8:] for line in code.splitlines())
    command, environment = launcher(Path(sys.executable).parent)
    return subprocess.run(
        [*command, "-n", "2", sys.executable, "-c", script],
        **{"capture_output": True, "text": True, "timeout": 60, "env": environment},
    )


@pytest.mark.skipif(
    not Path(sys.executable).with_name("mpiexec").exists(), reason="no mpiexec beside this Python"
)
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        ("RuntimeError('lost')", 1, "RuntimeError: lost"),
        ("OSError('full')", 2, "mpiquant: full"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_one_rank_ends_the_job(error, code, text):
    done = fail_on_rank_1(error)
    assert done.returncode == code
    assert text in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)


def test_alone_an_exception_is_raised(monkeypatch, capsys):
    def run(arguments):
        raise error

    monkeypatch.setattr(cli.info, "run", run)
    for case, code in ((job.UsageError("no"), 2), (OSError("no"), 2), (KeyboardInterrupt(), 130)):
        error = case
        assert cli.main(["info"]) == code
        assert capsys.readouterr().err == ("mpiquant: no\n" if code == 2 else "")
    error = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        cli.main(["info"])


# ---- reports ----


def results(tmp_path, name, factor=1.0):
    """A file as `mpiquant bench --json` writes it."""
    rows = []
    for size in (1024, 65536):
        for codec, algo, us in (("native", "native", 100.0), ("q8", "ring", 30.0 * factor)):
            row = {"size": size, "count": size // 4, "dtype": "float32", "op": "sum"}
            row |= {"codec": codec, "algo": algo, "time_us": us, "limit_ratio": us / 28}
            row["phases"] = dict.fromkeys(("encode", "decode", "wire", "python", "idle"), 5.0)
            rows.append(row)
    env = {"mpi": "MPICH", "hosts": ["a", "b"]}
    report = {"version": "1", "args": {"kind": "allreduce"}, "env": env, "ranks": 2}
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps({**report, "results": rows}))
    return str(file)


def test_compare(tmp_path, capsys):
    a, b = results(tmp_path, "a"), results(tmp_path, "b", factor=4.0)
    assert cli.main(["bench", "--compare", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "# geometric mean of b / a: 2.000 (4 cases)"
    cells = [line.split() for line in lines if " ring " in line]
    assert [(row[0], row[3], row[-1]) for row in cells] == [
        ("1024", "q8", "4.000"),
        ("65536", "q8", "4.000"),
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{"kernel": "encode"}]}'])
@pytest.mark.parametrize("command", [("bench", "--compare"), ("report",)])
def test_files_that_are_no_reports_are_refused(tmp_path, capsys, command, text):
    bad = tmp_path / "bad.json"
    bad.write_text(text)
    assert cli.main([*command, results(tmp_path, "good"), str(bad)]) == 2
    assert "bad.json is no report" in capsys.readouterr().err


def test_report_is_one_page_with_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert cli.main(["report", results(tmp_path, "a"), "-o", str(page)]) == 0
    text = page.read_text()
    written = set(map(Path, capsys.readouterr().out.split()))
    names = ("time", "speedup", "limit", "phases")
    assert written == {page, *(tmp_path / f"page-{name}.png" for name in names)}
    assert text.count("data:image/png;base64,") == 4
    assert all(file.stat().st_size > 1000 for file in written)
    assert "<td>q8</td>" in text
    assert "http" not in text  # nothing to be fetched
