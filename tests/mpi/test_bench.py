"""`mpiquant bench` of collectives: every rank runs the command, rank 0 prints."""

import csv
import json
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from conftest import together

from mpiquant.cli import bench_calls
from mpiquant.cli.bench_figures import overlap_percent
from mpiquant.cli.main import main
from mpiquant.codecs import Codec, UniformCodec, by_name, registry
from mpiquant.codecs._block import BlockCodec
from mpiquant.progress import engine

pytestmark = pytest.mark.mpi

KEYS = [
    *("size", "count", "dtype", "op", "codec", "bits", "algo", "time_us", "p95_us", "algbw"),
    *("busbw", "wirebw", "ratio", "err", "wrong", "limit_ratio"),
]
OVERLAP_KEYS = ["overall_us", "compute_us", "pure_us", "overlap"]
QUICK = ["-n", "2", "-w", "1"]
ONCE = ["-n", "1", "-w", "0"]


@pytest.fixture
def bench(comm, capsys):
    """Runs the command on all ranks; exit code and rank 0's output."""

    def run(*words):
        capsys.readouterr()
        code = main(["bench", *words])
        printed = capsys.readouterr()
        with together(comm):
            assert printed.out == "" or comm.rank == 0
        return code, comm.bcast(printed.out)

    yield run
    engine.stop_thread()


def rows_of(bench, *words):
    """Exit code and rows of the report."""
    code, text = bench(*words, "--format", "json")
    return code, json.loads(text)["results"]


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "allgather"])
def test_report(comm, bench, tmp_path, kind):
    file = tmp_path / "report.json"
    words = ["-b", "8", "-e", "80K", "-f", "100", "--algo", "ring,hd,direct,auto", *ONCE]
    code, table = bench(kind, *words, "--codec", "exact,q8,q4s,q2,q1", "--json", str(file))
    report = comm.bcast(json.loads(file.read_text()) if comm.rank == 0 else None)
    with together(comm):
        assert code == 0
        assert comm.rank == 0 or not file.exists()
        assert set(report) == {"version", "args", "env", "ranks", "results"}
        assert report["ranks"] == comm.size
        assert report["args"]["maxbytes"] == 80 << 10
        assert report["env"]["numpy"] == np.__version__
        rows = report["results"]
        assert all(list(row) == KEYS for row in rows)
        assert all(row["wrong"] == 0 for row in rows)
        sizes = sorted({row["size"] for row in rows})
        assert len(sizes) == 3
        for i, size in enumerate(sizes):
            first, *others = rows[21 * i : 21 * (i + 1)]
            assert {row["size"] for row in (first, *others)} == {size}
            assert (first["codec"], first["algo"], first["ratio"]) == ("native", "native", 1.0)
            assert [row["codec"] for row in others[::4]] == ["exact", "q8", "q4s", "q2", "q1"]
        assert len(table.splitlines()) == 4 + 2 + len(rows) + 1
        assert table.endswith("# wrong values: 0 OK\n")


@pytest.mark.parametrize("kind", ["allreduce", "reduce_scatter", "allgather"])
def test_figures(comm, bench, kind):
    words = ["-b", "256K", "-e", "256K", "--codec", "exact,q8", "--algo", "ring", *QUICK]
    code, rows = rows_of(bench, kind, *words, "--bandwidth", "1gbit")
    n = comm.size
    factor = (2 if kind == "allreduce" else 1) * (n - 1) / n
    with together(comm):
        assert code == 0
        native, exact, q8 = rows
        for row in rows:
            size = row["size"]
            assert size - 4 * n < row["count"] * 4 == size <= 256 << 10
            assert row["algbw"] == pytest.approx(size / row["time_us"] / 1e3, rel=1e-3)
            assert row["busbw"] == pytest.approx(row["algbw"] * factor, rel=1e-3, abs=1e-9)
            assert row["p95_us"] >= row["time_us"] > 0
        if n > 1:
            assert [row["algo"] for row in rows] == ["native", "ring", "ring"]
            assert [row["bits"] for row in rows] == [32, 32, 8]
            assert native["ratio"] == 1.0
            assert 0.99 < exact["ratio"] < 1.0
            assert 3.9 < q8["ratio"] < 4.0
            assert native["err"] < 1e-6 < 1e-3 < q8["err"] < 0.1
            assert native["wirebw"] == pytest.approx(native["busbw"], rel=1e-3)
            for row in rows:
                sent = row["wirebw"] * row["time_us"] * 1e3
                assert row["limit_ratio"] == pytest.approx(row["time_us"] / 8e-3 / sent, rel=0.01)


def test_phases(comm, bench):
    words = ["-b", "1M", "-e", "1M", "--codec", "q8", "--algo", "ring", "-n", "5", "-w", "1"]
    code, rows = rows_of(bench, "allreduce", *words, "--phases")
    with together(comm):
        assert code == 0
        native, exact, q8 = rows
        assert "phases" not in native
        names = ["encode", "decode", "wire", "python", "idle", "total"]
        assert list(exact["phases"]) == list(q8["phases"]) == names
        if comm.size > 1:
            total = q8["phases"].pop("total")
            assert q8["phases"]["encode"] > 0 < q8["phases"]["decode"]
            assert exact["phases"]["decode"] < exact["phases"]["total"]
            assert all(us >= 0 for us in q8["phases"].values())
            assert 0.3 * total < sum(q8["phases"].values()) < 1.3 * total


@pytest.mark.parametrize("dtype", ["double", "half", "int32", "uint8"])
def test_every_dtype_and_op(comm, bench, dtype):
    for op in ("sum", "prod", "max", "min", "mean"):
        words = ["-b", "8", "-e", "4K", "-f", "512", "-d", dtype, "-o", op, *ONCE]
        lossy = dtype in ("double", "half") and op in ("sum", "mean")
        words += ["--codec", "exact,q8,q3,q2,q1,ternary,fp16,bf16" if lossy else "exact,q8"]
        for kind in ("allreduce", "reduce_scatter"):
            code, rows = rows_of(bench, kind, *words, "--algo", "auto,hd")
            with together(comm):
                assert code == 0
                assert {row["op"] for row in rows} == {op}
                if "int" in dtype:
                    assert all(row["err"] == 0 for row in rows)


@pytest.mark.parametrize("codec", ["q8", "q2", "q1", "ternary"])
def test_broken_codec_is_found(comm, bench, monkeypatch, codec):
    def decode(self, wire, out):
        flag = BlockCodec.decode(self, wire, out)
        out *= -1
        return flag

    words = ["-b", "4K", "-e", "40K", "-f", "10", "--codec", codec, *ONCE]
    for kind in ("allreduce", "allgather"):
        sound, _ = bench(kind, *words)
        with monkeypatch.context() as patch:
            patch.setattr(type(by_name(codec)), "decode", decode)
            code, rows = rows_of(bench, kind, *words)
            unchecked, without = rows_of(bench, kind, *words, "-c", "0")
        with together(comm):
            assert sound == 0
            assert code == (1 if comm.size > 1 else 0)
            for row in rows:
                assert (row["wrong"] > 0) == (row["codec"] == codec and comm.size > 1)
            assert unchecked == 0
            assert all(row["err"] is row["wrong"] is None for row in without)


def test_different_bits_are_found(comm, bench, monkeypatch):
    def decode(self, wire, out):
        flag = BlockCodec.decode(self, wire, out)
        out[-1:] *= 1 + 1e-6 * comm.rank
        return flag

    monkeypatch.setattr(UniformCodec, "decode", decode)
    code, rows = rows_of(bench, "allreduce", "-b", "4K", "-e", "4K", "--codec", "q8", *QUICK)
    with together(comm):
        assert code == (1 if comm.size > 1 else 0)
        assert [row["wrong"] for row in rows] == [0, 0, 1024 if comm.size > 1 else 0]


def test_nonfinite_results_are_reported(comm, bench, monkeypatch):
    def decode(self, wire, out):
        out[:] = np.nan
        return True

    monkeypatch.setattr(UniformCodec, "decode", decode)
    code, rows = rows_of(bench, "allreduce", "-b", "4K", "-e", "4K", "--codec", "q8", *QUICK)
    with together(comm):
        if comm.size > 1:
            assert code == 1
            assert rows[2]["err"] is None
            assert rows[2]["wrong"] == 1024


def test_codecs_of_others_are_measured(comm, bench, monkeypatch):
    @dataclass(frozen=True)
    class Float32Codec(Codec):
        spec = "f32"

        def nbytes(self, count, dtype):
            return 4 * count

        def encode(self, x, wire, *, residual=None, stream=0, index=0):
            wire.view(np.float32)[...] = x

        def decode(self, wire, out):
            out[...] = wire.view(np.float32)
            return False

    monkeypatch.setitem(registry._makers, "f32", Float32Codec)
    words = ["-b", "8K", "-e", "8K", "-d", "double", "--codec", "f32", "--algo", "ring", *QUICK]
    code, rows = rows_of(bench, "allreduce", *words)
    with together(comm):
        assert code == 0
        assert comm.size == 1 or 1e-12 < rows[2]["err"] < 1e-6


def test_csv(comm, bench):
    code, text = bench("allreduce", "-e", "1K", "--codec", "q8", "--format", "csv", *QUICK)
    lines = [line for line in text.splitlines() if line[:1] != "#"]
    with together(comm):
        assert code == 0
        assert f"# {comm.size} ranks on " in text
        rows = list(csv.DictReader(lines))
        assert list(rows[0]) == KEYS
        assert [row["codec"] for row in rows] == ["native", "exact", "q8"] * 4
        assert {row["wrong"] for row in rows} == {"0"}
        assert {row["limit_ratio"] for row in rows} == {""}


def test_osu(comm, bench):
    words = ["-b", "1K", "-e", "4K", "--codec", "q8", "--algo", "ring,hd", *QUICK]
    code, text = bench("allreduce", *words, "--format", "osu")
    with together(comm):
        assert code == 0
        blocks = text.split("\n\n")[1:]
        assert [block.splitlines()[0] for block in blocks] == [
            "# codec native, algorithm native",
            "# codec exact, algorithm ring",
            "# codec q8, algorithm ring",
            "# codec q8, algorithm halving_doubling",
        ]
        for block in blocks:
            _, titles, *lines = block.splitlines()
            assert titles.split() == ["#", "Size", "Avg", "Latency(us)"]
            numbers = [line.split() for line in lines if line[:1] != "#"]
            assert [int(size) for size, _ in numbers] == [1024, 4096]
            assert all(float(latency) > 0 for _, latency in numbers)


@pytest.mark.parametrize("progress", ["manual", "thread"])
def test_nonblocking(comm, bench, progress):
    words = ["-b", "4K", "-e", "64K", "-f", "16", "--codec", "exact,q8", "--progress", progress]
    code, rows = rows_of(bench, "allreduce", *words, "--nonblocking", *QUICK)
    with together(comm):
        assert code == 0
        assert all(list(row) == KEYS + OVERLAP_KEYS for row in rows)
        assert all(row["time_us"] == row["pure_us"] > 0 and row["wrong"] == 0 for row in rows)
        assert all(row["compute_us"] > 0 and row["overlap"] >= 0 for row in rows)
    code, text = bench("allreduce", *words, "--nonblocking", "--format", "osu", *QUICK)
    with together(comm):
        assert code == 0
        titles = "# Size Overall(us) Compute(us) Pure Comm.(us) Overlap(%)"
        assert sum(" ".join(line.split()) == titles for line in text.splitlines()) == 4


@pytest.mark.parametrize("hidden", [True, False])
def test_overlap_is_measured(comm, monkeypatch, hidden):
    def start():
        due = time.perf_counter() + 0.02

        def end():
            time.sleep(max(0.0, due - time.perf_counter()))

        if not hidden:
            end()
        return end

    # Asleep, ranks do not compete for cores.
    sleep = lambda comm, seconds: partial(time.sleep, seconds)  # noqa: E731
    monkeypatch.setattr(bench_calls, "computation", sleep)
    seconds = bench_calls.overlap_times(comm, start, 7, 1)
    alone, compute, _ = np.median(seconds, axis=0)
    overlap = float(np.median(overlap_percent(*seconds.T)))
    with together(comm):
        assert seconds.shape == (7, 3)
        assert alone >= 0.02
        assert compute >= 0.02
        assert (overlap > 40) == hidden


def test_computation_lasts_as_long_as_asked(comm):
    compute = bench_calls.computation(comm, 0.002)
    (taken,) = np.median(bench_calls.times(comm, [compute], 7, 1), axis=0)
    with together(comm):
        assert 0.0002 < taken < 0.1


def test_nonblocking_mean_of_integers(comm, bench):
    words = ["-b", "4K", "-e", "4K", "-d", "int32", "-o", "mean", "--nonblocking", *QUICK]
    code, rows = rows_of(bench, "allreduce", *words)
    with together(comm):
        assert code == 0
        assert all(row["err"] == 0 for row in rows)


def test_bad_arguments_end_all_ranks(comm, capsys, tmp_path):
    for words in (
        ("--codec", "q99"),
        ("--algo", "tree"),
        ("-b", "2K", "-e", "1K"),
        ("--json", str(tmp_path / "missing" / "report.json")),
    ):
        code = main(["bench", "allreduce", *words])
        error = capsys.readouterr().err
        with together(comm):
            assert code == 2
            assert error.startswith("mpiquant: ") == (comm.rank == 0)
