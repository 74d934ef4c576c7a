"""Rate control: pure functions of numbers."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiquant.rate import (
    Levels,
    Overlap,
    Throughput,
    Trace,
    Window,
    bits_until,
    blend,
    expected_bits,
    fitting_bits,
    hidden,
    oracle,
    overlap_s,
    remembered,
    row,
    share_s,
    shared_bits,
    shared_bits_of,
    slowest,
    with_reserve,
)
from mpiquant.rate.throughput import HALF_S, HALF_UP_S

MBIT = 1e6 / 8
LEVELS = Levels((2, 3, 4, 8, 32), (2.0625, 3.0625, 4.0625, 8.0625, 32.0))


# ---- levels ----


@pytest.mark.parametrize(
    ("allowed", "bits"),
    [
        (-1.0, 2),
        (0.0, 2),
        (2.0625, 2),
        (3.06, 2),
        (3.0625, 3),
        (8.0, 4),
        (31.9, 8),
        (32.0, 32),
        (math.inf, 32),
    ],
)
def test_the_highest_level_that_costs_no_more(allowed, bits):
    assert LEVELS.floor(allowed) == LEVELS.highest(allowed) == bits


def test_levels_of_many_ranks_at_once():
    assert LEVELS.floor([1.0, 5.0, 40.0]).tolist() == [2, 4, 32]


@pytest.mark.parametrize(
    ("bits", "costs", "word"),
    [((), (), "costs"), ((2, 3), (2.0,), "costs"), ((3, 2), (2.0, 3.0), "bits"),
     ((2, 3), (3.0, 3.0), "costs")],
)  # fmt: skip
def test_levels_rise(bits, costs, word):
    with pytest.raises(ValueError, match=word):
        Levels(bits, costs)


# ---- what fits ----


def test_bits_that_fit():
    assert fitting_bits(0.5, 100 * MBIT, 10e6) == 5.0
    assert fitting_bits(-0.5, 100 * MBIT, 10e6) == 0.0
    assert fitting_bits(0.5, 100 * MBIT, 0) == math.inf
    assert fitting_bits([1.0, 2.0], 100 * MBIT, [1e6, 1e8]).tolist() == [100.0, 2.0]


def test_one_array_has_the_link_for_itself():
    assert shared_bits(1.0, [1.5], [10e6], 100 * MBIT) == [5.0]


def test_an_array_leaves_time_for_those_that_are_due_earlier():
    # The first one alone could have 10 bits until 1.0; both together have 20e6 values until 1.2.
    bits = shared_bits(0.0, [1.0, 1.2], [10e6, 10e6], 100 * MBIT)
    assert bits.tolist() == [6.0, 6.0]
    # With the later deadline further away, each is limited by its own.
    bits = shared_bits(0.0, [1.0, 3.0], [10e6, 10e6], 100 * MBIT)
    assert bits.tolist() == [10.0, 15.0]


def test_what_was_sent_holds_nothing_up():
    bits = shared_bits(1.0, [0.5, 2.0], [0, 10e6], 100 * MBIT)
    assert bits.tolist() == [10.0, 10.0]


def test_a_missed_deadline_leaves_no_bits_to_its_array():
    bits = shared_bits(1.0, [0.5, 2.0], [1e6, 9e6], 100 * MBIT)
    assert bits.tolist() == [0.0, 10.0]


deadlines_and_values = st.lists(
    st.tuples(st.floats(0.1, 10), st.integers(0, 10**8)), min_size=1, max_size=6
)


@given(deadlines_and_values)
def test_the_shared_law_is_the_formula(arrays):
    deadlines, values = map(np.array, zip(*arrays, strict=True))
    found = shared_bits(0.05, deadlines, values, MBIT)
    for i, bits in enumerate(found):
        if not values[i]:
            continue  # any number of bits will do
        limits = [
            8 * MBIT * (d - 0.05) / values[deadlines <= d].sum()
            for d, v in zip(deadlines, values, strict=True)
            if d >= deadlines[i] and v > 0
        ]
        assert bits == pytest.approx(min(limits, default=math.inf))
        arrays = [(d, v, math.inf) for d, v in zip(deadlines, values, strict=True)]
        assert bits_until(deadlines[i], 0.05, arrays, MBIT) == pytest.approx(bits)


@given(deadlines_and_values)
def test_the_shared_law_for_many_ranks_is_that_for_each(arrays):
    deadlines, values = map(np.array, zip(*arrays, strict=True))
    times, bandwidths = np.array([0.0, 0.05, 0.09]), np.array([1.0, 2.0, 30.0]) * MBIT
    of_each = np.broadcast_to(deadlines, (3, deadlines.size))
    together = shared_bits(times, of_each, values, bandwidths)
    for i in range(3):
        alone = shared_bits(times[i], deadlines, values, bandwidths[i])
        np.testing.assert_array_equal(together[i], alone)


@given(st.floats(0.05, 20), st.integers(1, 40), st.floats(0.5, 3))
def test_a_call_ends_at_its_deadline(bits, parts, drift):
    """Each part takes the level that fits: the call ends in time, and leaves less than a level."""
    bandwidth, values = 100 * MBIT, 1e6
    total_s = parts * values * bits / (8 * bandwidth)
    now, widths = 0.0, []
    for i in range(parts):
        true = bandwidth * (drift if i >= parts / 2 else 1)
        allowed = fitting_bits(total_s - now, true, (parts - i) * values)
        index = int(LEVELS.index(allowed))
        widths.append(LEVELS.bits[index])
        now += LEVELS.costs[index] * values / (8 * true)
    if bits >= LEVELS.costs[0] and drift >= 1:
        assert now <= total_s * (1 + 1e-9)
    if drift == 1 and bits < LEVELS.costs[-1]:
        assert now >= total_s - 24 * values / (8 * bandwidth)
    assert all(a <= b for a, b in itertools.pairwise(widths)) or drift < 1


# ---- throughput ----


@pytest.mark.parametrize(("half_s", "mbit"), [(HALF_S, 10), (HALF_UP_S, 190)])
def test_a_sample_of_half_time_counts_half(half_s, mbit):
    link = Throughput(100 * MBIT)
    link.add(mbit * MBIT * half_s, half_s)
    assert link.bandwidth == pytest.approx((100 + mbit) / 2 * MBIT)
    assert link.samples == 1


def test_one_low_sample_of_five_counts_nothing():
    link = Throughput()
    for mbit in (100, 100, 5, 100, 100, 100, 100, 5, 100):
        link.add(mbit * MBIT * 0.01, 0.01)
    assert link.bandwidth == pytest.approx(100 * MBIT)


@pytest.mark.parametrize("samples", [1, 10, 100])
@pytest.mark.parametrize(("half_s", "mbit"), [(HALF_S, 10), (HALF_UP_S, 1000)])
def test_many_short_samples_are_as_good_as_a_long_one(samples, half_s, mbit):
    link, seconds = Throughput(100 * MBIT), 3 * half_s / samples
    for _ in range(samples):
        link.add(mbit * MBIT * seconds, seconds)
    assert link.bandwidth == pytest.approx((mbit + (100 - mbit) / 8) * MBIT)


def test_a_collapse_is_seen_in_a_few_parts():
    link = Throughput()
    for _ in range(10):
        link.add(1000 * MBIT * 0.01, 0.01)
    for _ in range(5):  # of 4 ms, ten times as long
        link.add(100 * MBIT * 0.04, 0.04)
    assert link.bandwidth < 300 * MBIT


def test_what_an_idle_sender_sends_can_only_raise_the_estimate():
    link = Throughput(1000.0)
    link.add(10, 1.0, idle=True)
    assert link.bandwidth == 1000
    link.add(2000 * HALF_UP_S, HALF_UP_S, idle=True)
    assert link.bandwidth == pytest.approx(1500)
    link.add(0, 0.0)
    assert link.samples == 2


def test_few_bits_do_not_make_estimates_sink():
    """Messages of few bits end before their share of the time: the sender is idle then."""
    link, true = Throughput(1000 * MBIT), 1000 * MBIT
    for _ in range(100):
        link.add(int(0.2 * true), 1.0, idle=True)
    assert link.bandwidth == true


def test_samples_of_many_links_at_once():
    found = blend([np.nan, 100.0, 100.0], [50.0, 50.0, 50.0], HALF_S, [False, False, True])
    assert found.tolist() == pytest.approx([50.0, 75.0, 100.0])


def test_the_slowest_of_those_that_are_known():
    assert slowest(math.nan, 3.0, 2.0) == 2.0
    assert math.isnan(slowest(math.nan, math.nan))


# ---- budget ----


def test_the_overlappable_time_is_without_the_waiting():
    overlap = Overlap()
    assert overlap.predicted_s is None
    overlap.add(1.0, 3.0, waited_s=0.5)
    assert overlap.predicted_s == 1.5
    overlap.add(3.0, 3.5, waited_s=1.0)
    assert overlap.predicted_s == 0.75


def test_two_odd_iterations_do_not_disturb_the_prediction():
    overlap = Overlap([1.0, 1.1, 0.9])
    overlap.add(0.0, 50.0)
    overlap.add(0.0, 0.0)
    assert overlap.predicted_s == 1.0
    for _ in range(3):
        overlap.add(0.0, 2.0)
    assert overlap.predicted_s == 2.0


def test_steps_share_the_time_by_their_values():
    assert share_s(2.0, np.array([1.0, 3.0]), 8).tolist() == [0.25, 0.75]


# ---- ROW ----


def test_row_and_hidden_share():
    overlap = overlap_s([4.0, 1.0, 0.0], [1.0, 2.0, 0.0])
    assert overlap.tolist() == [3.0, 0.0, 0.0]
    assert row(overlap, [1.0, 2.0, 0.0])[:2].tolist() == [3.0, 0.0]
    assert row(1.0, 0.0) == math.inf
    assert hidden(overlap, [1.0, 2.0, 0.0]).tolist() == [0.75, 0.0, 1.0]


# ---- oracle ----

STEADY = Trace((0.0,), (100 * MBIT,))


def test_one_array_on_a_steady_link_gets_what_the_link_moves():
    best = oracle(STEADY, [Window(1.0, 1.5, 10e6)])
    assert best.bits == pytest.approx(5.0)
    assert best.feasible


def test_more_than_exact_values_are_never_sent():
    best = oracle(STEADY, [Window(0.0, 10.0, 10e6)])
    assert best.bits == best.widths[0] == 32.0


def test_a_deadline_that_nobody_can_meet():
    best = oracle(STEADY, [Window(0.0, 0.1, 10e6), Window(0.0, 9.0, 10e6)])
    assert not best.feasible
    assert best.widths == pytest.approx((1.0, 32.0))


def test_nested_windows():
    # The last layer is ready first and needed last; the first layer's window is within.
    best = oracle(STEADY, [Window(0.0, 4.0, 40e6), Window(1.0, 2.0, 20e6)])
    assert best.bits == pytest.approx(400e6 / 60e6)
    assert best.widths == pytest.approx((7.5, 5.0))


def test_a_link_that_changes():
    trace = Trace((0.0, 1.0, 2.0), (100 * MBIT, 10 * MBIT, 1000 * MBIT))
    assert trace.nbytes(0.5, 2.5) == pytest.approx((50 + 10 + 500) * MBIT)
    best = oracle(trace, [Window(0.5, 2.0, 10e6)])
    assert best.bits == pytest.approx(6.0)


@given(deadlines_and_values, st.floats(2, 8))
def test_no_controller_beats_the_oracle(arrays, start):
    """The shared law, served by deadline on a steady link, meets what can be met."""
    windows = [Window(0.0, due, values) for due, values in arrays]
    best = oracle(STEADY, windows, lowest=start)
    left = {i: w for i, w in enumerate(windows) if w.values}
    now, bits, late = 0.0, 0.0, False
    for i in sorted(left, key=lambda i: windows[i].due):
        rest = list(left.values())
        found = shared_bits(now, [w.due for w in rest], [w.values for w in rest], 100 * MBIT)
        width = min(32.0, max(start, found[list(left).index(i)]))
        now += width * windows[i].values / (8 * 100 * MBIT)
        bits += width * windows[i].values
        late |= now > windows[i].due * (1 + 1e-9)
        del left[i]
    if best.feasible:
        assert not late
        values = sum(w.values for w in windows)
        assert bits <= best.bits * values * (1 + 1e-9) or not values


@pytest.mark.parametrize(
    ("times", "bandwidths"), [((), ()), ((0.0,), (1.0, 2.0)), ((1.0, 1.0), (1.0, 2.0))]
)
def test_a_trace_is_a_list_of_changes(times, bandwidths):
    with pytest.raises(ValueError, match="time"):
        Trace(times, bandwidths)


@given(
    st.lists(
        st.tuples(
            st.floats(0.1, 10), st.integers(1, 10**7), st.sampled_from([2.0, 5.5, 9, math.inf])
        ),
        min_size=1,
        max_size=6,
    )
)
def test_what_others_do_not_take_is_shared(arrays):
    """By bisection: the largest b with sum of values * min(b, most) within each deadline's room."""
    deadlines, values, most = map(np.array, zip(*arrays, strict=True))
    found = shared_bits(0.05, deadlines, values, MBIT, most)
    for i in range(len(arrays)):
        caps = np.where(np.arange(len(arrays)) == i, np.inf, most)
        allowed = math.inf
        for end in deadlines[deadlines >= deadlines[i]]:
            due = deadlines <= end
            low, high = 0.0, 1e12
            for _ in range(100):
                middle = (low + high) / 2
                fits = np.sum(values[due] * np.minimum(middle, caps[due])) <= 8 * MBIT * (
                    end - 0.05
                )
                low, high = (middle, high) if fits else (low, middle)
            allowed = min(allowed, low)
        assert found[i] == pytest.approx(allowed, rel=1e-6, abs=1e-9)
        triples = list(zip(deadlines, values, caps, strict=True))
        assert bits_until(deadlines[i], 0.05, triples, MBIT) == pytest.approx(found[i])


@given(
    st.one_of(st.just(math.nan), st.floats(1, 1e9)),
    st.floats(1, 1e9),
    st.floats(1e-3, 1),
    st.booleans(),
)
def test_plain_numbers_blend_as_arrays_do(estimate, sample, seconds, idle):
    arrays = blend([estimate], [sample], [seconds], [idle])
    assert blend(estimate, sample, seconds, idle) == pytest.approx(arrays[0])


# ---- of many ranks ----


def test_overlaps_of_many_ranks_are_those_of_each():
    rng = np.random.default_rng(0)
    ready, need, waited = rng.uniform(0, 1, (3, 7, 4))
    together, apart = Overlap(), [Overlap() for _ in range(4)]
    assert together.predicted_s is None
    for times in zip(ready, need, waited, strict=True):
        together.add(*times)
        for overlap, *own in zip(apart, *times, strict=True):
            overlap.add(*map(float, own))
        right = [overlap.predicted_s for overlap in apart]
        np.testing.assert_allclose(together.predicted_s, right)
    assert len(together.last) == 5


def test_the_law_for_one_array_is_that_for_all():
    rng = np.random.default_rng(1)
    now, bandwidth = rng.uniform(0, 1, 20), rng.uniform(1, 2, 20) * MBIT
    ends, most = rng.uniform(0.5, 3, (20, 5)), rng.uniform(2, 8, (20, 5))
    left = np.array([1e5, 0.0, 3e5, 2e5, 1e5])
    every = shared_bits(now, ends, left, bandwidth, most)
    for i in range(5):
        one = shared_bits_of(i, now, ends, left, bandwidth, most)
        np.testing.assert_array_equal(one, every[:, i])
        for rank in range(20 if left[i] else 0):
            caps = np.where(np.arange(5) == i, math.inf, most[rank])
            arrays = list(zip(ends[rank], left, caps, strict=True))
            right = bits_until(ends[rank, i], now[rank], arrays, bandwidth[rank])
            assert math.isclose(one[rank], right, rel_tol=1e-9)


def test_a_part_of_the_time_is_kept_in_reserve():
    assert with_reserve(3.0, 1.0, 0.1) == 2.8
    assert with_reserve([3.0, 0.5], 1.0, 0.1).tolist() == [2.8, 0.5]


def test_a_call_is_expected_to_go_on_as_it_began():
    assert expected_bits(40.0, 10.0) == 4.25


def test_the_slowest_link_is_remembered():
    assert remembered(4.0, 8.0) == 7.0
    assert remembered([math.nan, 4.0], [8.0, math.nan]).tolist() == [8.0, 4.0]
    assert math.isnan(remembered(math.nan, math.nan))
