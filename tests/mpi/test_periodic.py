"""Local steps and delayed averages on ranks."""

import threading

import numpy as np
import pytest
from conftest import together

import mpiquant
from mpiquant import SGD, Adam, DelayedAverage, LocalSGD


def make_params():
    return {"w": np.linspace(-1, 1, 60).reshape(6, 10), "b": np.zeros(10)}


def gradients(params, rank, step):
    """Of a quadratic whose minimum differs between ranks and steps."""
    rng = np.random.default_rng([rank, step])
    return {name: p - rng.standard_normal(p.shape) for name, p in params.items()}


def alike(comm, arrays):
    return not mpiquant.differing_parameters(arrays, comm=comm)


OPTIMIZERS = {
    "plain": lambda params: SGD(params, rate=0.1),
    "momentum": lambda params: SGD(params, rate=0.1, momentum=0.9),
    "nesterov": lambda params: SGD(params, rate=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_mean_after_each_step_is_synchronous_training(comm, make):
    ours, theirs = make_params(), make_params()
    local, right = LocalSGD(make(ours), every=1, comm=comm), make(theirs)
    for step in range(5):
        assert local.step(gradients(ours, comm.rank, step))
        everybody = [gradients(theirs, rank, step) for rank in range(comm.size)]
        for name in theirs:
            right.update(name, np.mean([g[name] for g in everybody], axis=0))
    with together(comm):
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("codec", ["exact", "q4", "top_k(ratio=0.1)"])
@pytest.mark.parametrize("state", ["average", "keep"])
def test_replicas_are_alike_behind_each_mean(comm, codec, state):
    params = make_params()
    optimizer = SGD(params, rate=0.1, momentum=0.9)
    local = LocalSGD(optimizer, every=3, comm=comm, codec=codec, state=state)
    for step in range(9):
        averaged = local.step(gradients(params, comm.rank, step))
        with together(comm):
            assert averaged == (step % 3 == 2)
        assert not averaged or alike(comm, params)
    velocities = optimizer.state_dict()["velocity"]
    if state == "average" or comm.size == 1:
        assert alike(comm, velocities)
    else:
        assert not alike(comm, velocities)


def test_what_a_codec_loses_comes_with_the_next_mean(comm):
    """Anchors and residuals together hold all that the ranks have trained."""
    params = {"w": np.zeros(500)}
    local = LocalSGD(SGD(params, rate=1.0), every=2, comm=comm, codec="top_k(ratio=0.02)")
    trained = np.zeros(500)
    for step in range(8):
        gradient = np.random.default_rng([comm.rank, step]).integers(-9, 9, 500).astype(float)
        trained -= gradient
        local.step({"w": gradient})
    kept = local.state_dict()["residuals"].get("w", np.zeros(500))
    total, right = comm.allreduce(kept), comm.allreduce(trained)
    with together(comm):
        np.testing.assert_allclose(params["w"] * comm.size + total, right, atol=1e-9)


def test_adam_is_averaged_too(comm):
    params = make_params()
    optimizer = Adam(params, rate=0.1)
    local = LocalSGD(optimizer, every=2, comm=comm)
    for step in range(4):
        local.step(gradients(params, comm.rank, step))
    assert alike(comm, params)
    assert alike(comm, optimizer.state_dict()["square"])


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("codec", ["exact", "q8"])
def test_delayed_means_are_the_same_means(comm, staleness, codec):
    ours, theirs = make_params(), make_params()
    delayed = DelayedAverage(OPTIMIZERS["momentum"](ours), staleness, comm=comm, codec=codec)
    right = OPTIMIZERS["momentum"](theirs)
    stale, means = [], []
    for step in range(8):
        mine = gradients(ours, comm.rank, step)
        means.append({n: comm.allreduce(g) / comm.size for n, g in mine.items()})
        stale.append(delayed.step(mine))
        mine["w"][...] = np.nan  # it was copied
    delayed.finish()
    for mean in means:
        for name in theirs:
            right.update(name, mean[name])
    with together(comm):
        assert stale == [step >= staleness for step in range(8)]
        for name in ours:
            close = {"rtol": 1e-12, "atol": 1e-12} if codec == "exact" else {"atol": 0.1}
            np.testing.assert_allclose(ours[name], theirs[name], **close)
    assert alike(comm, ours)


def test_delayed_means_come_while_the_trainer_computes(comm):
    params = make_params()
    delayed = DelayedAverage(SGD(params, rate=1.0), comm=comm, codec="q8")
    delayed.step(gradients(params, comm.rank, 0))
    came = threading.Event()
    delayed._under_way[0].when_done(came.set)
    with together(comm):
        assert came.wait(30)  # nothing is called meanwhile
    delayed.finish()


def test_nothing_is_lost_with_several_steps_under_way(comm):
    params = {"w": np.zeros(400)}
    delayed = DelayedAverage(SGD(params, rate=1.0), 2, comm=comm, codec="top_k(ratio=0.02)")
    right = np.zeros(400)
    for step in range(9):
        gradient = np.random.default_rng([comm.rank, step]).integers(-9, 9, 400).astype(float)
        right -= gradient
        delayed.step({"w": gradient})
    delayed.finish()
    kept = sum(state.get("w", np.zeros(400)) for state in delayed.state_dict()["residuals"])
    total, right = comm.allreduce(kept), comm.allreduce(right)
    with together(comm):
        np.testing.assert_allclose(comm.size * params["w"] - total, right, atol=1e-9)


@pytest.mark.parametrize("make", [LocalSGD, DelayedAverage])
def test_a_state_goes_on_bit_for_bit(comm, make):
    def trained(steps, start=None):
        params = make_params()
        way = make(SGD(params, rate=0.1, momentum=0.9), 2, comm=comm, codec="q4")
        begin = 0
        if start is not None:
            begin, saved, state = start
            for name in params:
                params[name][...] = saved[name]
            way.load_state_dict(state)
        for step in range(begin, steps):
            way.step(gradients(params, comm.rank, step))
            if make is DelayedAverage and step == 3:
                way.finish()
        if make is DelayedAverage:
            way.finish()
        return steps, params, way.state_dict()

    whole = trained(9)
    rest = trained(9, start=trained(4))
    with together(comm):
        for name in whole[1]:
            np.testing.assert_array_equal(whole[1][name], rest[1][name])


def test_bad_arguments():
    optimizer = SGD(make_params(), rate=0.1)
    with pytest.raises(ValueError, match="every is 0"):
        LocalSGD(optimizer, 0)
    with pytest.raises(ValueError, match="state is 'mean'"):
        LocalSGD(optimizer, 2, state="mean")
    with pytest.raises(ValueError, match="staleness is -1"):
        DelayedAverage(optimizer, -1)
