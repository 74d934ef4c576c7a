"""Training on simulated clusters: formulas, the event engine, and what must hold in any run."""

import json
import math

import numpy as np
import pytest
from sim_machines import ALPHA, BANDWIDTH, BUSY, FREE

from mpiquant.cli import job
from mpiquant.cli import main as cli
from mpiquant.cli import sim as command
from mpiquant.codecs import by_name
from mpiquant.codecs.expected import squared_error
from mpiquant.rate import Trace
from mpiquant.sim import (
    Cluster,
    Layer,
    Load,
    Network,
    Training,
    Workload,
    scheme_of,
    simulate,
    traces,
    workload,
)
from mpiquant.sim.compute import parts_of
from mpiquant.sim.exchange import Call, Exchange
from mpiquant.sim.legs import course_of
from mpiquant.sim.network import end_of
from mpiquant.sim.schemes import Widths
from mpiquant.sim.traces import Bandwidths
from mpiquant.sim.wires import Route, ahead, window_mean, windowed

FLOAT32 = np.dtype(np.float32)


def steady(ranks, bandwidth=BANDWIDTH, latency=ALPHA, **options):
    return Cluster(ranks, traces.steady(bandwidth), latency, **options)


def one_layer(values, step_s=0.3):
    return Workload("one", (Layer("only", ((values,),), 1.0),), step_s)


def alike_layers(count, values, step_s):
    layers = (Layer(f"layer{i}", ((values,),), 1.0) for i in range(count))
    return Workload("some", tuple(layers), step_s)


def trained(name, ranks=8, model=None, iterations=6, cluster=None, **options):
    model = model or alike_layers(12, 2_000_000, 2.0)
    training = Training(model, scheme_of(name), cluster or steady(ranks), **options)
    return training.run(iterations)


# ---- calls: formulas, and the event engine ----


@pytest.mark.parametrize("name", ["fp32", "bf16", "q4", "q2"])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_single_bucket_takes_what_the_formulas_say(name, ranks):
    values = 5120 * ranks
    codec = scheme_of(name).codec
    chunk_s = codec.nbytes(5120, FLOAT32) / BANDWIDTH
    steps = {"ring": 2 * (ranks - 1), "halving_doubling": 2 * math.log2(ranks)}
    for algorithm, alphas in steps.items():
        right = alphas * ALPHA + 2 * (ranks - 1) * chunk_s
        found = trained(f"{name}@{algorithm}", ranks, one_layer(values), iterations=2)
        for each in found.iterations:
            assert math.isclose(each.wire_wait_s, right, rel_tol=1e-9)
            assert math.isclose(each.time_s, 0.3 + right, rel_tol=1e-9)
            assert each.sent_nbytes == 2 * (ranks - 1) * codec.nbytes(5120, FLOAT32)


def test_the_coded_ring_and_the_broadcast_take_what_their_formulas_say():
    ranks, values = 8, 16_000
    found = trained("cerar", ranks, one_layer(values), iterations=1).iterations[0]
    right = (3 * ranks - 2) * (ALPHA + 4 * values / (2 * ranks) / BANDWIDTH)
    assert math.isclose(found.wire_wait_s, right, rel_tol=1e-9)
    found = trained("exact@broadcast", ranks, one_layer(values), iterations=1).iterations[0]
    right = ALPHA + (ranks - 1) * 4 * values / BANDWIDTH
    assert math.isclose(found.wire_wait_s, right, rel_tol=1e-9)


def exchanged(algorithm, values, name, cluster, machine, lane, ready, group=True):
    widths = Widths(scheme_of(f"{name}@{algorithm}"), machine)
    call = Call(0, course_of(algorithm, values, cluster.ranks, lane, group=group), ready)
    Exchange(cluster, machine, widths).run([call])
    return call.done


@pytest.mark.parametrize("name", ["exact", "q4"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_event_engine_says_the_same(name, ranks):
    """Of late ranks too, but that messages of halves do not meet at their receiver here."""
    network, late = Network.of(ranks, BANDWIDTH, ALPHA), np.linspace(0, 1e-3, ranks)
    for algorithm, segment, ready, near in (
        ("ring", None, late, 1e-9),
        ("ring", 1024, late, 1e-9),
        ("halving_doubling", None, 0 * late, 1e-9),
        ("halving_doubling", None, late, 0.03),
    ):
        options = {"segment": segment, "ready": list(ready)}
        slow = simulate(algorithm, 5120 * ranks, by_name(name), network, BUSY, **options)
        args = (5120 * ranks, name, steady(ranks), BUSY, segment or 1 << 30, ready)
        np.testing.assert_allclose(exchanged(algorithm, *args), slow.ends, rtol=near)


def test_pieces_of_halves_are_near_the_event_engine():
    """There, segments of different steps meet at a receiver and hold up what is behind them."""
    ranks, codec, network = 8, by_name("q4"), Network.of(8, BANDWIDTH, ALPHA)
    for segment in (8192, 65536):
        slow = simulate("halving_doubling", 1 << 21, codec, network, BUSY, segment=segment)
        ready = np.zeros(ranks)
        args = ("halving_doubling", 1 << 21, "q4", steady(ranks), BUSY, segment, ready)
        assert 0.8 * slow.time_s <= exchanged(*args).max() <= slow.time_s


def test_steps_taken_together_are_near_the_single_ones():
    ranks = 256
    table = BANDWIDTH * np.random.default_rng(3).uniform(1, 2, (1, ranks))
    for slow, late in ((1.0, 0.0), (1.0, 0.05), (0.1, 0.05)):
        table[0, 7] *= slow
        cluster = Cluster(ranks, Bandwidths(np.zeros(1), table), ALPHA)
        ready = np.zeros(ranks)
        ready[100] = late
        args = ("ring", 10_000 * ranks, "q4", cluster, BUSY, 1 << 30, ready)
        single, together = exchanged(*args, group=False), exchanged(*args)
        np.testing.assert_allclose(together, single, rtol=0.01)


# ---- wires and traces ----


def test_windows_over_the_ranks_behind():
    values = np.random.default_rng(0).normal(size=13)
    for first, count in ((1, 1), (1, 2), (3, 5), (1, 13), (2, 12), (0, 8)):
        near = [[values[(i - d) % 13] for d in range(first, first + count)] for i in range(13)]
        np.testing.assert_array_equal(windowed(values, first, count), np.max(near, axis=1))
        least = windowed(values, first, count, np.minimum)
        np.testing.assert_array_equal(least, np.min(near, axis=1))
        np.testing.assert_allclose(window_mean(values, first, count), np.mean(near, axis=1))


def test_bytes_on_links_that_change_move_as_in_the_event_engine():
    rng = np.random.default_rng(5)
    times, table = np.array([0.0, 0.1, 0.25, 0.7]), rng.uniform(10, 100, (4, 6))
    route = Route(Cluster(6, Bandwidths(times, table)), ahead(6, 1))
    begin, nbytes = rng.uniform(0, 0.5, 6), rng.uniform(1, 80, 6)
    links = [Trace(times.tolist(), column.tolist()) for column in table.T]
    pairs = [(links[i], links[(i + 1) % 6]) for i in range(6)]
    right = [end_of(n, b, pair) for n, b, pair in zip(nbytes, begin, pairs, strict=True)]
    np.testing.assert_allclose(route.end(begin, nbytes), right)


@pytest.mark.parametrize("make", [traces.random_walk, traces.markov])
def test_drawn_traces_stay_in_their_range_and_repeat(make):
    tables = []
    for asked_for in ((90.0,), (1.0, 30.0, 90.0)):
        found = make(BANDWIDTH, 3, 0.1, np.random.default_rng(1))
        for time in asked_for:
            found.upto(time)
        tables.append(found.table)
        assert found.times[-1] > 90
    np.testing.assert_array_equal(*tables)
    share = tables[0] / BANDWIDTH
    assert share.min() >= traces.LOWEST * (1 - 1e-12)
    assert share.max() <= 1
    assert np.ptp(share, axis=0).min() > 0.5  # each host's


def test_a_day_has_its_night():
    found = traces.day(BANDWIDTH, 2, 0.1, np.random.default_rng(1), 20.0)
    noon, midnight = found.table[[0, 200]].mean(), found.table[[100]].mean()
    assert math.isclose(noon, BANDWIDTH, rel_tol=0.15)
    assert math.isclose(midnight, traces.LOWEST * BANDWIDTH, rel_tol=0.2)


def test_the_slowest_host_counts():
    found = traces.replay([(1.0, 5.0, 1), (2.0, 20.0, None), (3.0, 1.0, 0)], 10.0, 2)
    assert found.slowest(0.5, 2.5) == Trace([0.0, 1.0, 2.0], [10.0, 5.0, 20.0])
    with pytest.raises(ValueError, match="host 2 of 2"):
        traces.replay([(1.0, 5.0, 2)], 10.0, 2)
    with pytest.raises(ValueError, match="before the one in front"):
        traces.replay([(1.0, 5.0, None), (0.5, 5.0, None)], 10.0, 2)


# ---- models and computation ----


@pytest.mark.parametrize("name", ["resnet50", "gpt2"])
def test_buckets_hold_the_model(name):
    model = workload(name)
    parts = parts_of(model)
    assert sum(part.values for part in parts) == model.parameters
    assert math.isclose(sum(p.forward_s + p.backward_s for p in parts), model.step_s)
    assert len(parts) > 3
    assert parts[-1].values < parts[1].values  # what is due at once is small


def test_jitter_and_stragglers():
    rng = np.random.default_rng(0)
    forward, backward = Load(jitter=0.1, stragglers=0.2, slowdown=3).draw(20_000, rng)
    slow = backward > 2
    assert math.isclose(slow.mean(), 0.2, rel_tol=0.05)
    assert math.isclose(forward[~slow].mean(), 1, rel_tol=0.01)
    assert math.isclose(forward[~slow].std(), 0.1, rel_tol=0.05)
    with pytest.raises(ValueError, match="makes no sense"):
        Load(stragglers=1.5)


# ---- codecs ----


@pytest.mark.parametrize("name", ["q8", "q6", "q4", "q3", "q2", "q1", "bf16", "exact", "fp16"])
def test_errors_of_normal_data_are_as_expected(name):
    codec = by_name(name)
    x = np.random.default_rng(0).standard_normal(512 * 400).astype(np.float32)
    wire, out = np.empty(codec.nbytes(x.size, FLOAT32), np.uint8), np.empty_like(x)
    codec.encode(x, wire)
    codec.decode(wire, out)
    found = float(np.sum((out - x) ** 2) / np.sum(x**2))
    assert math.isclose(found, squared_error(codec), rel_tol=0.1, abs_tol=0)


def test_errors_of_hops_add_up():
    found = {
        name: trained(name, 8, one_layer(80_000), iterations=1).summary().error ** 2
        for name in ("q4", "q4@halving_doubling", "q4@broadcast", "fp32")
    }
    once = squared_error(by_name("q4"))  # some more, since noise is encoded as well
    assert math.isclose(found["q4"], once * (7 / 2 + 1), rel_tol=0.1)
    assert math.isclose(found["q4@halving_doubling"], once * (3 / 2 + 1), rel_tol=0.1)
    assert math.isclose(found["q4@broadcast"], once * 7 / 8, rel_tol=1e-9)
    assert found["fp32"] == pytest.approx(0, abs=1e-15)
    together = trained("q8", 1024, one_layer(1 << 20), iterations=1).summary().error ** 2
    once = squared_error(by_name("q8"))
    assert math.isclose(together, once * (1023 / 2 + 1), rel_tol=0.1)


@pytest.mark.parametrize("name", ["q1", "q2", "q3", "q4", "q8", "bf16"])
def test_errors_of_real_rings_are_as_predicted(name):
    codec, ranks, count = by_name(name), 8, 512 * 100
    terms = np.random.default_rng(4).standard_normal((ranks, count)).astype(np.float32)
    wire, total = np.empty(codec.nbytes(count, FLOAT32), np.uint8), np.zeros(count, np.float32)
    for term in terms:
        total += term
        codec.encode(total, wire)
        codec.decode(wire, total)
    right = terms.sum(axis=0)
    found = np.linalg.norm(total - right) / np.linalg.norm(right)
    predicted = trained(name, ranks, one_layer(count), iterations=1).summary().error
    # What one or two bits encode a second time is not normal any more, and loses less.
    near = 0.15 if name in ("q1", "q2") else 0.06
    assert math.isclose(found, predicted, rel_tol=near)


# ---- schemes ----


def test_nothing_waits_when_computation_is_long():
    for name in ("fp32", "q4", "aqat"):
        found = trained(name, model=alike_layers(12, 200_000, 60.0)).summary()
        assert found.wire_wait_s < 0.001 * found.compute_s
        assert found.hidden > 0.85  # but for the last bucket, which is due at once
        assert found.efficiency > 0.999
    assert found.bits > 29


@pytest.mark.parametrize("name", ["aqat", "aqat@halving_doubling"])
@pytest.mark.parametrize("step_s", [1.0, 3.0])
def test_adaptive_bits_are_near_the_best_on_a_steady_link(name, step_s):
    found = trained(name, 8, alike_layers(12, 2_000_000, step_s))
    levels = [2, 3, 4, 5, 6, 7, 8, 16, 32]
    mean = found.summary()
    above = next(level for level in levels if level >= mean.oracle_bits - 1e-9)
    below = max((level for level in levels if level < above), default=2)
    assert mean.oracle_bits - (above - below) <= mean.wire_bits <= 1.02 * mean.oracle_bits
    assert mean.wire_wait_s < 0.05 * found.mean("overlappable_s")


def test_bits_follow_the_bandwidth():
    fast_at = 11.5
    cluster = Cluster(8, traces.replay([(fast_at, BANDWIDTH, None)], BANDWIDTH / 8, 8), ALPHA)
    found = trained("aqat", cluster=cluster, iterations=9).iterations
    before = [each for each in found[3:] if each.begin_s + each.time_s < fast_at]
    after = [each for each in found if each.begin_s > fast_at][1:]  # it has one to learn
    assert len(before) == len(after) == 2
    assert all(each.wire_bits < each.oracle_bits < 8 for each in before)
    assert all(0.9 * each.oracle_bits < each.wire_bits > 20 for each in after)


def test_a_slow_link_is_known_everywhere():
    """Ranks on fast links choose by the slow one: with their own, they would all wait."""
    table = np.full((1, 8), BANDWIDTH)
    table[0, 3] /= 4
    cluster = Cluster(8, Bandwidths(np.zeros(1), table), ALPHA)
    found = trained("aqat", cluster=cluster)
    even = trained("aqat", cluster=steady(8, BANDWIDTH / 4))
    assert found.summary().wire_wait_s < 0.05 * found.mean("overlappable_s")
    assert math.isclose(found.summary().wire_bits, even.summary().wire_bits, rel_tol=0.15)


def test_the_earliest_deadline_goes_first():
    """The last bucket is small and due at once: it must not wait for all that is before it."""
    waits = {
        order: trained("q4", model=alike_layers(12, 2_000_000, 0.2), order=order).summary()
        for order in ("deadline", "arrival")
    }
    assert waits["deadline"].wire_wait_s < 0.6 * waits["arrival"].wire_wait_s


def test_a_bucket_makes_room_for_an_urgent_one_between_two_messages():
    ranks, machine = 4, FREE
    widths = Widths(scheme_of("exact"), machine)
    long = course_of("ring", 4_000_000, ranks, 20_000)
    short = course_of("ring", 4000, ranks, 20_000)
    alone = Call(0, short, np.zeros(ranks))
    Exchange(steady(ranks), machine, widths).run([alone])
    first, urgent = Call(0, long, np.zeros(ranks)), Call(1, short, np.full(ranks, 0.05))
    Exchange(steady(ranks), machine, widths).run([first, urgent])
    message_s = 4 * 20_000 / BANDWIDTH
    took = urgent.done - urgent.ready
    # Each of its six steps waits for one message at most.
    assert np.all(took <= alone.done + 6 * message_s * (1 + 1e-9))
    assert np.all(first.done > 0.15)  # was under way
    assert len({leg.lane for leg in long.legs}) == 50


def test_stragglers_cost_what_the_slowest_rank_takes():
    options = {"ranks": 16, "model": alike_layers(6, 10_000, 0.5), "seed": 3}
    without = trained("q4", **options)
    found = trained("q4", load=Load(stragglers=0.5, slowdown=2.0), **options)
    assert math.isclose(without.summary().iteration_s, 0.5, rel_tol=0.02)
    # With 16 ranks one is nearly always slow, and all wait for it.
    assert 0.9 < found.summary().iteration_s < 1.1
    assert found.summary().peer_wait_s > 0.2
    assert found.summary().wire_wait_s < 0.03


def test_jitter_is_the_same_with_and_without_stragglers():
    forward = [Load(0.1, share).draw(8, np.random.default_rng(2))[0] for share in (0.0, 0.5)]
    ratio = forward[1] / forward[0]
    assert set(np.round(ratio, 9)) == {1.0, 1.5}


def test_one_seed_repeats():
    def once(seed):
        rng = np.random.default_rng(seed)
        cluster = Cluster(8, traces.random_walk(BANDWIDTH, 8, 0.1, rng), ALPHA)
        return trained("aqat", cluster=cluster, load=Load(0.1, 0.1), seed=seed, iterations=3)

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_ranks_that_are_alike_do_alike():
    """Links in a column each, or in one for all; and no rank differs from another."""
    times = np.array([0.0, 1.0, 2.5, 4.0, 7.0])
    column = BANDWIDTH * np.array([[1.0], [0.3], [0.8], [0.2], [1.0]])
    for name in ("aqat", "aqat@halving_doubling", "q4", "aqgb", "cerar"):
        model = alike_layers(4, 500_000, 0.5)
        ends = []
        for table in (column, np.repeat(column, 8, axis=1)):
            cluster = Cluster(8, Bandwidths(times, table), ALPHA)
            training = Training(model, scheme_of(name), cluster, BUSY)
            training.run(4)
            ends.append(training.now)
            assert np.ptp(ends[-1]) <= 1e-9 * ends[-1][0]
        np.testing.assert_allclose(*ends)


def test_nodes_cross_the_network_once():
    """Eight ranks on two nodes: flat halving sends from all four of a node at the same time."""
    model, cluster = alike_layers(4, 1_000_000, 0.2), steady(8, BANDWIDTH / 10, ranks_per_node=4)
    nested = trained("q4@hierarchical", model=model, cluster=cluster)
    ring = trained("q4", model=model, cluster=cluster)
    halving = trained("q4@halving_doubling", model=model, cluster=cluster)
    assert nested.summary().wire_wait_s < ring.summary().wire_wait_s
    assert nested.summary().wire_wait_s < halving.summary().wire_wait_s
    volume = 2 * (2 - 1) / 2 * 4_000_000 / 2  # of 4-bit values, in bytes
    assert math.isclose(nested.summary().sent_nbytes, volume, rel_tol=0.02)


def test_what_cannot_be_simulated_is_refused():
    for name, words in (
        ("q4@cerar", "floats only"),
        ("q4@direct", "no training is simulated"),
        ("ternary", "nothing is known of the error"),
        ("q99", "q99"),
    ):
        with pytest.raises(ValueError, match=words):
            scheme_of(name)
    with pytest.raises(ValueError, match="powers of two, not on 6"):
        trained("q4@halving_doubling", 6)
    with pytest.raises(ValueError, match="6 ranks do not fill nodes of 4"):
        steady(6, ranks_per_node=4)


def test_one_rank_alone_waits_for_nothing():
    found = trained("aqat", 1, iterations=2).summary()
    assert found.iteration_s == found.compute_s
    assert found.sent_nbytes == 0


# ---- the command ----


def test_the_command_prints_and_writes_json(tmp_path, capsys):
    file = tmp_path / "sim.json"
    arguments = ["sim", "--model", "resnet50", "--ranks", "4", "--iterations", "3", "--json"]
    arguments += [str(file), "--trace", "walk", "--step-time", "200ms", "--bandwidth", "1gbit"]
    arguments += ["--stragglers", "0.1", "--schemes", "q4,aqat"]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != "#"] == ["q4", "aqat"]
    report = json.loads(file.read_text())
    assert report["args"]["bandwidth"] == 10**9
    fixed, adaptive = report["results"]
    assert fixed["scheme"] == "q4"
    assert fixed["bits"] == 4
    assert fixed["oracle_bits"] is None
    assert fixed["straggler_cost_s"] > 0
    assert len(adaptive["iterations"]) == 3
    assert adaptive["oracle_bits"] > 0


def test_the_default_schemes_are_those_that_can_be(capsys):
    for options, missing in (
        (["--ranks", "6"], {"aqat@halving_doubling", "hierarchical"}),
        (["--ranks", "8", "--ranks-per-node", "2"], set()),
    ):
        arguments = ["sim", "--model", "resnet50", "--iterations", "1", *options]
        assert cli.main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        found = {line.split()[0] for line in lines if line[0] != "#"}
        assert found == set(command.SCHEMES.split(",")) - missing


def test_the_command_plots(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SWEEP", (0.5, 1))
    monkeypatch.setattr(command, "SWEEP_ITERATIONS", 2)
    arguments = ["sim", "--model", "resnet50", "--ranks", "4", "--iterations", "3", "--schemes"]
    assert cli.main([*arguments, "q4,aqat", "--plot", str(tmp_path / "plots")]) == 0
    written = sorted(file.name for file in (tmp_path / "plots").iterdir())
    assert written == ["sim-bits.png", "sim-row.png", "sim-time.png"]


def test_a_file_of_bandwidths(tmp_path):
    file = tmp_path / "trace.txt"
    file.write_text("# of two nodes\n0 1gbit\n\n5 300mbit 1\n")
    assert command.read_trace(file) == [(0.0, 1.25e8, None), (5.0, 3.75e7, 1)]
    file.write_text("0 1gbit\nfive 300mbit\n")
    with pytest.raises(job.UsageError, match=r"trace.txt:2: expected SECONDS RATE"):
        command.read_trace(file)


@pytest.mark.parametrize(
    ("option", "word"),
    [
        (["--trace", "nowhere"], "no file"),
        (["--iterations", "0"], "1 or more"),
        (["--schemes", "q99"], "q99"),
        (["--ranks", "6", "--ranks-per-node", "4"], "do not fill"),
        (["--interval", "0s"], "more than 0"),
        (["--jitter", "-1"], "makes no sense"),
    ],
)
def test_bad_options(option, word, capsys):
    assert cli.main(["sim", "--model", "resnet50", *option]) == 2
    assert word in capsys.readouterr().err


def test_times_with_units():
    right = {"50us": 5e-5, "1.5s": 1.5, "80ms": 0.08, "2": 2.0}
    assert {text: command.parse_seconds(text) for text in right} == pytest.approx(right)


def test_without_mpi():
    import subprocess
    import sys

    code = """
import sys
sys.modules["mpi4py"] = None
from mpiquant.cli import sim
from mpiquant.sim import Training
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
