"""Data sets by name, one function each. `fedspan data` lists them, and `fedspan data get NAME` gets one.

Each function gives the training and the test examples, and keeps them in memory for the next call.
"""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedspan.core.errors import DataError, SpecError, one_of, shown
from fedspan.core.extras import needs
from fedspan.core.partition import Indices
from fedspan.data import sets, store
from fedspan.data.columns import Array

Splits = tuple["Split", "Split"]


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test examples of a data set."""

    x: Array  # inputs; images are bytes, (n, height, width[, 3])
    y: Array  # targets; usually the number of the class
    owner: Indices | None = None  # who made each example, where it is known


def first_examples(labels: Indices, classes: int | None, per_class: int | None) -> Indices:
    """The numbers of the first examples of the first classes, in the order of the file; None takes all."""
    names = np.unique(labels)
    if classes is not None and classes > len(names):
        raise SpecError(f"`task.classes` is {classes}, but the data set has {len(names)}")
    return np.sort(
        np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in names[:classes]])
    )


def check(names: Iterable[str]) -> None:
    """Refuse data sets and models that are not here or cannot be read; they are kept in memory for the next call."""
    wanted = list(dict.fromkeys(names))
    sets.require(wanted)
    for name in wanted:
        if name in IMAGES:
            load(name)
        elif not sets.find(name).package:
            for path in sets.paths(name).values():
                if path.name.endswith(".jsonl.gz"):
                    _texts(name, path)


def load(name: str) -> Splits:
    """The training and the test examples of a data set of images by its name."""
    one_of("data set", name, IMAGES)
    return IMAGES[name]()


def mnist() -> Splits:
    """MNIST with the writer of each digit as its owner: 60,000 and 10,000 images of 28 × 28.

    Returns:
        The training and the test examples.
    """
    return _images("mnist", (28, 28))


def fashion_mnist() -> Splits:
    """Fashion-MNIST: 60,000 and 10,000 images of 28 × 28.

    Returns:
        The training and the test examples.
    """
    return _images("fashion_mnist", (28, 28))


def cifar10() -> Splits:
    """CIFAR-10: 50,000 and 10,000 color images of 32 × 32.

    Returns:
        The training and the test examples.
    """
    return _images("cifar10", (32, 32, 3))


def cifar100() -> Splits:
    """CIFAR-100: 50,000 and 10,000 color images of 32 × 32.

    Returns:
        The training and the test examples.
    """
    return _images("cifar100", (32, 32, 3))


def cifar100_mini() -> Splits:
    """The first 50 training and 10 test images of each class of CIFAR-100.

    Returns:
        The training and the test examples.
    """
    sets.require(["cifar100_mini"])
    train, test = (
        Split(split.x[first], split.y[first])
        for split, count in zip(cifar100(), (50, 10), strict=True)
        for first in [first_examples(split.y, None, count)]
    )
    return train, test


def digits() -> Splits:
    """Scikit-learn's digits: 1,500 and 297 images of 8 × 8.

    Returns:
        The training and the test examples.
    """
    needs("vision", "sklearn")
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = np.rint(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.int64)
    return Split(x[:1500], y[:1500]), Split(x[1500:], y[1500:])


def tcga_brca() -> Splits:
    """Fed-TCGA-BRCA: 866 and 222 breast-cancer patients of six regions' hospitals, 39 clinical features.

    A target is (time in days, whether death was seen); the owner is the region, 0 to 5.

    Returns:
        The training and the test examples.
    """
    return _of_centers("tcga_brca", ("time", "event"))


def heart_disease() -> Splits:
    """Fed-Heart-Disease: 486 and 254 patients of four hospitals with 13 clinical features, and whether they are ill.

    The owner is the hospital: 0 Cleveland, 1 Hungarian, 2 Switzerland, 3 Long Beach (V.A.).

    Returns:
        The training and the test examples.
    """
    return _of_centers("heart_disease", ("y",))


def _of_centers(name: str, targets: tuple[str, ...]) -> Splits:
    (path,) = sets.paths(name).values()
    with sets.intact(name):
        found = store.read(path)
        y = np.stack([found[one].astype(np.float32) for one in targets], 1)
        train, test = (
            Split(found["x"][part], y[part], found["center"][part])
            for part in (found["train"], ~found["train"])
        )
    return train, test


def banking77() -> Splits:
    """Banking77: 10,003 and 3,080 texts of a bank's customers, each with one of 77 intents.

    Returns:
        The training and the test examples.
    """
    train, test = (texts("banking77", part) for part in ("train", "test"))
    return train, test


def texts(name: str, part: str) -> Split:
    """The texts of a data set, with their labels where they have some."""
    return _texts(name, sets.paths(name)[f"text/{name}_{part}.jsonl.gz"])


@functools.lru_cache(maxsize=8)
def _texts(name: str, path: Path) -> Split:
    with sets.intact(name):
        rows = store.read(path)
        if not rows:
            raise DataError(f"{path.name} has no rows")
        for number, row in enumerate(rows, 1):
            label = row.get("label", 0)
            if not isinstance(label, int) or label < 0 or not isinstance(row["text"], str):
                raise DataError(f"row {number} of {path.name} is {shown(row)}")
        labels = [row.get("label", 0) for row in rows]
        return Split(np.array([row["text"] for row in rows], object), np.array(labels, np.int64))


def _images(name: str, shape: tuple[int, ...]) -> Splits:
    (path,) = sets.paths(name).values()
    return _archive(name, shape, path)


@functools.lru_cache(maxsize=8)
def _archive(name: str, shape: tuple[int, ...], path: Path) -> Splits:
    """The images and labels of an .npz; images are as they are, or lossless WebP strips of 100 each."""
    splits = []
    with sets.intact(name):
        found = store.read(path)
        for part in ("train", "test"):
            strips = f"{part}_webp" in found
            x = _strips(found, part) if strips else found[f"{part}_x"]
            y = found[f"{part}_fine" if strips else f"{part}_y"]
            owner = found.get(f"{part}_writer")
            fit = len(x) and x.dtype == np.uint8 and x.shape[1:] == shape
            for one in (y, y if owner is None else owner):
                if not fit or one.shape != x.shape[:1] or one.dtype.kind not in "iu":
                    raise DataError(f"{part}_x has {x.dtype} {x.shape} for {one.dtype} {one.shape}")
            splits.append(Split(x, y.astype(np.int64), owner))
    return splits[0], splits[1]


def _strips(found: Mapping[str, Array], part: str) -> Array:
    needs("vision", "PIL")
    from PIL import Image

    data = found[f"{part}_webp"].tobytes()
    strips = [
        np.asarray(Image.open(io.BytesIO(data[start:end])).convert("RGB"))
        for start, end in itertools.pairwise(found[f"{part}_offsets"].tolist())
    ]
    return np.concatenate(strips).reshape(-1, 32, 32, 3)


IMAGES: dict[str, Callable[[], Splits]] = {  # those of the `classification` task
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar100_mini": cifar100_mini,
    "digits": digits,
}
