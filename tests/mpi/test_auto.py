"""Calls that choose their algorithm and codec by what they took."""

import numpy as np
import pytest
from conftest import digests, normals, together

import mpiquant
from mpiquant import api
from mpiquant._comm import channel_of
from mpiquant.plan import Tuner
from mpiquant.plan.tune import LATER, ROUNDS, SAMPLES
from mpiquant.planner.profile import Profile, Wire

pytestmark = pytest.mark.mpi

AUTO = "auto(choices=q8+q4)"
ENOUGH = 2 + (ROUNDS + 1) * 8
"""Calls after which a choice was made: of native, ring, and two codecs with three algorithms."""


@pytest.fixture(autouse=True)
def nothing_known(comm):
    """Choices of other tests are forgotten, on all ranks."""
    channel_of(comm).tuners.clear()
    channel_of(comm).quick.clear()


@pytest.fixture
def pretend(monkeypatch):
    """Say what calls take, by algorithm and codec; 1 s otherwise."""
    seconds = {}

    def note(self, turn, measured):
        if turn.round == self._number:
            self.times[turn.slot] = seconds.get((turn.way.algorithm, turn.way.codec.spec), 1.0)

    monkeypatch.setattr(Tuner, "note", note)
    return seconds


@pytest.mark.parametrize("algorithm", ["auto", "ring", "native", "hierarchical"])
def test_every_call_is_right_and_alike_on_all_ranks(comm, algorithm):
    x, right = normals(comm, 20_000)
    ways = set()
    for _ in range(ENOUGH):
        got, stats = mpiquant.allreduce(x, comm=comm, codec=AUTO, algorithm=algorithm, stats=True)
        ways.add((stats.algorithm, stats.codec))
        told = comm.allgather((stats.algorithm, stats.codec, stats.reason))
        error = np.linalg.norm(got - right) / np.linalg.norm(right)
        with together(comm):
            assert len(set(told)) == 1
            assert error < (1e-6 if stats.codec == "exact" else 0.3)
        if stats.algorithm != "native":
            assert len(digests(comm, got)) == 1
    with together(comm):
        if comm.size == 1 or algorithm == "native":
            assert ways == {("native", "exact")}
        else:
            assert {codec for _, codec in ways} == {"exact", "q8", "q4"}
            assert stats.reason.startswith("auto measured")
        if algorithm in ("ring", "hierarchical") and comm.size > 1:
            assert {name for name, _ in ways} == {algorithm}


def test_the_fastest_way_stays(comm, pretend):
    if comm.size == 1:
        pytest.skip("one rank has nothing to choose")
    x, _ = normals(comm, 20_000)
    pretend["ring", "q4"] = 0.5
    for _ in range(ENOUGH):
        mpiquant.allreduce(x, comm=comm, codec=AUTO)
    got = [mpiquant.allreduce(x, comm=comm, codec=AUTO, stats=True)[1] for _ in range(3)]
    with together(comm):
        assert {(each.algorithm, each.codec) for each in got} == {("ring", "q4")}
        assert "measured ring with q4 at 500 ms" in got[0].reason
        assert "at 1 s" in got[0].reason


def test_native_goes_the_short_way_until_it_is_measured_again(comm, pretend, monkeypatch):
    if comm.size == 1:
        pytest.skip("one rank has nothing to choose")
    x, right = normals(comm, 5000)
    pretend["native", "exact"] = 0.5
    full, real = [0], api._start

    def start(*args, **kwargs):
        full[0] += 1
        return real(*args, **kwargs)

    with mpiquant.options(codec=AUTO):
        for _ in range(ENOUGH):
            mpiquant.allreduce(x, comm=comm)
        (tuner,) = channel_of(comm).tuners.values()
        assert tuner.settled is tuner.ways[0]
        while tuner.left != tuner.period:  # until a period begins
            mpiquant.allreduce(x, comm=comm)
        period = tuner.period
        monkeypatch.setattr(api, "_start", start)
        for _ in range(period):
            got = mpiquant.allreduce(x, comm=comm)
            with together(comm):
                np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
    with together(comm):
        assert full[0] == SAMPLES
        assert tuner.left == tuner.period == 2 * period >= 2 * LATER


def test_a_change_is_found_out(comm, pretend):
    if comm.size == 1:
        pytest.skip("one rank has nothing to choose")
    x, _ = normals(comm, 5000)
    pretend["native", "exact"] = 0.5
    with mpiquant.options(codec="auto"):
        for _ in range(ENOUGH):
            mpiquant.allreduce(x, comm=comm)
        pretend["native", "exact"] = 3.0
        for _ in range(2 * LATER + ENOUGH):
            mpiquant.allreduce(x, comm=comm)
        _, stats = mpiquant.allreduce(x, comm=comm, stats=True)
    with together(comm):
        assert stats.codec in ("exact", "q8")
        assert stats.algorithm != "native"


def test_residuals(comm):
    """Outputs and residuals together are the inputs, whichever way each call went."""
    feedback, name = mpiquant.ErrorFeedback(), "w"
    sums, rights = np.zeros((2, 3000))
    for step in range(20):
        x, right = normals(comm, 3000, np.float64, seed=step)
        sums += mpiquant.allreduce(x, comm=comm, codec=AUTO, feedback=feedback, name=name)
        rights += right
    rest = feedback.residual(name)
    left = comm.allreduce(np.zeros(3000) if rest is None else rest)
    with together(comm):
        np.testing.assert_allclose(sums + left, rights, atol=1e-12)


def test_several_at_once(comm):
    arrays = [normals(comm, 4000 * (1 + k), seed=k) for k in range(4)]
    for _ in range(20):
        requests = [mpiquant.iallreduce(x, comm=comm, codec=AUTO) for x, _ in arrays]
        found = [request.wait() for request in reversed(requests)][::-1]
        with together(comm):
            for got, (_, right) in zip(found, arrays, strict=True):
                assert np.linalg.norm(got - right) < 0.3 * np.linalg.norm(right)


def test_the_other_collectives(comm):
    x, right = normals(comm, 8000)
    for _ in range(20):
        part = mpiquant.reduce_scatter(x, comm=comm, codec=AUTO)
        rows = mpiquant.allgather(x, comm=comm, codec=AUTO)
        own = right[comm.rank * 8000 // comm.size :][: part.size]
        with together(comm):
            if 8000 % comm.size == 0:
                assert np.linalg.norm(part - own) < 0.3 * np.linalg.norm(own)
            assert np.linalg.norm(rows[comm.rank] - x) < 0.3 * np.linalg.norm(x)


def test_after_a_fault_the_trial_goes_on(comm):
    x, right = normals(comm, 6000)
    for step in range(30):
        bad = step in (3, 11) and comm.size > 1
        mine = x[:-1] if bad and comm.rank == 0 else x
        try:
            got = mpiquant.allreduce(mine, comm=comm, codec=AUTO)
        except ValueError:
            assert bad
            continue
        with together(comm):
            assert not bad
            assert np.linalg.norm(got - right) < 0.3 * np.linalg.norm(right)


def test_a_profile_says_what_need_not_be_tried(comm, tmp_path, monkeypatch):
    """Only rank 0 has it; all ranks go by it."""
    if comm.size == 1:
        pytest.skip("one rank has nothing to choose")
    x, _ = normals(comm, 20_000)
    monkeypatch.delenv("MPIQUANT_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if comm.rank == 0:
        file = tmp_path / "profile.json"
        slow = Wire(1e6, 1e-5)  # only bytes count
        Profile(tuple(range(comm.size)), slow, memory=slow).save(file)
        monkeypatch.setenv("MPIQUANT_PROFILE", str(file))
    tried = set()
    for _ in range(ENOUGH):
        _, stats = mpiquant.allreduce(x, comm=comm, codec=AUTO, stats=True)
        tried.add((stats.algorithm, stats.codec))
    with together(comm):
        assert ("ring", "exact") not in tried
        assert {("native", "exact"), ("ring", "q4")} <= tried


def test_a_profile_that_is_none_is_no_harm(comm, tmp_path, monkeypatch, caplog):
    if comm.size == 1:
        pytest.skip("one rank has nothing to choose")
    file = tmp_path / "profile.json"
    file.write_text("{}")
    monkeypatch.setenv("MPIQUANT_PROFILE", str(file))
    x, right = normals(comm, 20_000)
    got = mpiquant.allreduce(x, comm=comm, codec=AUTO)
    with together(comm):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
        assert ("goes without a profile" in caplog.text) == (comm.rank == 0)
