"""The hand-written gradients against finite differences; runs without MPI: pytest docs/examples"""

from __future__ import annotations

import numpy as np
import pytest
from networks import MLP, NETWORKS, Array, ConvNet, Params, col2im, im2col

CASES = [
    pytest.param(MLP(side=4, hidden=7, classes=3), 4, id="mlp"),
    pytest.param(ConvNet(side=8, channels=(3, 4), classes=3), 8, id="conv-even"),
    pytest.param(ConvNet(side=7, channels=(2, 3), classes=3), 7, id="conv-odd"),
]


def problem(net: MLP | ConvNet, side: int) -> tuple[Params, Array, Array]:
    """Float64 parameters, all of them non-zero, with five random images and labels."""
    rng = np.random.default_rng(1)
    params = {k: rng.normal(0, 0.5, v.shape) for k, v in net.init(rng).items()}
    return params, rng.random((5, side * side)), rng.integers(0, 3, 5)


@pytest.mark.parametrize(("net", "side"), CASES)
def test_gradients_match_central_differences(net: MLP | ConvNet, side: int) -> None:
    params, x, y = problem(net, side)
    eps = 1e-6
    _, grads = net.loss_and_grads(params, x, y)
    assert list(grads) == list(params)
    for name, value in params.items():
        numeric = np.zeros_like(value)
        for i in np.ndindex(value.shape):
            saved = value[i]
            losses = []
            for value[i] in (saved + eps, saved - eps):
                losses.append(net.loss_and_grads(params, x, y)[0])
            value[i] = saved
            numeric[i] = (losses[0] - losses[1]) / (2 * eps)
        np.testing.assert_allclose(grads[name], numeric, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize(("net", "side"), CASES)
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_mean_over_uneven_shards_is_the_whole_batch(
    net: MLP | ConvNet, side: int, ranks: int
) -> None:
    params, x, y = problem(net, side)  # 5 images: with 7 ranks, two shards are empty
    loss, grads = net.loss_and_grads(params, x, y)
    parts = [
        net.loss_and_grads(params, x[r::ranks], y[r::ranks], samples=len(x) / ranks)
        for r in range(ranks)
    ]
    assert np.mean([part[0] for part in parts]) == pytest.approx(loss)
    for name, whole in grads.items():
        np.testing.assert_allclose(np.mean([g[name] for _, g in parts], axis=0), whole, atol=1e-12)


@pytest.mark.parametrize("side", [7, 8])
def test_col2im_is_the_transpose_of_im2col(side: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, side, side, 3))
    cols = im2col(x)
    y = rng.normal(size=cols.shape)
    assert np.vdot(cols, y) == pytest.approx(np.vdot(x, col2im(y, x.shape)))


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_stays_float32(name: str) -> None:
    net = NETWORKS[name](side=8)
    params = net.init(np.random.default_rng(0))
    x = np.random.default_rng(1).random((4, 64), dtype=np.float32)
    _, grads = net.loss_and_grads(params, x, np.arange(4), samples=4.5)
    for key, grad in grads.items():
        assert grad.dtype == np.float32
        assert grad.shape == params[key].shape
        assert grad.flags.c_contiguous
    assert net.predict(params, x).shape == (4,)
