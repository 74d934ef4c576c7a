"""The digits network of docs/examples, trained on the ranks of a claim."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _on_ranks import comm

import mpiquant

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
import digits
from networks import NETWORKS
from train_mnist import RECIPES, Recipe, batches

LAST = 50
"""Steps that the final loss is the mean of."""


@cache
def _data() -> Any:
    return digits.load("mnist")


def _nobody(step: int, params: Any) -> None:
    """Watches nothing."""


class _Gradients:
    """Means of all gradients."""

    def __init__(self, sgd: mpiquant.SGD, **options: Any) -> None:
        self.optimizer = mpiquant.DistributedOptimizer(sgd, progress="manual", **options)

    def apply(self) -> None:
        self.optimizer.step()

    def hand_in(self, gradients: dict[str, Any]) -> None:
        for name in reversed(gradients):
            self.optimizer.ready(name, gradients[name])

    finish = apply


class _Parameters:
    """Means of parameters after some steps of each rank's own."""

    def __init__(self, sgd: mpiquant.SGD, **options: Any) -> None:
        self.local = mpiquant.LocalSGD(sgd, **options)

    def apply(self) -> None:
        """All was applied when it was handed in."""

    def hand_in(self, gradients: dict[str, Any]) -> None:
        self.local.step(gradients)

    def finish(self) -> None:
        self.local.average()


def train_digits(
    seed: int,
    steps: int,
    options: dict[str, Any],
    watch: Callable[[int, Any], None] = _nobody,
    network: str = "mlp",
) -> dict[str, Any]:
    """Final loss and accuracy for one seed, which says parameters and batches.

    `watch` is called with the number of steps done and the parameters, behind each of them.
    """
    data, recipe = _data(), Recipe(steps, RECIPES[network].rate)
    net = NETWORKS[network](data.side)
    params = net.init(np.random.default_rng([seed, 0]))
    sgd = mpiquant.SGD(params, recipe.rate, momentum=recipe.momentum)
    if "every" in options:
        exchange: _Gradients | _Parameters = _Parameters(sgd, **options)
    else:
        exchange = _Gradients(sgd, **options)
    losses = []
    for step, batch in enumerate(batches(len(data.x_train), recipe, seed)):
        exchange.apply()
        watch(step, params)
        sgd.rate = recipe.rate * (1 - step / steps)
        mine = batch[comm.rank :: comm.size]
        shard = len(batch) / comm.size
        loss, grads = net.loss_and_grads(params, data.x_train[mine], data.y_train[mine], shard)
        losses.append(loss)
        exchange.hand_in(grads)
    exchange.finish()
    watch(steps, params)
    hits = float(np.mean(net.predict(params, data.x_test) == data.y_test))
    return {
        "loss": comm.allreduce(float(np.mean(losses[-LAST:]))) / comm.size,
        "accuracy": 100 * comm.allreduce(hits) / comm.size,
    }
