"""Two small networks in plain NumPy, with their gradients written out by hand.

Parameters and gradients are dictionaries of arrays with the same keys, which is just what
`mpiquant.allreduce` takes. The dtype of the parameters is kept throughout: float32 for
training, float64 for the gradient check in test_networks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Array = NDArray[Any]
Params = dict[str, Array]
Activations = tuple[Array, Array, Array, Array, Array]


def he_normal(rng: np.random.Generator, inputs: int, outputs: int) -> Array:
    """Random float32 weights that keep the variance of activations through a ReLU layer."""
    weights: Array = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
    return weights.astype(np.float32)


def cross_entropy(logits: Array, y: Array, samples: float) -> tuple[float, Array]:
    """Softmax cross-entropy summed over the rows and divided by `samples`, and its gradient."""
    shifted = logits - logits.max(axis=1, keepdims=True)  # exp cannot overflow
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(y))
    d_logits = np.exp(log_p)
    d_logits[rows, y] -= 1
    return -float(log_p[rows, y].sum()) / samples, d_logits / samples


class MLP:
    """Dense layer, ReLU, dense layer."""

    def __init__(self, side: int, hidden: int = 128, classes: int = 10) -> None:
        self.sizes = (side * side, hidden, classes)

    def init(self, rng: np.random.Generator) -> Params:
        """Fresh float32 parameters."""
        inputs, hidden, classes = self.sizes
        return {
            "w1": he_normal(rng, inputs, hidden),
            "b1": np.zeros(hidden, np.float32),
            "w2": he_normal(rng, hidden, classes),
            "b2": np.zeros(classes, np.float32),
        }

    def forward(self, p: Params, x: Array) -> tuple[Array, Array]:
        """Hidden activations and logits."""
        h = np.maximum(x @ p["w1"] + p["b1"], 0)
        return h, h @ p["w2"] + p["b2"]

    def predict(self, p: Params, x: Array) -> Array:
        """Most likely label of each row."""
        labels: Array = self.forward(p, x)[-1].argmax(axis=1)
        return labels

    def loss_and_grads(
        self, p: Params, x: Array, y: Array, samples: float | None = None
    ) -> tuple[float, Params]:
        """Loss and gradients: sums over the rows, divided by `samples` (default: a mean)."""
        h, logits = self.forward(p, x)
        loss, d_logits = cross_entropy(logits, y, len(x) if samples is None else samples)
        d_h = d_logits @ p["w2"].T * (h > 0)
        return loss, {
            "w1": x.T @ d_h,
            "b1": d_h.sum(axis=0),
            "w2": h.T @ d_logits,
            "b2": d_logits.sum(axis=0),
        }


def im2col(x: Array, k: int = 3, stride: int = 2) -> Array:
    """Patches of zero-padded images, (n, h, w, c) -> (n, h_out, w_out, c * k * k).

    A convolution is then one matrix product: patches @ weights.
    """
    pad = k // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    windows = sliding_window_view(padded, (k, k), axis=(1, 2))[:, ::stride, ::stride]
    return windows.reshape(*windows.shape[:3], x.shape[3] * k * k)


def col2im(cols: Array, shape: tuple[int, ...], k: int = 3, stride: int = 2) -> Array:
    """Transpose of `im2col`: add every patch back where it was cut out of an image."""
    n, h, w, c = shape
    pad = k // 2
    h_out, w_out = cols.shape[1:3]
    patches = cols.reshape(n, h_out, w_out, c, k, k)
    padded = np.zeros((n, h + 2 * pad, w + 2 * pad, c), cols.dtype)
    for i in range(k):
        for j in range(k):
            rows = slice(i, i + stride * h_out, stride)
            columns = slice(j, j + stride * w_out, stride)
            padded[:, rows, columns] += patches[..., i, j]
    return padded[:, pad : pad + h, pad : pad + w]


class ConvNet:
    """Two 3 x 3 convolutions with stride 2 and ReLU, then a dense layer."""

    def __init__(self, side: int, channels: tuple[int, int] = (8, 16), classes: int = 10) -> None:
        self.side, self.channels, self.classes = side, channels, classes

    def init(self, rng: np.random.Generator) -> Params:
        """Fresh float32 parameters."""
        c1, c2 = self.channels
        side = -(-self.side // 4)  # each convolution halves the image, rounding up
        return {
            "w1": he_normal(rng, 9, c1),
            "b1": np.zeros(c1, np.float32),
            "w2": he_normal(rng, 9 * c1, c2),
            "b2": np.zeros(c2, np.float32),
            "w3": he_normal(rng, side * side * c2, self.classes),
            "b3": np.zeros(self.classes, np.float32),
        }

    def forward(self, p: Params, x: Array, need: Callable[[str], object] = str) -> Activations:
        """Patches and activations of both convolutions, and the logits.

        `need` is called with the name of each parameter just before its first use.
        """
        cols1 = im2col(x.reshape(-1, self.side, self.side, 1))
        need("w1"), need("b1")
        h1 = np.maximum(cols1 @ p["w1"] + p["b1"], 0)
        cols2 = im2col(h1)
        need("w2"), need("b2")
        h2 = np.maximum(cols2 @ p["w2"] + p["b2"], 0)
        need("w3"), need("b3")
        return cols1, h1, cols2, h2, flat(h2) @ p["w3"] + p["b3"]

    def backward(
        self, p: Params, activations: Activations, d_logits: Array
    ) -> Iterator[tuple[str, Array]]:
        """Names and gradients, as the backward pass makes them: the last layer's first."""
        cols1, h1, cols2, h2, _ = activations
        yield "b3", d_logits.sum(axis=0)
        yield "w3", flat(h2).T @ d_logits
        d_h2 = (d_logits @ p["w3"].T).reshape(h2.shape) * (h2 > 0)
        yield "b2", pixels(d_h2).sum(axis=0)
        yield "w2", pixels(cols2).T @ pixels(d_h2)
        d_h1 = col2im(d_h2 @ p["w2"].T, h1.shape) * (h1 > 0)
        yield "b1", pixels(d_h1).sum(axis=0)
        yield "w1", pixels(cols1).T @ pixels(d_h1)

    def predict(self, p: Params, x: Array) -> Array:
        """Most likely label of each row."""
        labels: Array = self.forward(p, x)[-1].argmax(axis=1)
        return labels

    def loss_and_grads(
        self, p: Params, x: Array, y: Array, samples: float | None = None
    ) -> tuple[float, Params]:
        """Loss and gradients: sums over the rows, divided by `samples` (default: a mean)."""
        activations = self.forward(p, x)
        samples = len(x) if samples is None else samples
        loss, d_logits = cross_entropy(activations[-1], y, samples)
        grads = dict(self.backward(p, activations, d_logits))
        return loss, {name: grads[name] for name in p}


def flat(h: Array) -> Array:
    """One row per image."""
    return h.reshape(len(h), int(np.prod(h.shape[1:])))


def pixels(h: Array) -> Array:
    """One row per pixel of every image."""
    return h.reshape(-1, h.shape[-1])


NETWORKS: dict[str, type[MLP] | type[ConvNet]] = {"mlp": MLP, "conv": ConvNet}
