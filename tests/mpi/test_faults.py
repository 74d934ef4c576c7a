"""Ranks that disagree, refuse, stay away or come late: errors on all, with names, and no hang."""

import logging
import time

import numpy as np
import pytest
from conftest import digests, raised, together
from mpi4py import MPI

import mpiquant
from mpiquant import progress

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = (3, 6, 3_000_000)

MISMATCHES = {
    "length": (("shape", "1001"), lambda odd, n: {"x": np.ones(n + odd)}),
    "dtype": (("dtype", "<f4", "<f8"), lambda odd, n: {"x": np.ones(n, "f8" if odd else "f4")}),
    "equal bytes": (
        ("<f4", "<f8"),
        lambda odd, n: {"x": np.ones(n, "f8") if odd else np.ones(2 * n, "f4")},
    ),
    "bits": (("'q4'", "'q8'"), lambda odd, n: {"codec": "q8" if odd else "q4"}),
    "block": (
        ("codec", "256"),
        lambda odd, n: {"codec": mpiquant.UniformCodec(bits=8, block=256 if odd else 512)},
    ),
    "rounding": (
        ("codec",),
        lambda odd, n: {
            "codec": mpiquant.UniformCodec(bits=4, rounding="stochastic" if odd else "nearest")
        },
    ),
    "op": (("op", "'mean'", "'sum'"), lambda odd, n: {"op": "mean" if odd else "sum"}),
    "native op": (("op", "'max'", "'sum'"), lambda odd, n: {"op": MPI.MAX if odd else MPI.SUM}),
    "algorithm": (
        ("algorithm", "'ring'", "'direct'"),
        lambda odd, n: {"algorithm": "ring" if odd else "direct", "codec": "q8"},
    ),
    "name": (("name", "'w'", "'b'"), lambda odd, n: {"name": "w" if odd else "b"}),
    "native against compressed": (("codec",), lambda odd, n: {"codec": "q8" if odd else None}),
    "native against ring": (
        ("algorithm", "'native'", "'ring'"),
        lambda odd, n: {"algorithm": "ring" if odd else "native"},
    ),
}


TRAVELLING = ("bits", "block", "rounding", "algorithm")
"""Kinds of which both plans are compressed, or run on a schedule."""


def differing(comm, kind, count, private, known=()):
    """Errors of a call in which the last rank differs; the outputs; and a right call behind it.

    Plans that are known were used before: 0 is that of most ranks, 1 that of the last.
    """
    words, make = MISMATCHES[kind]
    for odd in known:
        call = {"x": np.ones(count), "comm": private, **make(odd, count)}
        mpiquant.allreduce(**call)
    arguments = {"x": np.ones(count), **make(int(comm.rank == comm.size - 1), count)}
    out = np.full(arguments["x"].shape, -7.0, arguments["x"].dtype)
    begin = time.monotonic()
    errors = raised(comm, lambda: mpiquant.allreduce(comm=private, out=out, **arguments))
    took = time.monotonic() - begin
    after = mpiquant.allreduce(np.ones(count), comm=private)
    return errors, words, out, took, after


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_b04_new_plans_that_differ(comm, kind, count):
    if count == COUNTS[-1] and comm.size > 5:
        pytest.skip("as on fewer ranks")
    private = comm.Dup()
    errors, words, out, took, after = differing(comm, kind, count, private)
    with together(comm):
        assert all(e and "ValueError" in e[0] and "AgreementError" in e[0] for e in errors), errors
        for word in words:
            if word != "1001":
                assert all(word in e[1] for e in errors), (word, errors)
        if kind == "length":
            assert all(str(n) in e[1] for e in errors for n in (count, count + 1))
        np.testing.assert_array_equal(out, -7.0)
        assert took < 10
        np.testing.assert_allclose(after, comm.size)
    private.Free()


def assert_named(errors, words, took):
    """Every rank raised in time and named what differs."""
    assert all(e and "AgreementError" in e[0] for e in errors), errors
    for word in words:
        assert word == "1001" or all(word in e[1] for e in errors), (word, errors)
    assert took < 10


@pytest.mark.parametrize("count", [3, 300_000])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_b04_known_plans_that_differ(comm, kind, count):
    """Each of them ran before.  Small native calls are compared only with check="always"."""
    private = comm.Dup()
    with mpiquant.options(check="always"):
        errors, words, _, took, after = differing(comm, kind, count, private, (0, 1))
    with together(comm):
        assert_named(errors, words, took)
        np.testing.assert_allclose(after, comm.size)
    private.Free()


@pytest.mark.parametrize("count", [6, 300_000])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_b04_a_new_plan_against_a_known_one(comm, kind, count, monkeypatch):
    """Also where the others are in a native call that compares nothing."""
    monkeypatch.setattr(progress, "ASK_S", 0.2)  # else a second for each
    private = comm.Dup()
    errors, words, _, took, after = differing(comm, kind, count, private, (0,))
    with together(comm):
        assert_named(errors, words, took)
        np.testing.assert_allclose(after, comm.size)
    private.Free()


@pytest.mark.parametrize("count", [3, 1000, 300_000])
def test_known_native_against_known_compressed(comm, count, monkeypatch):
    """The native ranks compare nothing by themselves; the others ask them where they are."""
    monkeypatch.setattr(progress, "ASK_S", 0.2)
    private = comm.Dup()
    for _ in range(2):
        mpiquant.allreduce(np.ones(count, "f4"), comm=private)
        mpiquant.allreduce(np.ones(count, "f4"), comm=private, codec="q8", algorithm="ring")
    arguments = {"codec": "q8", "algorithm": "ring"} if comm.rank == 0 else {}
    begin = time.monotonic()
    errors = raised(
        comm, lambda: mpiquant.allreduce(np.ones(count, "f4"), comm=private, **arguments)
    )
    took = time.monotonic() - begin
    after = [mpiquant.allreduce(np.ones(count, "f4"), comm=private) for _ in range(3)]
    with together(comm):
        for error in errors:
            for word in ("AgreementError", "'ring'" if count > 3 else "ring", "native"):
                assert word in error[0] or word in error[1], errors
        assert took < 10
        for out in after:
            np.testing.assert_array_equal(out, comm.size)
    private.Free()


@pytest.mark.parametrize("count", COUNTS[:2])
@pytest.mark.parametrize("codec", [None, "q8"])
def test_b05_names_match_not_positions(comm, codec, count, monkeypatch):
    monkeypatch.setattr(progress, "ASK_S", 0.2)
    ones = np.ones(count)
    arrays = {"w": ones * (1 + comm.rank), "b": 10 * ones * (1 + comm.rank)}
    if comm.rank == comm.size - 1:
        arrays = dict(reversed(arrays.items()))
    total = comm.size * (comm.size + 1) / 2
    private = comm.Dup()
    out = mpiquant.allreduce(arrays, comm=private, codec=codec)
    lacking = arrays if comm.rank != 1 else {"w": arrays["w"]}
    missing = raised(comm, lambda: mpiquant.allreduce(lacking, comm=private, codec=codec))
    order = ("w", "b") if comm.rank == 0 else ("b", "w")
    swapped = [
        raised(comm, lambda n=n: mpiquant.allreduce(ones, comm=private, codec=codec, name=n))
        for n in order
    ]
    after = mpiquant.allreduce(arrays, comm=private, codec=codec)
    with together(comm):
        for result in (out, after):
            np.testing.assert_allclose(result["w"], total, atol=0.05 * total * 10)
            np.testing.assert_allclose(result["b"], 10 * total, rtol=0.05)
        assert all(e and "b[" in e[1] and "rank 1" in e[1] for e in missing)
        for errors in swapped:
            assert all(e and "'w'" in e[1] and "'b'" in e[1] for e in errors)
    private.Free()


def test_check_never_compares_nothing_and_works(comm):
    private = comm.Dup()
    with mpiquant.options(check="never"):
        outs = [
            mpiquant.allreduce(np.ones(n), comm=private, codec=codec, stats=True)
            for n in (3, 5000)
            for codec in (None, "q8")
            for _ in range(2)
        ]
    with together(comm):
        for out, stats in outs:
            np.testing.assert_allclose(out, comm.size, rtol=1e-6)
            assert stats.header_bytes == 0
    private.Free()


def test_the_steady_state_sends_one_header(comm):
    private = comm.Dup()
    for _ in range(2):
        _, stats = mpiquant.allreduce(np.ones(5000), comm=private, codec="q8", stats=True)
    with together(comm):
        assert stats.header_bytes == 32
    private.Free()


@pytest.mark.parametrize("codec", [None, "q8"])
def test_b26_a_missing_rank_is_named(comm, codec):
    private = comm.Dup()
    x = np.ones(5000)
    mpiquant.allreduce(x, comm=private, codec=codec, name="w")
    begin = time.monotonic()
    error = None
    if comm.rank != 1:
        try:
            mpiquant.allreduce(x, comm=private, codec=codec, name="w", timeout=1)
        except mpiquant.CallTimeoutError as caught:
            error = str(caught)
    took = time.monotonic() - begin
    comm.Barrier()
    with together(comm):
        if comm.rank != 1:
            assert isinstance(error, str)
            assert "rank 1" in error.split("missing")[0] or "rank 1 does not answer" in error
            assert "number 1" in error and "'w'" in error  # noqa: PT018
            assert took < 1 + 2.5


def test_b26_a_late_rank_hears_of_the_end(comm):
    """Who comes when the others have given up is told so, and does not wait for them."""
    private = comm.Dup()
    x = np.ones(5000)
    mpiquant.allreduce(x, comm=private, codec="q8")
    comm.Barrier()
    if comm.rank == 1:
        time.sleep(3)
    begin = time.monotonic()
    with pytest.raises((mpiquant.CallTimeoutError, mpiquant.LifecycleError)):
        mpiquant.allreduce(x, comm=private, codec="q8", timeout=0.5 if comm.rank != 1 else 20)
    took = time.monotonic() - begin
    with together(comm):
        assert took < 5


def test_a_stall_is_reported(comm, caplog):
    private = comm.Dup()
    x = np.ones(5000)
    mpiquant.allreduce(x, comm=private, codec="q8", name="w")
    comm.Barrier()
    if comm.rank == 1:
        time.sleep(3)
    with mpiquant.options(stall_seconds=1), caplog.at_level(logging.WARNING, "mpiquant"):
        out = mpiquant.allreduce(x, comm=private, codec="q8", name="w")
    reports = [record.getMessage() for record in caplog.records]
    with together(comm):
        np.testing.assert_allclose(out, comm.size, rtol=1e-6)
        if comm.rank == 0:
            assert any("number 1 of 'w'" in r and "rank 1 missing" in r for r in reports), reports
    private.Free()


def test_a_timeout_of_a_first_call_ends(comm):
    """Before the private duplicate there is no way to ask who is missing."""
    private = comm.Dup()
    if comm.rank != 1:
        with pytest.raises(mpiquant.CallTimeoutError, match="first call"):
            mpiquant.allreduce(np.ones(3), comm=private, timeout=0.5)
        with pytest.raises(mpiquant.LifecycleError, match="never ended"):
            mpiquant.allreduce(np.ones(3), comm=private, timeout=0.5)
    comm.Barrier()


def test_b06_back_to_back(comm):
    """A late rank never meets the data of a neighbouring call."""
    rng = np.random.default_rng(comm.rank)
    base = comm.size * (comm.size - 1) / 2
    wrong, requests = [], []
    for k in range(160):
        if comm.rank == comm.size - 1:
            time.sleep(rng.uniform(0, 0.001))
        x = np.full((3, 4096, 17, 65536)[k % 4], float(k + comm.rank))
        algorithm = ("auto", "ring", "halving_doubling", "direct")[k // 4 % 4]
        arguments = {"comm": comm, "codec": "q8" if k % 3 else None, "algorithm": algorithm}
        if k % 2:
            requests.append((k, mpiquant.iallreduce(x, **arguments)))
        else:
            out = mpiquant.allreduce(x, **arguments)
            if not np.allclose(out, comm.size * k + base, rtol=1e-5):
                wrong.append(k)
    for k, request in requests:
        if not np.allclose(request.wait(), comm.size * k + base, rtol=1e-5):
            wrong.append(k)
    same = digests(comm, np.array(wrong))
    with together(comm):
        assert not wrong
        assert len(same) == 1


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "direct"])
def test_a_fault_right_after_an_agreement_leaves_all_with_the_same_plans(comm, algorithm):
    """Others may hear of it before the agreement has ended for them."""
    private = comm.Dup()

    class Fragile(mpiquant.Float16Codec):
        broken = comm.rank == comm.size - 1

        def encode(self, x, wire, **more):
            if self.broken:
                raise OSError("broken")
            return super().encode(x, wire, **more)

    counts = range(1000, 1030)
    errors = []
    for count in counts:
        x = np.ones(count, np.float32)
        errors += raised(
            comm,
            lambda x=x: mpiquant.allreduce(x, comm=private, codec=Fragile(), algorithm=algorithm),
        )
        with pytest.raises(Exception, match=r"."):
            mpiquant.allreduce(x, MPI.BAND, comm=private)  # MPI refuses it on each rank
    Fragile.broken = False
    outs = [
        mpiquant.allreduce(
            np.ones(n, np.float32), comm=private, codec=Fragile(), algorithm=algorithm
        )
        for n in counts
        for _ in range(2)
    ]
    with together(comm):
        assert all(e and "broken" in e[1] for e in errors)
        for out in outs:
            np.testing.assert_allclose(out, comm.size, rtol=1e-3)
    private.Free()
