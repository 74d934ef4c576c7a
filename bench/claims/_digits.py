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
    optimizer = mpiquant.DistributedOptimizer(sgd, progress="manual", **options)
    losses = []
    for step, batch in enumerate(batches(len(data.x_train), recipe, seed)):
        optimizer.step()
        watch(step, params)
        sgd.rate = recipe.rate * (1 - step / steps)
        mine = batch[comm.rank :: comm.size]
        shard = len(batch) / comm.size
        loss, grads = net.loss_and_grads(params, data.x_train[mine], data.y_train[mine], shard)
        losses.append(loss)
        for name in reversed(params):
            optimizer.ready(name, grads[name])
    optimizer.step()
    watch(steps, params)
    hits = float(np.mean(net.predict(params, data.x_test) == data.y_test))
    return {
        "loss": comm.allreduce(float(np.mean(losses[-LAST:]))) / comm.size,
        "accuracy": 100 * comm.allreduce(hits) / comm.size,
    }
