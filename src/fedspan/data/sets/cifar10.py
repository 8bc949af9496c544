"""CIFAR-10, from the official archive in its Python or its binary form."""

from __future__ import annotations

from fedspan.data.archives import cifar
from fedspan.data.download import File
from fedspan.data.sets import DataSet, Files
from fedspan.data.store import Contents

ARCHIVE = "cifar-10-python.tar.gz"


def convert(files: Files) -> Contents:
    """Images and labels of the archive."""
    return {"cifar10.npz": cifar(files[ARCHIVE], "cifar-10")}


SET = DataSet(
    name="cifar10",
    about="photographs of 10 classes, 50,000 and 10,000 images of 32 × 32",
    clients="none of its own",
    licence="none stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    size=160_000_000,
    made=("cifar10.npz",),
    files=(
        File(
            ARCHIVE, (f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",),
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce", 170498071, "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    convert=convert,
)  # fmt: skip
