"""Simulated clusters: closed formulas, another simulator, and what must hold on any network."""

import math

import numpy as np
import pytest
import sim_oracle
from sim_machines import ALPHA, BANDWIDTH, BUSY, FREE

from mpiquant.codecs import EXACT, by_name
from mpiquant.collectives import ALGORITHMS
from mpiquant.program import compile_program
from mpiquant.rate import Trace
from mpiquant.sim import WORKLOADS, Engine, Network, simulate, workload
from mpiquant.sim.fast import EXCHANGES, Links, simulate_fast
from mpiquant.sim.network import end_of


def wired(ranks, **options):
    return Network.of(ranks, BANDWIDTH, ALPHA, **options)


# ---- formulas ----


@pytest.mark.parametrize("name", ["exact", "q8", "q3", "q2"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13, 32])
def test_a_ring_takes_what_the_formula_says(ranks, name):
    codec = by_name(name)
    chunk = codec.nbytes(5120, np.dtype(np.float32))
    found = simulate("ring", 5120 * ranks, codec, wired(ranks), FREE)
    right = 2 * (ranks - 1) * (ALPHA + chunk / BANDWIDTH)
    assert math.isclose(found.time_s, right, rel_tol=1e-9)
    assert set(found.messages) == {2 * (ranks - 1)}
    assert set(found.sent) == {2 * (ranks - 1) * chunk}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_few_steps_take_what_their_formulas_say(ranks):
    chunk = 4 * 1000 / BANDWIDTH
    found = simulate("halving_doubling", 1000 * ranks, EXACT, wired(ranks), FREE)
    steps = 2 * math.log2(ranks)
    assert math.isclose(found.time_s, steps * ALPHA + 2 * (ranks - 1) * chunk, rel_tol=1e-9)
    found = simulate("direct", 1000 * ranks, EXACT, wired(ranks), FREE)
    assert math.isclose(found.time_s, 2 * ALPHA + 2 * (ranks - 1) * chunk, rel_tol=1e-9)


def test_what_an_interface_has_saved_up_is_moved_at_once():
    chunk = 2500
    wire = chunk / BANDWIDTH  # 20 us: less than the latency
    saving = Network((0, 1), BANDWIDTH, ALPHA, burst_s=1.5 * wire)
    rested = simulate("ring", 2 * chunk // 4, EXACT, saving, FREE, ready=[1.0, 1.0])
    assert math.isclose(rested.time_s, 1.0 + 2 * ALPHA, rel_tol=1e-9)
    # Nothing is saved up before a call begins, all of the wire's time while a message is under way.
    begun = simulate("ring", 2 * chunk // 4, EXACT, saving, FREE)
    assert math.isclose(begun.time_s, wire + 2 * ALPHA, rel_tol=1e-9)
    # Of what takes longer, as much as was saved up comes sooner.
    long = simulate("direct", 1000 * chunk, EXACT, saving, FREE, ready=[1.0, 1.0])
    right = 1.0 + 2 * (2000 * wire + ALPHA) - 3 * wire
    assert math.isclose(long.time_s, right, rel_tol=1e-9)


def test_segments_hide_kernels_behind_the_wire():
    codec, count = by_name("q4"), 1 << 20
    whole = simulate("ring", count, codec, wired(4), BUSY).time_s
    cut = simulate("ring", count, codec, wired(4), BUSY, segment=16384).time_s
    bare = simulate("ring", count, codec, wired(4), FREE, segment=16384).time_s
    assert bare < cut < whole
    assert cut < 1.15 * bare


# ---- another simulator ----


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["exact", "q4"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_simpy_says_the_same(algorithm, name, ranks):
    """On links of different speeds, so that no two messages are ready at just the same time."""
    rng = np.random.default_rng(ranks)
    codec, dtype = by_name(name), np.dtype(np.float32)
    for count, segment in ((3, 100), (5000, 512), (40_000, 4096), (40_000, 1 << 30)):
        links = tuple(BANDWIDTH * rng.uniform(0.5, 2, ranks))
        network = Network.of(ranks, links, ALPHA)
        ready = list(rng.uniform(0, 1e-3, ranks))
        found = simulate(algorithm, count, codec, network, BUSY, segment=segment, ready=ready)
        programs = [
            compile_program("allreduce", algorithm, rank, ranks, count, codec, dtype, segment)
            for rank in range(ranks)
        ]
        ends = sim_oracle.run(programs, network, BUSY, ready)
        np.testing.assert_allclose(found.ends, ends, rtol=1e-9)


# ---- networks ----


def test_bytes_on_wires_that_change():
    trace = Trace((0.0, 1.0, 3.0), (100.0, 10.0, 50.0))
    assert end_of(50, 0.0, [trace]) == 0.5
    assert end_of(110, 0.0, [trace]) == 2.0
    assert end_of(145, 0.5, [trace]) == 3.0 + 75 / 50
    assert end_of(30, -2.0, [Trace((0.0,), (10.0,))]) == 3.0  # nothing moves before a trace begins
    assert end_of(60, 0.0, [trace, 20.0]) == 1.0 + 2.0 + 20 / 20
    assert end_of(0, 7.0, [trace]) == 7.0


def test_a_link_that_slows_down_slows_the_call():
    half = simulate("ring", 10_000, EXACT, wired(4), FREE).time_s / 2
    trace = Trace((0.0, half), (BANDWIDTH, BANDWIDTH / 10))
    slow = simulate("ring", 10_000, EXACT, Network.of(4, trace, ALPHA), FREE).time_s
    assert half < slow < 20 * half
    one = (trace, BANDWIDTH, BANDWIDTH, BANDWIDTH)
    assert simulate("ring", 10_000, EXACT, Network.of(4, one, ALPHA), FREE).time_s <= slow


def test_ranks_of_a_host_share_its_interface():
    """A ring whose order follows the hosts crosses each interface once in a step, others more."""
    near = Network((0, 0, 1, 1), BANDWIDTH, ALPHA)
    far = Network((0, 1, 0, 1), BANDWIDTH, ALPHA)
    near_s = simulate("ring", 400_000, EXACT, near, FREE).time_s
    far_s = simulate("ring", 400_000, EXACT, far, FREE).time_s
    bytes_s = 2 * 3 * 400_000 / BANDWIDTH
    assert bytes_s <= near_s < 1.1 * bytes_s
    assert 1.9 * bytes_s < far_s < 2.1 * bytes_s


def test_a_switch_that_is_too_slow_for_all_hosts():
    fast = simulate("ring", 80_000, EXACT, wired(8, switch=8 * BANDWIDTH), FREE).time_s
    slow = simulate("ring", 80_000, EXACT, wired(8, switch=2 * BANDWIDTH), FREE).time_s
    assert math.isclose(fast, simulate("ring", 80_000, EXACT, wired(8), FREE).time_s, rel_tol=0.2)
    assert 3 * fast < slow < 5 * fast


def test_all_wait_for_a_late_rank():
    even = simulate("ring", 10_000, EXACT, wired(4), FREE)
    late = simulate("ring", 10_000, EXACT, wired(4), FREE, ready=[0, 0, 1.0, 0])
    assert min(late.ends) > 1.0
    assert late.time_s <= (1.0 + even.time_s) * (1 + 1e-12)


def test_other_kinds_take_half_the_steps():
    whole = simulate("ring", 8000, EXACT, wired(4), FREE).time_s
    for kind in ("reduce_scatter", "allgather"):
        half = simulate("ring", 8000, EXACT, wired(4), FREE, kind=kind).time_s
        assert math.isclose(half, whole / 2, rel_tol=1e-9)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="2 ranks, the call 0"):
        Engine([], wired(2), FREE)


# ---- workloads ----

PUBLISHED = {
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "bert": 109_482_240,
    "gpt2": 124_439_808,
    "neox1.4b": 1_414_647_808,
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_parameters_are_those_of_the_published_model(name):
    found = workload(name)
    assert found.parameters == PUBLISHED[name]
    assert math.isclose(sum(found.forward_s()) + sum(found.backward_s()), found.step_s)


def test_multiplications_are_those_of_the_published_models():
    assert math.isclose(workload("resnet50").products, 4.09e9, rel_tol=0.01)
    assert math.isclose(workload("vgg16").products, 15.5e9, rel_tol=0.01)


def test_an_unknown_workload_is_named():
    with pytest.raises(ValueError, match="'lenet'; known are resnet50"):
        workload("lenet")


# ---- many ranks at a time ----


@pytest.mark.parametrize("algorithm", EXCHANGES)
@pytest.mark.parametrize("name", ["exact", "q4", "q8"])
@pytest.mark.parametrize("ranks", [2, 4, 7, 16])
def test_the_fast_way_takes_the_same_times(algorithm, name, ranks):
    codec = by_name(name)
    if algorithm == "halving_doubling" and ranks == 7:
        with pytest.raises(ValueError, match="not the same for all"):
            simulate_fast(algorithm, 64, codec, Links(ranks, BANDWIDTH), FREE)
        return
    for per_rank, segment in ((1, None), (700, None), (700, 512), (5120, 1024)):
        if algorithm == "halving_doubling" and segment is not None:
            continue
        for burst_s in (0.0, 30e-6):
            network = Network(tuple(range(ranks)), BANDWIDTH, ALPHA, burst_s=burst_s)
            links = Links(ranks, BANDWIDTH, ALPHA, burst_s)
            args = (algorithm, per_rank * ranks, codec)
            slow = simulate(*args, network, BUSY, segment=segment)
            fast = simulate_fast(*args, links, BUSY, segment=segment)
            np.testing.assert_allclose(fast.ends, slow.ends, rtol=1e-9)
            np.testing.assert_allclose(fast.kernel_s, slow.kernel_s, rtol=1e-9)
            assert fast.sent == slow.sent
            assert fast.messages == slow.messages


@pytest.mark.parametrize("ranks", [2, 5, 16])
def test_rings_with_links_of_their_own_late_ranks_and_traces(ranks):
    rng = np.random.default_rng(ranks)
    ready = rng.uniform(0, 1e-3, ranks)
    speeds = BANDWIDTH * rng.uniform(0.2, 2, ranks)
    trace = Trace((0.0, 4e-4, 9e-4, 2e-3), (BANDWIDTH, BANDWIDTH / 7, BANDWIDTH, BANDWIDTH / 3))
    args = ("ring", 5120 * ranks, by_name("q4"))
    for network, links in (
        (Network.of(ranks, tuple(speeds), ALPHA), Links(ranks, speeds, ALPHA)),
        (Network.of(ranks, trace, ALPHA), Links(ranks, trace, ALPHA)),
    ):
        slow = simulate(*args, network, BUSY, segment=1024, ready=ready)
        fast = simulate_fast(*args, links, BUSY, segment=1024, ready=ready)
        np.testing.assert_allclose(fast.ends, slow.ends, rtol=1e-9)


def test_segments_make_ranks_of_halving_and_doubling_unlike():
    with pytest.raises(ValueError, match="not the same for all"):
        simulate_fast("halving_doubling", 64, EXACT, Links(4, BANDWIDTH), FREE, segment=8)


def test_very_many_ranks():
    ranks = 4096
    found = simulate_fast("halving_doubling", 64 * ranks, EXACT, Links(ranks, 1e9, 1e-5), FREE)
    right = 24 * 1e-5 + 2 * (ranks - 1) * 256 / 1e9
    assert math.isclose(found.time_s, right, rel_tol=1e-9)
