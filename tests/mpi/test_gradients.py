"""The synchronizer, optimizers and replicas on real MPI."""

import re
import time

import numpy as np
import pytest
from conftest import digests, normals, raised, together
from mpi4py import MPI

import mpiquant
from mpiquant import SGD, Adam, AqatCodec, DistributedOptimizer, GradientSynchronizer

SHAPES = {"a": (70, 300), "b": (300,), "c": (300, 400), "d": (400, 3), "e": (3,)}
CODECS = ("exact", "q8", "q4", "aqat", AqatCodec(lowest=1, highest=4))


def zeros(shapes=None, dtype=np.float32):
    return {name: np.zeros(shape, dtype) for name, shape in (shapes or SHAPES).items()}


def gradients(comm, step, shapes=None, dtype=np.float32):
    """Own gradients of a step, and the sums over all ranks."""
    mine, sums = {}, {}
    for i, (name, shape) in enumerate((shapes or SHAPES).items()):
        x, total = normals(comm, int(np.prod(shape)), dtype, seed=100 * step + i)
        mine[name], sums[name] = x.reshape(shape), total.reshape(shape)
    return mine, sums


def run_step(sync, mine, names=None):
    """A backward pass, then the next forward pass; copies of the results."""
    for name in reversed(list(names or mine)):
        sync.ready(name, mine[name])
    return {name: sync.wait(name).copy() for name in (names or mine)}


@pytest.mark.parametrize("progress", ["thread", "manual"])
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bucket_bytes", [None, 1, 100_000])
def test_sums_and_residuals(comm, codec, bucket_bytes, progress):
    sync = GradientSynchronizer(
        zeros(), "sum", codec=codec, bucket_bytes=bucket_bytes, progress=progress
    )
    totals, exact = zeros(dtype=np.float64), zeros(dtype=np.float64)
    for step in range(4):
        mine, sums = gradients(comm, step)
        out = run_step(sync, mine)
        same = digests(comm, *out.values())
        with together(comm):
            assert len(same) == 1
        for name in mine:
            totals[name] += out[name]
            exact[name] += sums[name]
    kept = {name: comm.allreduce(sync.residuals().get(name, 0.0)) for name in SHAPES}
    with together(comm):
        for name in SHAPES:
            np.testing.assert_allclose(totals[name] + kept[name], exact[name], rtol=0, atol=2e-4)


def test_the_first_forward_pass_has_nothing_to_wait_for(comm):
    sync = GradientSynchronizer(zeros(), codec="exact")
    with together(comm):
        assert sync.wait("a") is None
        with pytest.raises(ValueError, match="'z'"):
            sync.wait("z")
    mine, _ = gradients(comm, 0)
    first = run_step(sync, mine)
    with together(comm):
        np.testing.assert_array_equal(sync.wait("c"), first["c"])  # again, at once
        assert sync.step == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_dtypes_and_means(comm, dtype):
    sync = GradientSynchronizer(zeros(dtype=dtype), codec="exact")
    mine, sums = gradients(comm, 0, dtype=dtype)
    out = run_step(sync, mine)
    with together(comm):
        for name, total in sums.items():
            assert out[name].dtype == dtype
            tolerance = 1e-2 if dtype == np.float16 else 1e-12
            np.testing.assert_allclose(out[name], total / comm.size, rtol=0, atol=tolerance)


def test_gradients_written_in_place_need_no_copy(comm):
    sync = GradientSynchronizer(zeros(), "sum", codec="exact")
    for name in reversed(list(SHAPES)):
        sync.gradients[name][...] = comm.rank + 1
        sync.ready(name)
    ranks = comm.size * (comm.size + 1) / 2
    with together(comm):
        np.testing.assert_array_equal(sync.wait("c"), ranks)
    for out in sync.wait_all().values():
        with together(comm):
            np.testing.assert_array_equal(out, ranks)


def test_gradients_are_locked_while_under_way(comm):
    sync = GradientSynchronizer(zeros(), codec="exact")
    mine, _ = gradients(comm, 0)
    for name in reversed(list(SHAPES)):
        sync.ready(name, mine[name])
    with together(comm):
        assert not any(view.flags.writeable for view in sync.gradients.values())
    sync.wait_all()
    with together(comm):
        assert all(view.flags.writeable for view in sync.gradients.values())


def test_b05_order_does_not_matter(comm):
    names = ["w", "b"] if comm.rank == 0 else ["b", "w"]
    sync = GradientSynchronizer({n: np.zeros(10, np.float32) for n in names}, "sum", codec="exact")
    # The orders of gradients differ too, and buckets of one parameter each.
    for bucket_bytes in (None, 1):
        sync.rebucket(bucket_bytes)
        values = {"w": comm.rank + 1.0, "b": 10.0 * (comm.rank + 1)}
        for name in names:
            sync.ready(name, np.full(10, values[name], np.float32))
        w, b = sync.wait("w"), sync.wait("b")
        ranks = comm.size * (comm.size + 1) / 2
        with together(comm):
            np.testing.assert_array_equal(w, ranks)
            np.testing.assert_array_equal(b, 10 * ranks)


@pytest.mark.parametrize("bucket_bytes", [None, 1])
@pytest.mark.parametrize("codec", ["exact", "q4", "aqat"])
def test_b05_a_missing_gradient_is_named_on_all_ranks(comm, codec, bucket_bytes):
    last = comm.size - 1
    sync = GradientSynchronizer(zeros(), "sum", codec=codec, bucket_bytes=bucket_bytes)
    for step in range(3):
        mine, sums = gradients(comm, step)
        names = [n for n in SHAPES if step != 1 or comm.rank != last or n != "b"]
        for name in reversed(names):
            sync.ready(name, mine[name])
        errors = raised(comm, sync.wait_all)
        with together(comm):
            if step == 1:
                for _, text in errors:
                    assert "no gradient of 'b' in step 1" in text
                for rank, (_, text) in enumerate(errors):
                    assert rank == last or f"rank {last}" in text
            else:
                assert errors == [None] * comm.size
                if codec == "exact":
                    np.testing.assert_allclose(sync.gradients["b"], sums["b"], atol=1e-4)


def test_missing_gradients_may_count_as_zeros(comm):
    sync = GradientSynchronizer(zeros(), "sum", codec="exact", missing="zeros")
    for name in SHAPES:
        if comm.rank != 0 or name != "b":
            sync.ready(name, np.full(SHAPES[name], 10.0, np.float32))
    out = sync.wait_all()
    with together(comm):
        np.testing.assert_array_equal(out["b"], 10.0 * (comm.size - 1))
        np.testing.assert_array_equal(out["a"], 10.0 * comm.size)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda s: s.ready("c", np.zeros((2, 2), np.float32)), r"'c' has shape \(2, 2\)"),
        (lambda s: s.ready("z", np.zeros(3)), "no parameter has the name 'z'"),
        (lambda s: s.ready("e", np.zeros(3, np.float32)), "'e' is ready a second time in step 0"),
    ],
)
def test_a_bad_gradient_fails_the_step_on_all_ranks(comm, fault, words):
    sync = GradientSynchronizer(zeros(), "sum", codec="q8", bucket_bytes=1)
    mine, _ = gradients(comm, 0)
    for name in ("e", "d"):
        sync.ready(name, mine[name])

    def rest():
        if comm.rank == 0:
            fault(sync)
        for name in ("c", "b", "a"):
            sync.ready(name, mine[name])
        sync.wait_all()

    errors = raised(comm, rest)
    out = run_step(sync, mine)
    same = digests(comm, *out.values())
    with together(comm):
        assert all(error is not None for error in errors)
        assert re.search(words, errors[0][1])
        assert len(same) == 1
        assert sync.step == 2


def test_a_new_step_before_the_end_of_the_last(comm):
    sync = GradientSynchronizer(zeros(), "sum", codec="exact", bucket_bytes=1)
    mine, _ = gradients(comm, 0)
    for name in reversed(list(SHAPES)):
        sync.ready(name, mine[name])
    sync.wait("a")
    errors = raised(comm, lambda: sync.ready("a", mine["a"]))
    with together(comm):
        assert all("was not waited for in step 0" in text for _, text in errors)
    out = run_step(sync, mine)
    same = digests(comm, *out.values())
    with together(comm):
        assert len(same) == 1


def test_accumulation(comm):
    sync = GradientSynchronizer(zeros(), "sum", codec="exact")
    for _ in range(2):
        expected = zeros(dtype=np.float64)
        with sync.no_sync():
            for micro in range(3):
                mine, sums = gradients(comm, micro)
                for name in SHAPES:
                    sync.ready(name, mine[name])
                    expected[name] += sums[name]
        mine, sums = gradients(comm, 3)
        out = run_step(sync, mine)
        with together(comm):
            for name in SHAPES:
                np.testing.assert_allclose(out[name], expected[name] + sums[name], atol=1e-4)


def test_b29_weighted_means(comm):
    params = {"w": np.zeros(4, np.float32)}
    sync = GradientSynchronizer(params, codec="exact", weighted=True)
    values = [1.0, 1.0, 4.0, 0.0, 2.0, 7.0, 1.0, 3.0][: comm.size]
    for samples in ([4, 4, 2, 1, 5, 3, 2, 2], [4, 4, 0, 1, 0, 0, 2, 0]):
        weights = samples[: comm.size]
        sync.set_weight(weights[comm.rank])
        sync.ready("w", np.full(4, values[comm.rank], np.float32))
        mean = sync.wait("w")
        with together(comm):
            np.testing.assert_allclose(mean, np.average(values, weights=weights), rtol=1e-6)
    sync.set_weight(0)

    def step_without_samples():
        sync.ready("w", np.ones(4, np.float32))
        sync.wait("w")

    errors = raised(comm, step_without_samples)
    with together(comm):
        assert all("weights of all ranks are 0" in text for _, text in errors)
    out = run_step(sync, {"w": np.full(4, values[comm.rank], np.float32)})
    with together(comm):
        np.testing.assert_allclose(out["w"], np.mean(values), rtol=1e-6)


@pytest.mark.parametrize("codec", ["exact", "aqat"])
def test_b29_a_finished_rank_takes_part(comm, codec):
    sync = GradientSynchronizer(zeros(), codec=codec, weighted=True)
    for step in range(2 + comm.rank):
        mine = {name: np.full(shape, 1.0 + step, np.float32) for name, shape in SHAPES.items()}
        out = run_step(sync, mine)
        if codec == "exact":
            np.testing.assert_array_equal(out["c"], 1.0 + step)
    sync.join()
    out = run_step(sync, mine := {n: np.ones(s, np.float32) for n, s in SHAPES.items()})
    same = digests(comm, *out.values())
    with together(comm):
        assert len(same) == 1
        assert mine["c"].shape == out["c"].shape


def test_b16_residuals_follow_their_names(comm):
    shapes = {"a": (8,), "b": (8,)}
    syncs = [
        GradientSynchronizer(zeros(shapes, np.float64), "sum", codec="q2", algorithm="ring")
        for _ in range(2)
    ]
    totals = [zeros(shapes, np.float64) for _ in syncs]
    exact = [zeros(shapes, np.float64) for _ in syncs]
    for step in range(50):
        names = ["a", "b"] if step < 20 else ["b", "a"]
        if step == 30:
            syncs[0].rebucket(1)
        for i, sync in enumerate(syncs):
            mine, sums = gradients(comm, 2 * step + i, shapes, np.float64)
            out = run_step(sync, mine, names)
            for name in names:
                totals[i][name] += out[name]
                exact[i][name] += sums[name]
    kept = [comm.allreduce(np.stack([s.residuals()[n] for n in "ab"])) for s in syncs]
    errors = raised(comm, lambda: syncs[0].ready("a", np.zeros(9)))
    with together(comm):
        for total, right, rest in zip(totals, exact, kept, strict=True):
            for i, name in enumerate("ab"):
                np.testing.assert_allclose(total[name] + rest[i], right[name], rtol=0, atol=1e-9)
        # With a value per rank and block, two bits lose nothing.
        assert comm.size in (1, 8) or np.any(kept[0])
        assert all("'a'" in text for _, text in errors)
        assert len(syncs[0].residuals()) == 2


def test_state_goes_on_where_it_was(comm):
    mine = [gradients(comm, step)[0] for step in range(4)]
    whole = GradientSynchronizer(zeros(), "sum", codec="q4")
    expected = [run_step(whole, m) for m in mine]
    first = GradientSynchronizer(zeros(), "sum", codec="q4")
    for m in mine[:2]:
        run_step(first, m)
    second = GradientSynchronizer(zeros(), "sum", codec="q4", bucket_bytes=None)
    second.load_state_dict(first.state_dict())
    for m, right in zip(mine[2:], expected[2:], strict=True):
        out = run_step(second, m)
        with together(comm):
            for name in SHAPES:
                np.testing.assert_array_equal(out[name], right[name])
    state = first.state_dict()
    state["residuals"]["a"] = np.zeros(3)
    with together(comm), pytest.raises(ValueError, match="residual of 'a' has shape"):
        second.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "max"}, "expected 'mean' or 'sum'"),
        ({"missing": "none"}, "expected 'error' or 'zeros'"),
        ({"bucket_bytes": 0}, "expected 1 or more"),
        ({"codec": "q77"}, "q77"),
    ],
)
def test_bad_options_raise_on_all_ranks(comm, options, words):
    mine = options if comm.rank == comm.size - 1 else {}
    errors = raised(comm, lambda: GradientSynchronizer(zeros(), **mine))
    with together(comm):
        assert all(words in text for _, text in errors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.pop("b"), "has no parameter 'b'"),
        (lambda p: p.update(b=np.zeros(7, np.float32)), "'b' is"),
    ],
)
def test_different_parameters_are_named(comm, change, words):
    params = zeros()
    if comm.rank == 0 and comm.size > 1:
        change(params)
    errors = raised(comm, lambda: GradientSynchronizer(params))
    with together(comm):
        if comm.size > 1:
            assert all(words in text for _, text in errors)


def test_overlappable_time_is_measured(comm):
    shapes = {"a": (1000,), "b": (400_000,)}
    sync = GradientSynchronizer(zeros(shapes), codec="aqat", bucket_bytes=1 << 21)
    mine, _ = gradients(comm, 0, shapes)
    predicted = []
    for pause_s in (0.1,) * 5 + (0.0,) * 5:
        sync.ready("b", mine["b"])
        sync.ready("a", mine["a"])
        time.sleep(pause_s)
        sync.wait_all()
        predicted.append(sync.buckets[0].overlap.predicted_s)
    report = sync.report()
    with together(comm):
        assert min(predicted[:5]) >= 0.1
        assert predicted[-1] < predicted[4]
        assert report.steps == 10
        assert [row.name for row in report.buckets] == ["b", "a"]
        assert ("slowest link" in str(report)) == (comm.size > 1)
        assert report.wire_wait_s >= 0
        assert report.peer_wait_s >= 0


@pytest.mark.parametrize(("overlap_s", "bits"), [(6000.0, 32), (1e-12, 2)])
def test_the_bits_follow_the_time_to_hide_in(comm, overlap_s, bits):
    sync = GradientSynchronizer(zeros(), codec="aqat", algorithm="ring")
    mine, _ = gradients(comm, 0)
    run_step(sync, mine)  # from here on something is known of the links
    state = sync.state_dict()
    state["overlap"] = {name: [overlap_s] * 5 for name in state["overlap"]}
    state["until_need"] = dict(state["overlap"])
    sync.load_state_dict(state)
    run_step(sync, mine)
    stats = sync.buckets[0].turns[-1].stats
    with together(comm):
        assert comm.size == 1 or stats.partial_bits == stats.final_bits == bits


def test_waits_for_a_late_peer_are_told_apart(comm):
    shapes = {"a": (100_000,)}
    sync = GradientSynchronizer(zeros(shapes), codec="q8")
    mine, _ = gradients(comm, 0, shapes)
    for _ in range(5):
        comm.Barrier()
        if comm.rank == comm.size - 1:
            time.sleep(0.1)
        sync.ready("a", mine["a"])
        sync.wait("a")
    report = sync.report()
    with together(comm):
        if comm.size > 1:
            expected = 0.1 * (comm.size - 1) / comm.size
            assert report.peer_wait_s > 0.8 * expected
            assert report.peer_wait_s > report.wire_wait_s


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.005, momentum=0.9), lambda p: Adam(p, 0.03)])
@pytest.mark.parametrize("codec", ["exact", "q4", "aqat"])
def test_replicas_stay_alike(comm, codec, make):
    """Least squares: each rank has data of its own."""
    rng = np.random.default_rng(comm.rank)
    params = {
        "w": np.full((30, 5), float(comm.rank), np.float32),
        "v": np.zeros((5, 1), np.float32) + comm.rank,
    }
    mpiquant.broadcast_parameters(params)
    target = np.random.default_rng(99).standard_normal((30, 1)).astype(np.float32)
    params["w"] += np.random.default_rng(5).standard_normal((30, 5)).astype(np.float32) / 3
    params["v"] += 0.5
    optimizer = DistributedOptimizer(make(params), codec=codec)
    losses = []
    for _ in range(150):
        x = rng.standard_normal((32, 30)).astype(np.float32)
        optimizer.wait("w")
        hidden = x @ params["w"]
        optimizer.wait("v")
        error = hidden @ params["v"] - x @ target
        losses.append(float(np.mean(error**2)))
        optimizer.ready("v", hidden.T @ error / 32)
        optimizer.ready("w", x.T @ (error @ params["v"].T) / 32)
    optimizer.step()
    different = mpiquant.differing_parameters(params)
    first, last = comm.allreduce(losses[0]), comm.allreduce(np.mean(losses[-10:]))
    with together(comm):
        assert different == []
        assert last < 0.2 * first


def test_broadcast_parameters(comm):
    root = comm.size - 1
    params = {
        "x": np.full((3, 4), comm.rank, np.float32),
        "t": np.full((4, 3), comm.rank, np.int64).T,
        "s": np.array(comm.rank == root),
        "e": np.zeros((0, 3)),
    }
    mpiquant.broadcast_parameters(params, root)
    with together(comm):
        assert np.all(params["x"] == root)
        assert np.all(params["t"] == root)
        assert params["s"]
    params["x"][0, 0] += comm.rank
    different = mpiquant.differing_parameters(params)
    if comm.rank == 0:
        params["x"].flags.writeable = False
    errors = raised(comm, lambda: mpiquant.broadcast_parameters(params))
    with together(comm):
        assert different == (["x"] if comm.size > 1 else [])
        assert all("'x' is read-only" in text for _, text in errors)


def test_two_communicators(comm):
    part = comm.Split(comm.rank % 2)
    sync = GradientSynchronizer({"a": np.zeros(5000)}, "sum", comm=part, codec="exact")
    out = run_step(sync, {"a": np.ones(5000)})
    with together(comm):
        np.testing.assert_array_equal(out["a"], part.size)
    part.Free()
    assert MPI.COMM_WORLD.size == comm.size


@pytest.mark.parametrize("codec", ["q4", "aqat"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_b15_an_overflow_leaves_no_trace(comm, bad, codec):
    """What does not fit the residual of one step would spoil all later ones."""
    names = {"w": (1000,), "v": (500,)}
    seen = []
    for overflows in (True, False):
        sync = GradientSynchronizer(zeros(names), "sum", codec=codec, algorithm="ring")
        run_step(sync, gradients(comm, 0, names)[0])
        before = {name: r.copy() for name, r in sync.residuals().items()}
        if overflows:
            mine, _ = gradients(comm, 1, names)
            if comm.rank == 0:
                mine["w"][0] = bad
            out = run_step(sync, mine)
            with together(comm):
                assert not np.isfinite(out["w"][0])
                for name, residual in sync.residuals().items():
                    np.testing.assert_array_equal(residual, before[name])
        out = run_step(sync, gradients(comm, 2, names)[0])
        with together(comm):
            assert all(np.all(np.isfinite(value)) for value in out.values())
        seen.append(out)
    with together(comm):
        if codec == "q4":  # aqat goes by the clock
            for name, value in seen[0].items():
                np.testing.assert_array_equal(value, seen[1][name])


def test_means_of_parameters(comm):
    """Exact: of integers, and bit for bit alike of others."""
    params = {
        "w": np.arange(7, dtype=np.float32) + comm.rank * comm.size * 2,
        "v": normals(comm, 1000)[0].reshape(10, 100)[:, ::2],
    }
    right = np.arange(7) + comm.size * (comm.size - 1)
    mpiquant.average_parameters(params)
    different = mpiquant.differing_parameters(params)
    with together(comm):
        np.testing.assert_array_equal(params["w"], right)
        assert different == []


def test_drift_is_told(comm):
    params = {"w": np.full((300, 400), 2.0), "none": np.zeros(3), "alike": np.ones(1)}
    params["w"] += 0.01 * comm.rank
    mean = 2 + 0.01 * (comm.size - 1) / 2
    drifts = mpiquant.parameter_drift(params)
    with together(comm):
        assert drifts["w"] == pytest.approx((mean - 2) / mean, abs=1e-12)
        assert drifts["none"] == drifts["alike"] == 0
    with together(comm):
        assert len(set(comm.allgather(tuple(drifts.values())))) == 1


@pytest.mark.parametrize("every", [None, 3])
def test_replicas_come_together_again(comm, every):
    params = {"w": np.zeros(1000, np.float32), "v": np.zeros((30, 40), np.float32)}
    optimizer = DistributedOptimizer(
        SGD(params, 0.1), algorithm="cerar", codec=None, resync_every=every
    )
    rng, drifts = np.random.default_rng(comm.rank), []
    for _ in range(7):
        for name in params:
            optimizer.wait(name)
        drifts.append(max(mpiquant.parameter_drift(params, comm=comm).values()))
        for name in reversed(params):
            optimizer.ready(name, rng.standard_normal(params[name].shape).astype(np.float32))
    optimizer.step()
    apart = [drift > 0 for drift in drifts]
    with together(comm):
        if comm.size < 3:
            assert not any(apart)  # two ranks exchange their values: nothing is approximate
        elif every is None:
            assert apart == [False] + 6 * [True]
        else:
            assert apart == [False, True, True, False, True, True, False]
        assert all(drift < 0.01 for drift in drifts)


def test_a_bad_interval_is_refused():
    with pytest.raises(ValueError, match="resync_every"):
        DistributedOptimizer(SGD({"w": np.zeros(3)}, 0.1), resync_every=0)
