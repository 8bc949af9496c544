"""Data sets, one function each, read from a directory of yours. Nothing is downloaded and nothing is unpickled.

The directory is FEDSPAN_DATA, else `../shared/data` beside the working directory or the checkout. Each function gives
the training and the test examples, and keeps them in memory for the next call.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import DataError, SpecError
from fedspan.data import archives

Array = npt.NDArray[Any]
FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test examples of a data set."""

    x: Array  # inputs; images are bytes, (n, height, width[, 3])
    y: Array  # targets; usually the number of the class
    owner: npt.NDArray[np.int64] | None = None  # who made each example, where it is known


def first_examples(labels: npt.NDArray[np.int64], classes: int | None, per_class: int | None) -> npt.NDArray[np.int64]:
    """The numbers of the first examples of the first classes, in the order of the file; None takes all."""
    names = np.unique(labels)
    if classes is not None and classes > len(names):
        raise SpecError(f"`task.classes` is {classes}, but the data set has {len(names)}")
    return np.sort(np.concatenate([np.flatnonzero(labels == c)[:per_class] for c in names[:classes]]))


def load(name: str) -> tuple[Split, Split]:
    """The training and the test examples of a data set of images by its name."""
    if name not in IMAGES:
        raise DataError(f"unknown data set {name!r}; known are {', '.join(IMAGES)}")
    return IMAGES[name]()


def folder() -> Path:
    """The directory of the data files."""
    named = os.environ.get("FEDSPAN_DATA")
    places = [Path(named)] if named else [Path("../shared/data"), Path(__file__).parents[4] / "shared/data"]
    for place in places:
        if place.is_dir():
            return place
    raise DataError(f"no data directory at {str(places[0])!r}; set FEDSPAN_DATA to the directory of the data files")


def _open(file: str) -> dict[str, Array]:
    path = folder() / file
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing; put the file there or set FEDSPAN_DATA to its directory")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@functools.lru_cache(maxsize=1)
def mnist() -> tuple[Split, Split]:
    """MNIST with the writer of each digit as its owner: 60,000 and 10,000 images of 28 × 28."""
    found = _open("mnist_by_writer.npz")
    parts = (Split(found[f"{p}_x"], found[f"{p}_y"].astype(np.int64), found[f"{p}_writer"]) for p in ("train", "test"))
    train, test = parts
    return train, test


@functools.lru_cache(maxsize=1)
def cifar100() -> tuple[Split, Split]:
    """CIFAR-100: 50,000 and 10,000 color images of 32 × 32, from cifar100.npz or the official archive."""
    if not (folder() / "cifar100.npz").is_file():
        official = archives.read(folder(), "cifar-100")
        if official is not None:
            return Split(*official[0]), Split(*official[1])
    return _cifar100("cifar100.npz")


@functools.lru_cache(maxsize=1)
def cifar100_mini() -> tuple[Split, Split]:
    """The first 50 training and 10 test images of each class of CIFAR-100."""
    return _cifar100("cifar100_mini.npz")


def _cifar100(file: str) -> tuple[Split, Split]:
    found = _open(file)
    train, test = (_strips(found, part) for part in ("train", "test"))
    return train, test


@functools.lru_cache(maxsize=1)
def cifar10() -> tuple[Split, Split]:
    """CIFAR-10: 50,000 and 10,000 color images of 32 × 32, from the official archive."""
    official = archives.read(folder(), "cifar-10")
    if official is None:
        raise DataError(
            f"CIFAR-10 is not in {str(folder())!r}; put cifar-10-python.tar.gz or cifar-10-binary.tar.gz there "
            "(www.cs.toronto.edu/~kriz/cifar.html)"
        )
    return Split(*official[0]), Split(*official[1])


def _strips(found: dict[str, Array], part: str) -> Split:
    """Lossless WebP strips of 100 images each, one below the other."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("Pillow is not installed; pip install 'fedspan[vision]' to read CIFAR") from None
    import io

    data, ends = found[f"{part}_webp"].tobytes(), found[f"{part}_offsets"].tolist()
    images = []
    for start, end in itertools.pairwise(ends):
        strip = np.asarray(Image.open(io.BytesIO(data[start:end])).convert("RGB"))
        images.append(strip.reshape(-1, 32, 32, 3))
    return Split(np.concatenate(images), found[f"{part}_fine"].astype(np.int64))


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Split, Split]:
    """Scikit-learn's digits: 1,500 and 297 images of 8 × 8. They need no data directory."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("scikit-learn is not installed; pip install 'fedspan[vision]' for digits") from None
    found = load_digits()
    x, y = np.rint(found.images * (255 / 16)).astype(np.uint8), found.target.astype(np.int64)
    return Split(x[:1500], y[:1500]), Split(x[1500:], y[1500:])


@functools.lru_cache(maxsize=1)
def fashion_mnist() -> tuple[Split, Split]:
    """Fashion-MNIST: 60,000 and 10,000 images of 28 × 28."""
    places = [FASHION]
    if named := os.environ.get("FEDSPAN_DATA"):
        places.insert(0, Path(named) / "fashion-mnist")
    place = next((p for p in places if p.is_dir()), None)
    if place is None:
        raise DataError(
            "Fashion-MNIST is not here; install Debian's dataset-fashion-mnist, or put its four .gz files in "
            "FEDSPAN_DATA/fashion-mnist"
        )
    train, test = (
        Split(
            _idx(place / f"{part}-images-idx3-ubyte.gz"), _idx(place / f"{part}-labels-idx1-ubyte.gz").astype(np.int64)
        )
        for part in ("train", "t10k")
    )
    return train, test


def _idx(path: Path) -> npt.NDArray[np.uint8]:
    """An IDX file: two zero bytes, a type, the number of axes, their lengths, the bytes."""
    raw = gzip.decompress(path.read_bytes())
    axes = raw[3]
    shape = np.frombuffer(raw, ">i4", axes, 4)
    if raw[:3] != b"\0\0\x08" or len(raw) != 4 + 4 * axes + int(np.prod(shape)):
        raise DataError(f"{str(path)!r} is not an IDX file of bytes")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


@functools.lru_cache(maxsize=1)
def tcga_brca() -> tuple[Split, Split]:
    """Fed-TCGA-BRCA: 866 and 222 breast-cancer patients of six regions' hospitals, 39 clinical features.

    A target is (time in days, whether death was seen); the owner is the region, 0 to 5.
    """
    found = _open("tcga_brca/tcga_brca.npz")
    targets = np.stack([found["time"], found["event"]], 1).astype(np.float32)
    parts = (np.flatnonzero(found["train"] == wanted) for wanted in (True, False))
    train, test = (Split(found["x"][part], targets[part], found["center"][part]) for part in parts)
    return train, test


IMAGES = {  # those of the `classification` task
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cifar100_mini": cifar100_mini,
    "digits": digits,
}
