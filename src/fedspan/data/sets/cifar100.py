"""CIFAR-100 with its 100 fine classes, from the official archive in its Python or its binary form."""

from __future__ import annotations

from fedspan.data.archives import cifar, hub_splits
from fedspan.data.download import File
from fedspan.data.sets import DataSet, Files, Hub, Splits
from fedspan.data.store import Contents

ARCHIVE = "cifar-100-python.tar.gz"


def convert(files: Files) -> Contents:
    """Images and fine labels of the archive."""
    return {"cifar100.npz": cifar(files[ARCHIVE], "cifar-100")}


def convert_hub(splits: Splits, _: Files) -> Contents:
    """Images and fine labels of the hub."""
    return {"cifar100.npz": hub_splits(splits, "img", "fine_label")}


SET = DataSet(
    name="cifar100",
    about="photographs of 100 classes, 50,000 and 10,000 images of 32 × 32",
    clients="none of its own",
    licence="none stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    size=160_000_000,
    made=("cifar100.npz",),
    files=(
        File(
            ARCHIVE, (f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}",),
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7", 169001437, "cifar-100-binary.tar.gz",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
    ),
    convert=convert,
    hub=Hub("uoft-cs/cifar100", convert_hub),
    digest="5e6f4110b14aa60ebe656fa7311a2117d3e22373ea83699760139e59d778f4eb",
)  # fmt: skip
