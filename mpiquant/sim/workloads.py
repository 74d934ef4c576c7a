"""Networks to train: the shapes of their parameters, and where the computing time of a step goes.

Shapes follow from the architectures, so that the totals are those of the published models.  A
layer's share of a step is its share of the multiplications; what a step takes in all depends on the
machine and is the user's to say.

Sources: He et al. 2016 (ResNet-50), Simonyan and Zisserman 2015 (VGG-16), Devlin et al. 2019
(BERT-base), Radford et al. 2019 (GPT-2), Black et al. 2022 (GPT-NeoX; here of the size and shapes
of Pythia-1.4B, Biderman et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Layer:
    """Parameters that are used together.

    Attributes
    ----------
    name : str
    shapes : tuple of tuple of int
        Of its parameters.
    products : float
        Multiplications of its forward pass for one sample.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    products: float

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Workload:
    """A network.

    Attributes
    ----------
    name : str
    layers : tuple of Layer
        In the order of the forward pass.
    step_s : float
        Seconds of a step's computation, by default those of one sample of 2 times 3 times its
        multiplications at 100 GFLOP/s.
    """

    name: str
    layers: tuple[Layer, ...]
    step_s: float

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def products(self) -> float:
        return sum(layer.products for layer in self.layers)

    def forward_s(self) -> list[float]:
        """Seconds of each layer's forward pass: a third of the step in all."""
        return [self.step_s / 3 * layer.products / self.products for layer in self.layers]

    def backward_s(self) -> list[float]:
        """Seconds of each layer's backward pass, in the order of the layers: twice as much."""
        return [2 * seconds for seconds in self.forward_s()]


FLOPS = 100e9


def _workload(name: str, layers: Iterator[Layer]) -> Workload:
    found = tuple(layers)
    return Workload(name, found, 6 * sum(layer.products for layer in found) / FLOPS)


# ---- images ----


def _convolution(name: str, k: int, inputs: int, outputs: int, side: int, *, norm: bool) -> Layer:
    """A convolution onto side x side pixels, with a batch normalization or a bias."""
    rest = ((outputs,), (outputs,)) if norm else ((outputs,),)
    products = float(k * k * inputs * outputs * side * side)
    return Layer(name, ((outputs, inputs, k, k), *rest), products)


def _dense(name: str, inputs: int, outputs: int) -> Layer:
    return Layer(name, ((outputs, inputs), (outputs,)), float(inputs * outputs))


def _resnet50() -> Iterator[Layer]:
    yield _convolution("stem", 7, 3, 64, 112, norm=True)
    inputs = 64
    for stage, (blocks, width, side) in enumerate(
        [(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)]
    ):
        for block in range(blocks):
            name = f"stage{stage + 1}.{block + 1}"
            # The stride is in the 3 x 3 convolution: the one before works on larger images.
            before = 2 * side if block == 0 and stage > 0 else side
            yield _convolution(f"{name}.reduce", 1, inputs, width, before, norm=True)
            yield _convolution(f"{name}.middle", 3, width, width, side, norm=True)
            yield _convolution(f"{name}.expand", 1, width, 4 * width, side, norm=True)
            if block == 0:
                yield _convolution(f"{name}.shortcut", 1, inputs, 4 * width, side, norm=True)
            inputs = 4 * width
    yield _dense("classes", inputs, 1000)


def _vgg16() -> Iterator[Layer]:
    inputs, side = 3, 224
    for stage, (layers, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
        for layer in range(layers):
            yield _convolution(f"conv{stage + 1}.{layer + 1}", 3, inputs, width, side, norm=False)
            inputs = width
        side //= 2
    yield _dense("dense1", inputs * side * side, 4096)
    yield _dense("dense2", 4096, 4096)
    yield _dense("classes", 4096, 1000)


# ---- text ----


def _embedding(name: str, *shapes: tuple[int, ...]) -> Layer:
    """Rows that are looked up: a sum for each value of a row, which is next to nothing."""
    return Layer(name, shapes, float(shapes[0][1]))


def _linear(tokens: int, inputs: int, outputs: int) -> tuple[tuple[tuple[int, ...], ...], float]:
    return ((outputs, inputs), (outputs,)), float(tokens * inputs * outputs)


def _transformer_block(name: str, tokens: int, width: int) -> Iterator[Layer]:
    """Attention and a perceptron of four times the width, each with its normalization."""
    norm = ((width,), (width,))
    qkv, qkv_products = _linear(tokens, width, 3 * width)
    out, out_products = _linear(tokens, width, width)
    mixing = 2.0 * tokens * tokens * width
    yield Layer(f"{name}.attention", (*norm, *qkv, *out), qkv_products + out_products + mixing)
    up, up_products = _linear(tokens, width, 4 * width)
    down, down_products = _linear(tokens, 4 * width, width)
    yield Layer(f"{name}.perceptron", (*norm, *up, *down), up_products + down_products)


def _bert() -> Iterator[Layer]:
    width, tokens = 768, 512
    tables = ((30522, width), (512, width), (2, width))
    yield _embedding("embeddings", *tables, (width,), (width,))
    for block in range(12):
        yield from _transformer_block(f"block{block + 1}", tokens, width)
    yield Layer("pooler", ((width, width), (width,)), float(width * width))


def _gpt2() -> Iterator[Layer]:
    width, tokens, words = 768, 1024, 50257
    yield _embedding("positions", (1024, width))
    for block in range(12):
        yield from _transformer_block(f"block{block + 1}", tokens, width)
    # The table of words is that of the output as well, and its gradient ready with the last layer.
    yield Layer("words", ((words, width), (width,), (width,)), float(tokens * width * words))


def _neox() -> Iterator[Layer]:
    width, tokens, words = 2048, 2048, 50304
    yield _embedding("words", (words, width))
    for block in range(24):
        yield from _transformer_block(f"block{block + 1}", tokens, width)
    norm = ((width,), (width,))
    yield Layer("output", ((words, width), *norm), float(tokens * width * words))


_MAKERS: dict[str, Callable[[], Iterator[Layer]]] = {
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "bert": _bert,
    "gpt2": _gpt2,
    "neox1.4b": _neox,
}

WORKLOADS = tuple(_MAKERS)


def workload(name: str) -> Workload:
    """The network of a name: "resnet50", "vgg16", "bert", "gpt2" or "neox1.4b".

    Raises
    ------
    ValueError
        If there is none.
    """
    make = _MAKERS.get(name)
    if make is None:
        raise ValueError(f"unknown workload {name!r}; known are {', '.join(WORKLOADS)}")
    return _workload(name, make())
