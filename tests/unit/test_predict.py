"""Predictions, profiles and advice."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mpiquant.cli.main import main
from mpiquant.codecs import EXACT, by_name
from mpiquant.planner.advise import advise
from mpiquant.planner.fit import Sample, fitted
from mpiquant.planner.predict import Prediction, expected_error, predict
from mpiquant.planner.profile import Profile, Wire, default_file
from mpiquant.sim import KernelCost

Q8, Q4 = by_name("q8"), by_name("q4")
BANDWIDTH, LATENCY = 1.25e8, 50e-6


def cluster(ranks, **changes):
    """Processors that take no time."""
    profile = Profile.of(ranks, BANDWIDTH, LATENCY)
    return replace(profile, kernels={}, message_s=0.0, call_s=0.0, **changes)


# ---- times ----


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("codec", [EXACT, Q8, Q4])
def test_short_rings_take_what_their_formula_says(ranks, codec):
    count = 512 * ranks
    found = predict(cluster(ranks), "ring", codec, 4 * count)
    chunk = codec.nbytes(512, np.dtype(np.float32))
    assert found.seconds == pytest.approx(2 * (ranks - 1) * (LATENCY + chunk / BANDWIDTH))


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "direct"])
@pytest.mark.parametrize("codec", [EXACT, Q8])
def test_long_arrays_take_the_limit_of_the_wire(algorithm, codec):
    nbytes = 256 << 20
    wire = codec.nbytes(nbytes // 4, np.dtype(np.float32))
    limit = 2 * 3 / 4 * wire / BANDWIDTH
    found = predict(cluster(4), algorithm, codec, nbytes).seconds
    # Steps of halving and doubling overlap, and then two ranks send to one.
    assert limit <= found <= (1.2 if algorithm == "halving_doubling" else 1.02) * limit


def test_what_is_not_simulated_whole_is_right():
    """Beside the simulation of all of its segments."""
    from mpiquant.planner import predict as module

    profile = Profile.of(4, BANDWIDTH, LATENCY)
    for algorithm in ("ring", "halving_doubling", "direct"):
        short = predict(profile, algorithm, Q4, 24 << 20).seconds
        given, module.SIMULATED_SEGMENTS = module.SIMULATED_SEGMENTS, (10**6, 10**7)
        try:
            whole = predict(profile, algorithm, Q4, 24 << 20).seconds
        finally:
            module.SIMULATED_SEGMENTS = given
        assert short == pytest.approx(whole, rel=0.02)


def test_kernels_and_messages_count():
    free = predict(cluster(4), "ring", Q8, 1 << 20).seconds
    slow = replace(cluster(4), kernels={"q8": KernelCost(1e-7, 1e-7, 1e-7, 1e-7)})
    assert predict(slow, "ring", Q8, 1 << 20).seconds > 2 * free
    busy = replace(cluster(4), message_s=1e-3)
    assert predict(busy, "ring", Q8, 1 << 20).seconds >= free + 6 * 2e-3 * 0.9


def test_a_wire_that_saves_up_is_there_sooner():
    busy = replace(cluster(4), message_s=100e-6)
    saving = replace(busy, network=Wire(BANDWIDTH, LATENCY, burst_s=1e-3))
    for nbytes, fastest, slowest in ((64 << 10, 0.5, 0.7), (64 << 20, 0.99, 1.0)):
        ratio = predict(saving, "ring", EXACT, nbytes).seconds
        ratio /= predict(busy, "ring", EXACT, nbytes).seconds
        assert fastest <= ratio <= slowest


def test_ranks_of_a_host_share_its_interface():
    one = predict(cluster(4), "ring", EXACT, 8 << 20).seconds
    shared = replace(cluster(8), hosts=(0, 0, 1, 1, 2, 2, 3, 3))
    across = predict(shared, "hierarchical", EXACT, 8 << 20).seconds
    assert across == pytest.approx(one, rel=0.1)
    direct = predict(shared, "direct", EXACT, 8 << 20).seconds
    assert direct > 1.8 * one


def test_native_is_what_was_measured_and_a_formula_elsewhere():
    known = cluster(4, native=((1000, 1e-3), (100_000, 1e-2), (1_000_000, 0.1)))
    assert predict(known, "native", EXACT, 1000).seconds == pytest.approx(1e-3)
    assert predict(known, "native", EXACT, 10_000).seconds == pytest.approx(10**-2.5)
    assert predict(known, "native", EXACT, 10_000_000).seconds == pytest.approx(1.0, rel=0.01)
    short = predict(cluster(8), "native", EXACT, 8).seconds
    assert short == pytest.approx(3 * LATENCY, rel=0.01)
    long = predict(cluster(8), "native", EXACT, 1 << 28).seconds
    assert long == pytest.approx(2 * 7 / 8 * (1 << 28) / BANDWIDTH, rel=0.01)


def test_cerar_sends_less_than_a_ring():
    ring = predict(cluster(8), "ring", EXACT, 64 << 20).seconds
    coded = predict(cluster(8), "cerar", EXACT, 64 << 20).seconds
    assert coded / ring == pytest.approx(1.375 / 1.75, rel=0.03)


def test_many_ranks():
    found = predict(cluster(256), "ring", Q8, 1 << 28)
    limit = 2 * 255 / 256 * Q8.nbytes(1 << 26, np.dtype(np.float32)) / BANDWIDTH
    assert limit <= found.seconds <= 1.05 * limit + 510 * LATENCY
    with pytest.raises(ValueError, match="too many"):
        predict(replace(cluster(256), hosts=tuple(i // 2 for i in range(256))), "ring", Q8, 1 << 20)


def test_what_cannot_be_predicted():
    for name in ("aqat", "top_k", "bounded"):
        with pytest.raises(ValueError, match="depends on"):
            predict(cluster(4), "ring", by_name(name), 1 << 20)


def test_costs_are_found_again():
    """Fitted to times that were predicted, they are what the predictions were made with."""
    true = replace(Profile.of(4, BANDWIDTH, 40e-6), message_s=25e-6, call_s=300e-6)
    samples = [
        Sample(name, codec, nbytes, predict(true, name, codec, nbytes).seconds)
        for name in ("ring", "halving_doubling", "direct")
        for codec in (EXACT, Q4)
        for nbytes in (8 << 10, 64 << 10, 512 << 10)
    ]
    start = replace(true, message_s=10e-6, call_s=0.0, network=Wire(BANDWIDTH, 9e-6))
    found = fitted(start, samples)
    assert found.message_s == pytest.approx(true.message_s, rel=0.2)
    assert found.call_s == pytest.approx(true.call_s, rel=0.2)
    again = [predict(found, s.algorithm, s.codec, s.nbytes).seconds for s in samples]
    assert again == pytest.approx([s.seconds for s in samples], rel=0.05)


# ---- errors ----


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["q8", "q4", "q2", "q1", "bf16"])
def test_errors_are_those_of_a_ring_that_is_carried_out(ranks, name):
    codec, count = by_name(name), 1 << 14
    x = np.random.default_rng(1).standard_normal((ranks, count)).astype(np.float32)
    wire = np.empty(codec.nbytes(count, x.dtype), np.uint8)
    total = x[0].copy()
    for row in x[1:]:
        codec.encode(total, wire)
        codec.decode_add(wire, row, total)
    codec.encode(total, wire)
    codec.decode(wire, total)
    right = x.sum(axis=0, dtype=np.float64)
    error = np.linalg.norm(total - right) / np.linalg.norm(right)
    assert expected_error("ring", codec, ranks) == pytest.approx(error, rel=0.1)


def test_errors_by_algorithm():
    errors = [expected_error(a, Q4, 16) for a in ("direct", "halving_doubling", "ring")]
    assert errors == sorted(errors)
    assert expected_error("ring", EXACT, 16) == 0


# ---- advice ----


def predictions(*seconds):
    codecs = (EXACT, by_name("bf16"), Q8, Q4)
    errors = (0.0, 0.002, 0.01, 0.3)
    rows = zip(codecs, seconds, errors, strict=True)
    return [Prediction("ring", codec, s, error) for codec, s, error in rows]


def test_advice():
    found = advise(predictions(10.0, 6.0, 3.0, 1.0), 0.05)
    assert found.best.codec == Q8
    assert found.sentence.startswith("use ring with q8: 3 s, 3.33 times as fast as exact values")
    assert "q4 would take 1 s, but at a relative error of 0.3" in found.sentence
    found = advise(predictions(1.0, 1.2, 0.99, 1.1), 0.05)
    assert found.best.codec == EXACT
    assert found.sentence == "do not compress: ring takes 1 s, no codec is faster"
    found = advise(predictions(1.0, 1.2, 1.1, 0.5), 0.05)
    assert "do not compress" in found.sentence
    assert "small enough error" in found.sentence
    assert advise(predictions(10.0, 6.0, 3.0, 1.0), 1.0).best.codec == Q4


# ---- files ----


def test_profiles_are_kept(tmp_path):
    profile = replace(
        Profile.of(4, 1e9, 2e-5, ranks_per_node=2),
        native=((8, 1e-5), (1 << 20, 1e-2)),
        mpi="MPICH",
    )
    file = tmp_path / "some" / "profile.json"
    profile.save(file)
    assert Profile.load(file) == profile
    assert [entry.name for entry in file.parent.iterdir()] == ["profile.json"]
    assert profile.with_hosts(profile.hosts) is profile
    assert profile.with_hosts(range(8)).native == ()


def test_what_is_no_profile(tmp_path):
    file = tmp_path / "profile.json"
    for text in ("", "[]", "{}", '{"version": 0}', '{"version": 1, "hosts": 3}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"profile\.json is no profile"):
            Profile.load(file)


def test_where_profiles_are(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MPIQUANT_PROFILE", raising=False)
    found = default_file("Open MPI", [0, 0, 1, 1])
    assert found == tmp_path / "mpiquant" / "open-mpi-4-ranks-2-hosts.json"
    monkeypatch.setenv("MPIQUANT_PROFILE", "/some/file")
    assert str(default_file("MPICH", [0])) == "/some/file"


# ---- the command ----


def test_command(capsys, tmp_path):
    file = tmp_path / "plan.json"
    words = ["plan", "--ranks", "8", "--bandwidth", "1Gbit", "--size", "16MB"]
    assert main([*words, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "8 ranks on 8 nodes, 1 Gbit/s, 50 us" in out
    assert "Recommendation: use " in out
    report = json.loads(file.read_text())
    rows = {(row["algorithm"], row["codec"]): row["seconds"] for row in report["rows"]}
    assert rows["ring", "q8"] < rows["ring", "bf16"] < rows["ring", "exact"]
    assert report["nbytes"] == 16 << 20
    assert ("cerar", "exact") in rows
    assert ("native", "exact") in rows


def test_command_says_when_not_to_compress(capsys):
    words = ["plan", "--ranks", "8", "--bandwidth", "400Gbit", "--latency", "2us"]
    assert main([*words, "--size", "4KB"]) == 0
    assert "Recommendation: do not compress: native takes" in capsys.readouterr().out


def test_command_with_several_ranks_on_a_node(capsys):
    words = ["plan", "--ranks", "8", "--ranks-per-node", "4", "--bandwidth", "1Gbit"]
    assert (
        main([*words, "--model", "resnet50", "--codec", "q8", "--algo", "ring,hierarchical"]) == 0
    )
    out = capsys.readouterr().out
    assert "8 ranks on 2 nodes" in out
    assert f"{4 * 25_557_032} bytes" in out
    assert "Recommendation: use hierarchical with q8" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--size", "1M"], "--ranks and --bandwidth"),
        (["--ranks", "4", "--bandwidth", "1Gbit"], "--size or --model"),
        (["--ranks", "4", "--bandwidth", "1Gbit", "--size", "1M", "--codec", "aqat"], "depends on"),
        (["--profile", "x", "--bandwidth", "1Gbit", "--size", "1M"], "name one or both"),
        (["--profile", "no-such-file", "--size", "1M"], "no-such-file"),
    ],
)
def test_bad_arguments(capsys, words, text):
    assert main(["plan", *words]) == 2
    assert text in capsys.readouterr().err


def test_command_uses_a_profile(capsys, tmp_path):
    file = tmp_path / "profile.json"
    replace(Profile.of(4, 1e8), network=Wire(1e8, 1e-4)).save(file)
    assert main(["plan", "--profile", str(file), "--size", "1M"]) == 0
    assert "4 ranks on 4 nodes, 0.8 Gbit/s, 100 us" in capsys.readouterr().out
    words = ["plan", "--profile", str(file), "--size", "1M", "--ranks", "6"]
    assert main([*words, "--ranks-per-node", "2"]) == 0
    assert "6 ranks on 3 nodes" in capsys.readouterr().out
    assert math.isfinite(Profile.load(file).network.latency_s)
