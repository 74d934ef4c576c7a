"""The command line, in processes of its own."""

import json
import os
import subprocess
import sys

import pytest


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


@pytest.mark.parametrize("arguments", [(), ("bench",), ("bench", "kernels", "--codecs", "q99")])
def test_bad_usage_ends_with_two(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
