"""CIFAR-10, and CIFAR-100 with its 100 fine classes, from the official binary archives.

A record is the labels, a byte each, and the pixels color by color. `cifar100_mini` is cut from CIFAR-100 when it is
read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedspan.data.archives import members
from fedspan.data.columns import Columns
from fedspan.data.sets import DataSet, Files
from fedspan.data.store import Contents, File

LICENCE, PAGE = "none stated", "https://www.cs.toronto.edu/~kriz/cifar.html"
FROM = "https://www.cs.toronto.edu/~kriz/"
PIXELS = 3 * 32 * 32


def _images(files: Files, parts: Mapping[str, Sequence[str]], labels: int) -> Columns:
    """Return images and labels; the last label of a record is that of the finest class."""
    (archive,) = files.values()
    found = {path.name: data for path, data in members(archive, "*.bin").items()}
    arrays: Columns = {}
    for part, names in parts.items():
        data = b"".join(found[f"{name}.bin"] for name in names)
        rows = np.frombuffer(data, np.uint8).reshape(-1, labels + PIXELS)
        images = rows[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"{part}_x"] = np.ascontiguousarray(images)
        arrays[f"{part}_y"] = rows[:, labels - 1].copy()
    return arrays


def cifar10(files: Files) -> Contents:
    """Images and labels of the archive."""
    parts = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    return {"cifar10.npz": _images(files, parts, labels=1)}


def cifar100(files: Files) -> Contents:
    """Images and fine labels of the archive."""
    return {"cifar100.npz": _images(files, {"train": ["train"], "test": ["test"]}, labels=2)}


SETS = (
    DataSet(
        name="cifar10",
        about="photographs of 10 classes, 50,000 and 10,000 images of 32 × 32",
        licence=LICENCE,
        source=PAGE,
        size=160_000_000,
        made=("cifar10.npz",),
        files=(
            File(
                "cifar-10-binary.tar.gz",
                (f"{FROM}cifar-10-binary.tar.gz",),
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                170052171,
            ),
        ),
        convert=cifar10,
    ),
    DataSet(
        name="cifar100",
        about="photographs of 100 classes, 50,000 and 10,000 images of 32 × 32",
        licence=LICENCE,
        source=PAGE,
        size=160_000_000,
        made=("cifar100.npz",),
        files=(
            File(
                "cifar-100-binary.tar.gz",
                (f"{FROM}cifar-100-binary.tar.gz",),
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                168513733,
            ),
        ),
        convert=cifar100,
        digest="5e6f4110b14aa60ebe656fa7311a2117d3e22373ea83699760139e59d778f4eb",
    ),
    DataSet(
        name="cifar100_mini",
        about="the first 50 training and 10 test images of each class of CIFAR-100",
        licence=LICENCE,
        source=PAGE,
        part_of="cifar100",
    ),
)
