"""Adaptive calls on simulated links: bits, deadlines, cuts; no MPI and no real time."""

import itertools
import math

import numpy as np
import pytest
from simulated_wire import Clock, Network, run_all

from mpiquant import adaptive
from mpiquant.codecs import AqatCodec, UniformCodec, by_name
from mpiquant.collectives import ALGORITHMS
from mpiquant.links import (
    BURST_S,
    GROWTH,
    HOLD_S,
    LEAST_ROOM_S,
    LOOK_S,
    PART_S,
    ROOM_S,
    SAMPLE_S,
    SURE_S,
    UNACKNOWLEDGED,
    UNSURE_CALLS,
    Links,
)
from mpiquant.parts import (
    ACK,
    BUSY,
    HEADER_NBYTES,
    LAST,
    Assembly,
    Header,
    ends_of,
    read_part,
)
from mpiquant.pool import pool
from mpiquant.program import compile_program
from mpiquant.rate import Trace
from mpiquant.stats import Stats

MBIT = 1e6 / 8
F4 = np.dtype(np.float32)


# ---- parts ----


def test_a_header_comes_back():
    header = Header(LAST | BUSY, 8, 5, 7, 1 << 40, 1000, 3, 12.5)
    buffer = np.zeros(HEADER_NBYTES + 10, np.uint8)
    header.pack_into(buffer)
    buffer[HEADER_NBYTES:] = np.arange(10)
    found, payload = read_part(buffer)
    assert found == header
    assert payload.tolist() == [0, 1, 2]
    ack = Header(ACK, 0, 0, 7, 1 << 40, 1000, 0, math.nan)
    found, payload = read_part(ack.pack())
    assert found[:-1] == ack[:-1]
    assert math.isnan(found.bandwidth)
    assert payload.size == 0


@pytest.mark.parametrize(
    "header",
    [
        Header(64, 8, 5, 0, 0, 10, 0, 1.0),
        Header(0, 9, 5, 0, 0, 10, 0, 1.0),
        Header(0, 4, 5, 0, 0, 10, 0, 1.0),
        Header(0, 8, 5, 0, 0, 10, 11, 1.0),
    ],
)
def test_what_is_no_part(header):
    buffer = np.zeros(HEADER_NBYTES + 10, np.uint8)
    header.pack_into(buffer)
    with pytest.raises(ValueError, match="not a part"):
        read_part(buffer)
    with pytest.raises(ValueError, match="not a part"):
        read_part(np.zeros(HEADER_NBYTES, np.uint8))
    with pytest.raises(ValueError, match="bytes or more"):
        read_part(np.zeros(5, np.uint8))


LEVELS = ["q1", "q2", *(f"q{bits}" for bits in range(3, 9)), "q16", "exact"]


@pytest.mark.parametrize("target", [0, 1000, 20_000, math.inf])
@pytest.mark.parametrize("name", LEVELS)
def test_parts_add_up_to_the_message(name, target):
    codec, count = by_name(name), 70_001
    bits = 32 if name == "exact" else int(name[1:])
    x = np.random.default_rng(0).standard_normal(count).astype(np.float32)
    wire = np.empty(codec.nbytes(count, F4), np.uint8)
    codec.encode(x, wire)
    ends = ends_of(codec, count, F4, target)
    assert ends[-1].stop == wire.nbytes
    assert all(a.stop < b.stop for a, b in itertools.pairwise(ends))
    assert len(ends) == 1 or target < wire.nbytes
    if isinstance(codec, UniformCodec):
        assert all(3 <= end.planes <= codec.bits for end in ends)
        assert target > 0 or len(ends) == (11 if bits == 16 else max(1, bits - 2))
        assert not any(12 < end.planes < 16 for end in ends)
    assembly, begin = Assembly(5, count, F4), 0
    for i, end in enumerate(ends):
        last = i == len(ends) - 1
        header = Header(LAST if last else 0, bits, end.planes, 0, 5, count, end.stop - begin, 1.0)
        buffer = pool.take(HEADER_NBYTES + end.stop - begin)
        buffer[HEADER_NBYTES:] = wire[begin : end.stop]
        assert assembly.add(header, buffer[HEADER_NBYTES:], buffer) == last
        begin = end.stop
    found, whole = assembly.format()
    assert found == codec
    np.testing.assert_array_equal(whole, wire)
    assembly.release()


def test_foreign_parts_are_refused():
    assembly = Assembly(5, 100, F4)
    buffer = pool.take(1000)
    for header in (Header(0, 8, 3, 0, 6, 100, 10, 1.0), Header(0, 8, 3, 0, 5, 99, 10, 1.0)):
        with pytest.raises(ValueError, match="expected 5"):
            assembly.add(header, buffer[:10], buffer)
    assembly.add(Header(0, 8, 3, 0, 5, 100, 10, 1.0), buffer[:10], buffer)
    buffer = pool.take(1000)
    with pytest.raises(ValueError, match="expected 5"):
        assembly.add(Header(0, 4, 4, 0, 5, 100, 10, 1.0), buffer[:10], buffer)
    with pytest.raises(ValueError, match="bytes came"):
        assembly.add(Header(0, 8, 4, 0, 5, 100, 500, 1.0), buffer[:500], buffer)


# ---- links ----


class _Message:
    def __init__(self, key, deadline, parts, sent, answered=True):
        self.key, self.deadline, self.parts, self.sent = key, deadline, parts, sent
        self.answered = answered

    def send_part(self, now, busy):
        self.parts -= 1
        self.sent.append((self.key, busy))
        return 1000, self.answered

    def begun(self):
        return False

    def ended(self):
        return self.parts == 0


def test_the_earliest_deadline_goes_first_and_few_parts_are_under_way():
    links, sent = Links(), []
    links.queue(1, _Message("late", 2.0, 2, sent))
    links.queue(1, _Message("early", 1.0, 2, sent))
    links.queue(1, _Message("early", 1.0, 1, sent))
    assert links.pump(0.0)
    assert sent == [("early", False), ("early", True)]
    assert len(sent) == UNACKNOWLEDGED
    assert not links.pump(0.0)
    links.acknowledged(1, "early", 0.001, math.nan)
    links.pump(0.001)
    assert sent[2:] == [("early", True), ("late", True), ("late", True)]
    for _ in range(2):
        links.acknowledged(1, "early", 0.02 + SURE_S, 50_000.0)
    assert links.bandwidth(links.to(1).out.bandwidth) == 50_000.0


def test_round_trips_show_what_a_link_moves_at_least():
    """Whatever a peer that was held up may have measured, and for a while."""
    links, sent = Links(), []
    links.queue(1, _Message("a", 1.0, 5, sent))
    links.to(1).out.bandwidth = 1e6
    links.pump(0.0)
    assert len(sent) == 5
    links.acknowledged(1, "a", 0.001, 1e3)
    assert links.to(1).out.bandwidth == 1000 / BURST_S
    links.acknowledged(1, "a", 0.005, 1e3)  # 2000 bytes have come by then
    assert links.to(1).out.bandwidth == 2000 / 0.005
    links.acknowledged(1, "a", 0.005 + SURE_S / 2, 1e3)
    assert links.to(1).out.bandwidth == 2000 / 0.005
    links.acknowledged(1, "a", 0.006 + SURE_S, 1e3)
    assert links.to(1).out.bandwidth == pytest.approx(4000 / (0.006 + SURE_S))


def test_a_fast_link_takes_more_parts():
    links, sent = Links(), []
    links.to(1).out.bandwidth = 2000 / ROOM_S
    links.queue(1, _Message("a", 1.0, 9, sent))
    links.pump(0.0)
    assert len(sent) == 2
    links.to(1).out.bandwidth = 4500 / ROOM_S
    links.pump(LOOK_S)
    assert len(sent) == 5


def test_a_call_that_is_due_earlier_finds_the_link_free():
    links, sent = Links(), []
    links.to(1).out.bandwidth = 10_000 / ROOM_S
    links.expect("soon", 3.1 * LEAST_ROOM_S, 1)
    links.queue(1, _Message("late", 1.0, 99, sent))
    links.pump(0.0)
    fewer = len(sent)
    assert 0 < fewer < 10
    links.expect("soon", 0, 0)
    links.pump(0.0)
    assert len(sent) == 10


def test_a_short_call_that_is_due_holds_up_the_others_for_a_while():
    links, sent = Links(), []
    links.slow = 1e6
    links.begin("short", 1.0, 1)
    links.queue(1, _Message("late", 2.0, 1, sent))
    links.pump(1.0)
    assert sent == []
    links.queue(1, _Message("short", 1.0, 1, sent))
    links.pump(1.0)
    assert [key for key, _ in sent] == ["short"]
    links.acknowledged(1, "short", 1.0, 1e6)
    links.pump(1.0)
    assert len(sent) == 1
    links.pump(1.0 + HOLD_S)  # it may wait for a rank that waits for this
    assert len(sent) == 2


def test_what_nobody_acknowledges_is_forgotten_in_time():
    links, sent = Links(), []
    links.to(1).out.bandwidth = 1000.0
    links.queue(1, _Message("a", 1.0, 1, sent, answered=False))
    links.pump(0.0)
    links.queue(1, _Message("b", 1.0, 1, sent))
    links.pump(0.5)
    assert len(sent) == 1
    links.pump(1.0)
    assert len(sent) == 2


def test_only_a_full_link_shows_its_bandwidth():
    links = Links()
    links.arrived(0.0, 100_000, False)
    for k in range(1, 10):
        links.arrived(k * SAMPLE_S / 2, 5000, True)
    assert links.incoming.bandwidth == pytest.approx(10_000 / SAMPLE_S)
    samples = links.incoming.samples
    for k in range(10, 20):  # one after the other, with rests between
        links.arrived(k * SAMPLE_S, 5000, False)
    assert links.incoming.bandwidth == pytest.approx(10_000 / SAMPLE_S)
    assert links.incoming.samples <= samples + 1  # of what had come before


def test_a_link_that_is_never_full_may_be_faster():
    links = Links()
    links.arrived(0.0, 5000, False)
    links.arrived(SAMPLE_S, 10_000, True)
    for _ in range(UNSURE_CALLS):
        links.finish("a", math.nan, 1)
    assert links.incoming.bandwidth == pytest.approx(10_000 / SAMPLE_S)
    links.finish("a", math.nan, 1)
    assert links.incoming.bandwidth == pytest.approx(GROWTH * 10_000 / SAMPLE_S)
    assert links.is_guessing
    links.finish("a", math.nan, -1)
    assert links.incoming.bandwidth == pytest.approx(10_000 / SAMPLE_S)
    links.arrived(2 * SAMPLE_S, 10_000, True)
    assert not links.is_guessing


def test_calls_that_failed_leave_nothing_behind():
    links, sent = Links(), []
    links.expect("a", 1.0, 10)
    links.queue(1, _Message("a", 1.0, 5, sent))
    links.queue(1, _Message("b", 2.0, 1, sent))
    links.pump(0.0)
    links.forget("a")
    links.pump(0.0)
    assert sent == [("a", False), ("a", True), ("b", True)]
    links.expect("b", 2.0, 10)
    assert links.allowed_bits("b", 0.0, 2, 10.0) == 16.0


def test_what_a_call_knew_at_its_end_serves_the_next_one():
    links = Links()
    assert math.isnan(links.bandwidth(links.to(1).out.bandwidth))
    links.finish("a", 100.0, 1)
    assert links.bandwidth(links.to(1).out.bandwidth) == 100.0
    links.finish("a", math.nan, 1)
    assert links.bandwidth(links.to(1).out.bandwidth) == 100.0
    links.finish("a", 200.0, 1)
    assert links.bandwidth(links.to(1).out.bandwidth) == 175.0
    assert links.bandwidth(7.0) == 7.0
    assert links.bandwidth(170.0, everywhere=True) == 170.0


def test_what_is_under_way_takes_its_time():
    links, sent = Links(), []
    links.expect("a", 1.0, 100)
    assert links.allowed_bits("a", 0.0, 1, 4000.0) == 320
    links.queue(1, _Message("a", 1.0, 9, sent))
    links.pump(0.0)
    assert links.allowed_bits("a", 0.0, 1, 4000.0) == 160
    assert links.allowed_bits("a", 0.0, 2, 4000.0) == 320


# ---- whole calls ----


class Cluster:
    """Ranks whose calls share simulated links."""

    def __init__(self, monkeypatch, size, trace, segment=8192, latency_s=50e-6):
        self.clock = Clock()
        monkeypatch.setattr(adaptive, "time", self.clock)
        self.segment = segment
        self.size, self.links = size, [Links() for _ in range(size)]
        self.network = Network(self.clock, trace, latency_s)

    def executions(self, inputs, outs, budget_s, codec, algorithm="ring", rests=None, tag=0):
        found = []
        for rank in range(self.size):
            x = inputs[rank]
            args = (rank, self.size, x.size, codec, x.dtype, self.segment)
            program = compile_program("allreduce", algorithm, *args)
            found.append(
                adaptive.AdaptiveExecution(
                    program,
                    self.network.of(rank, tag),
                    x,
                    outs[rank],
                    None if rests is None else rests[rank],
                    rank,
                    Stats(),
                    codec=codec,
                    links=self.links[rank],
                    deadline=self.clock.now + budget_s,
                )
            )
        return found

    def allreduce(self, inputs, budget_s, codec=None, algorithm="ring", rests=None):
        outs = [np.full_like(x, np.nan) for x in inputs]
        codec = codec or AqatCodec()
        runs = self.executions(inputs, outs, budget_s, codec, algorithm, rests)
        times = run_all(self.network, runs)
        return outs, [run.stats for run in runs], max(times)


def normals(size, count, dtype=np.float32, seed=0):
    rng = np.random.default_rng([seed, size])
    return [rng.standard_normal(count).astype(dtype) for _ in range(size)]


def steady(mbit):
    return lambda rank: Trace((0.0,), (mbit * MBIT,))


@pytest.mark.parametrize("budget_s", [1e-4, 0.01, 10.0])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_are_identical_and_nothing_is_lost(monkeypatch, algorithm, size, budget_s):
    """With bits that change, cuts, and links that wander, each in its own way."""

    def trace(rank):
        rng = np.random.default_rng(rank)
        return Trace(tuple(np.arange(40) * 0.01), tuple(rng.uniform(10, 100, 40) * MBIT))

    cluster = Cluster(monkeypatch, size, trace)
    count, total, exact = 20_003, 0.0, 0.0
    rests = [np.zeros(count) for _ in range(size)]
    for step in range(3):
        inputs = normals(size, count, np.float64, step)
        for rest, x in zip(rests, inputs, strict=True):
            rest += x
        outs, *_ = cluster.allreduce(inputs, budget_s, None, algorithm, rests)
        for out in outs:
            np.testing.assert_array_equal(out, outs[0])
        total = total + outs[0]
        exact = exact + np.sum(inputs, axis=0)
    np.testing.assert_allclose(total + np.sum(rests, axis=0), exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_with_much_time_all_is_exact(monkeypatch, algorithm, size):
    cluster = Cluster(monkeypatch, size, steady(1000))
    for _ in range(2):
        inputs = [np.full(9001, 2.0**rank) for rank in range(size)]
        outs, stats, _ = cluster.allreduce(inputs, 100.0, None, algorithm)
    for out in outs:
        np.testing.assert_array_equal(out, 2.0**size - 1)
    # A server sends no partial sums, and its clients no final ones.
    assert {bits for s in stats for bits in (s.partial_bits, s.final_bits)} - {None} == {32}


# Between two steps of recursive halving the wires rest.
@pytest.mark.parametrize(("algorithm", "slack"), [("ring", 1.2), ("halving_doubling", 2.5)])
@pytest.mark.parametrize("bits", [2.5, 4.5, 6.2, 7.5])
def test_a_steady_link_is_used_to_the_deadline(monkeypatch, algorithm, slack, bits):
    """The mean width is within about a level of what fits, and the call ends in time."""
    size, count, mbit = 4, 1_600_000, 200
    cluster = Cluster(monkeypatch, size, steady(mbit), 32768)
    values = 2 * (size - 1) * count / size
    budget_s = values * bits / (8 * mbit * MBIT)
    for _ in range(6):
        _, stats, taken = cluster.allreduce(normals(size, count), budget_s, None, algorithm)
    assert taken <= 1.03 * budget_s
    for stat in stats:
        mean = (stat.partial_bits + stat.final_bits) / 2
        assert bits - slack <= mean <= bits
        assert abs(stat.partial_bits - stat.final_bits) <= slack


def test_a_slow_link_is_known_to_all(monkeypatch):
    """One link of four is slow: the others do not take bits that it could not carry later."""
    size, count = 4, 400_000
    mbits = [200, 200, 50, 200]
    cluster = Cluster(monkeypatch, size, lambda rank: Trace((0.0,), (mbits[rank] * MBIT,)))
    values = 2 * (size - 1) * count / size
    budget_s = values * 4.5 / (8 * 50 * MBIT)
    for _ in range(6):
        _, stats, taken = cluster.allreduce(normals(size, count), budget_s)
    assert taken <= 1.15 * budget_s  # some ranks are ahead of the slow one, and see time left
    for stat in stats:
        assert abs(stat.partial_bits - stat.final_bits) <= 2.1
        assert 3.5 <= (stat.partial_bits + stat.final_bits) / 2 <= 5.5


def test_the_bits_recover_with_the_link(monkeypatch):
    size, count = 4, 6_400_000
    trace = Trace((0.0, 5.0), (100 * MBIT, 1000 * MBIT))
    cluster = Cluster(monkeypatch, size, lambda rank: trace, 131072)
    budget_s = 2 * (size - 1) * count / size * 7.5 / (8 * 1000 * MBIT)
    for _ in range(5):
        _, stats, _ = cluster.allreduce(normals(size, count), budget_s)
    assert stats[0].final_bits <= 3
    cluster.clock.now = 5.0
    for _ in range(5):
        _, stats, _ = cluster.allreduce(normals(size, count), budget_s)
    assert stats[0].final_bits >= 6


def test_a_link_that_collapses_costs_two_parts(monkeypatch):
    """From 200 to 20 Mbit/s in the middle of a call: bits fall, messages are cut."""
    size, count, mbit = 4, 1_600_000, 200
    values = 2 * (size - 1) * count / size
    budget_s = values * 8.1 / (8 * mbit * MBIT)
    trace = Trace((0.0, 10 + 0.3 * budget_s), (mbit * MBIT, 0.1 * mbit * MBIT))
    cluster = Cluster(monkeypatch, size, lambda rank: trace, 32768)
    for _ in range(4):
        cluster.allreduce(normals(size, count), budget_s)
    cluster.clock.now = 10.0
    rests = normals(size, count)
    _outs, _stats, taken = cluster.allreduce(normals(size, count), budget_s, None, "ring", rests)
    # What is left at the lowest level takes 0.7 * 2.06 / 8.1 * 10 times the budget.
    least = 0.3 * budget_s + 0.7 * values * 2.0625 / (8 * 0.1 * mbit * MBIT)
    parts = UNACKNOWLEDGED * PART_S * 10
    assert taken <= 1.1 * least + parts


def test_several_calls_share_the_links_by_deadline(monkeypatch):
    size, mbit = 4, 200
    cluster = Cluster(monkeypatch, size, steady(mbit))
    cluster.allreduce(normals(size, 100_000), 0.05)
    counts, budgets = (100_000, 200_000, 400_000), (0.03, 0.08, 0.2)
    runs, outs = [], []
    for tag, (count, budget_s) in enumerate(zip(counts, budgets, strict=True)):
        inputs = normals(size, count)
        outs.append([np.full_like(x, np.nan) for x in inputs])
        runs += cluster.executions(inputs, outs[-1], budget_s, AqatCodec(), tag=1 + tag)
    times = run_all(cluster.network, runs)
    for i, budget_s in enumerate(budgets):
        assert max(times[i * size : (i + 1) * size]) <= 1.1 * budget_s
        for out in outs[i]:
            np.testing.assert_array_equal(out, outs[i][0])
