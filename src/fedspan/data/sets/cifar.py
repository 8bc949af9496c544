"""CIFAR-10, and CIFAR-100 with its 100 fine classes, from the official archives in their Python or binary form.

`cifar100_mini` is cut from CIFAR-100 when it is read.
"""

from __future__ import annotations

from fedspan.data.archives import cifar, hub_images
from fedspan.data.sets import DataSet, Files, Splits
from fedspan.data.store import Contents, File

LICENCE, PAGE = "none stated", "https://www.cs.toronto.edu/~kriz/cifar.html"
FROM = "https://www.cs.toronto.edu/~kriz/"


def cifar10(files: Files, _: Splits | None) -> Contents:
    """Images and labels of the archive."""
    (archive,) = files.values()
    return {"cifar10.npz": cifar(archive, "cifar-10")}


def cifar100(files: Files, hub: Splits | None) -> Contents:
    """Images and fine labels of the archive, or of the hub."""
    if hub is not None:
        return {"cifar100.npz": hub_images(hub, "img", "fine_label")}
    (archive,) = files.values()
    return {"cifar100.npz": cifar(archive, "cifar-100")}


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
                "cifar-10-python.tar.gz",
                (f"{FROM}cifar-10-python.tar.gz",),
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                170498071,
                "cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
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
                "cifar-100-python.tar.gz",
                (f"{FROM}cifar-100-python.tar.gz",),
                "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                169001437,
                "cifar-100-binary.tar.gz",
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        convert=cifar100,
        hub="uoft-cs/cifar100",
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
