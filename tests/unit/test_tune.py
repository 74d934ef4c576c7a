"""The choice among ways to run a call, on ranks whose times are made up."""

import math

import numpy as np
import pytest

from mpiquant.codecs import EXACT, AutoCodec, by_name
from mpiquant.plan import Tuner, Way
from mpiquant.plan.tune import LATER, MOST, ROUNDS, SAMPLES

Q8, Q4 = by_name("q8"), by_name("q4")
WAYS = (
    Way("native", EXACT),
    Way("ring", EXACT),
    Way("ring", Q8),
    Way("direct", Q8),
    Way("ring", Q4),
)


class Ranks:
    """Some ranks that make the same calls, each with a tuner."""

    def __init__(self, times, ranks=3, ways=WAYS, late=0.0):
        self.times = dict(zip(ways, times, strict=True))
        self.tuners = [Tuner(ways) for _ in range(ranks)]
        self.random = np.random.default_rng(1)
        self.late = late
        self.made = []

    def call(self, noted=True, predictions=None):
        turns = [tuner.turn() for tuner in self.tuners]
        assert len(set(turns)) == 1, "ranks do different things"
        (turn,) = set(turns)
        self.made.append(turn.way)
        for rank, tuner in enumerate(self.tuners):
            waits = self.late * self.random.random() if rank else 0.0
            if noted:
                tuner.note(turn, self.times[turn.way] + waits)
        if turn.asks:
            expected = predictions or [math.inf] * len(WAYS)
            for tuner in self.tuners:
                tuner.expect(expected)
        elif turn.closes:
            least = [min(each) for each in zip(*(t.times for t in self.tuners), strict=True)]
            for tuner in self.tuners:
                tuner.agree(least)
        return turn

    def settle(self):
        for _ in range(1 + (ROUNDS + 1) * len(WAYS)):
            self.call()
            if self.tuners[0].best is not None:
                break
        return self.tuners[0].ways[self.tuners[0].best]


@pytest.mark.parametrize("best", range(len(WAYS)))
def test_the_fastest_way_stays(best):
    times = [2.0 + i for i in range(len(WAYS))]
    times[best] = 1.0
    ranks = Ranks(times, late=0.5)
    assert ranks.settle() == WAYS[best]
    assert all(ranks.call().way == WAYS[best] for _ in range(LATER))
    assert str(WAYS[best]) in ranks.tuners[0].reason


def test_late_ranks_do_not_count():
    """Times differ by a fifth, waits for a late rank by the double of it."""
    assert Ranks([1.2, 1.4, 1.0, 1.2, 1.4], late=2.0).settle() == WAYS[2]


def test_exact_values_are_preferred_where_codecs_gain_nothing():
    assert Ranks([1.02, 3, 1.0, 1.01, 1.0]).settle() == WAYS[0]
    assert Ranks([1.2, 3, 1.02, 1.3, 1.0]).settle() == WAYS[2]
    assert Ranks([1.2, 3, 1.2, 1.3, 1.0]).settle() == WAYS[4]


def test_what_is_far_behind_is_not_tried_again():
    ranks = Ranks([10.0, 2.0, 1.0, 1.4, 1.2])
    ranks.settle()
    tries = [ranks.made.count(way) for way in WAYS]
    assert tries == [2, 2, 4, 4, 4]  # native once more, for the first call of all


def test_predictions_leave_ways_out():
    ranks = Ranks([10.0, 2.0, 1.0, 1.4, 1.2])
    ranks.call(predictions=[9.0, 8.0, 1.1, 1.0, math.inf])
    ranks.settle()
    assert ranks.made.count(WAYS[1]) == 0
    assert ranks.made.count(WAYS[0]) == 2
    assert ranks.settle() == WAYS[2]


def test_a_change_is_noticed_and_only_then():
    ranks = Ranks([3.0, 4.0, 1.0, 2.0, 1.5])
    assert ranks.settle() == WAYS[2]
    before = len(ranks.made)
    for _ in range(5 * MOST):
        ranks.call()
    assert set(ranks.made[before:]) == {WAYS[2]}
    for way in WAYS:  # the link became faster: codecs do not pay any more
        ranks.times[way] = 0.1 if way == WAYS[0] else 0.2
    for _ in range(MOST + (ROUNDS + 1) * len(WAYS)):
        ranks.call()
    assert ranks.made[-1] == WAYS[0]


def test_measured_calls_are_few():
    ranks = Ranks([3.0, 4.0, 1.0, 2.0, 1.5])
    ranks.settle()
    turns = [ranks.call() for _ in range(LATER + 2 * LATER)]
    assert sum(turn.round >= 0 for turn in turns) == 2 * SAMPLES
    assert sum(turn.closes for turn in turns) == 2


def test_settled_calls_may_be_counted_without_a_turn():
    ranks = Ranks([1.0, 4.0, 2.0, 2.0, 1.5])
    ranks.settle()
    skipped, turned = ranks.tuners[0], ranks.tuners[1]
    for _ in range(LATER - SAMPLES):
        assert skipped.settled is WAYS[0]
        skipped.skip()
        turned.turn()
    assert skipped.settled is turned.settled is None
    assert skipped.turn() == turned.turn()


def test_rounds_whose_calls_have_not_ended_are_made_again():
    ranks = Ranks([3.0, 4.0, 1.0, 2.0, 1.5])
    for _ in range(20):
        ranks.call(noted=False)
    assert ranks.tuners[0].best is None
    assert ranks.settle() == WAYS[2]


def test_after_a_failed_call_the_round_is_made_again():
    ranks = Ranks([3.0, 4.0, 1.0, 2.0, 1.5])
    ranks.call()
    for _ in WAYS:  # fail: nothing is noted or agreed on
        for tuner in ranks.tuners:
            tuner.turn()
    assert ranks.settle() == WAYS[2]


def test_a_time_that_comes_too_late_is_not_taken_for_another():
    tuner = Tuner(WAYS)
    tuner.turn()
    tuner.expect([math.inf] * len(WAYS))
    first = tuner.turn()
    for _ in WAYS[1:]:
        tuner.turn()
    tuner.agree([math.inf] * len(WAYS))
    tuner.note(first, 1.0)
    assert tuner.times == [math.inf] * len(WAYS)


def test_one_way_needs_no_trial():
    tuner = Tuner(WAYS[:1])
    for _ in range(3 * LATER):
        assert tuner.settled is WAYS[0]
        assert tuner.turn().round == -1


def test_codec():
    codec = by_name("auto")
    assert codec == AutoCodec()
    assert codec.choices == (Q8,)
    assert by_name(codec.spec) == codec
    assert by_name("auto(choices=q8+q4(block=64))").choices == (Q8, by_name("q4(block=64)"))
    for wrong in ("auto(choices=aqat)", "auto(choices=top_k)", "auto(choices=auto)"):
        with pytest.raises(ValueError, match="auto cannot choose"):
            by_name(wrong)
    with pytest.raises(ValueError, match="empty"):
        AutoCodec(choices=())
