"""Fashion-MNIST, in the format of MNIST."""

from __future__ import annotations

from fedspan.data.archives import hub_splits, idx_splits
from fedspan.data.download import files_of
from fedspan.data.sets import DataSet, Files, Hub, Splits
from fedspan.data.store import Contents

PLACES = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
HASHES = {
    "train-images-idx3-ubyte.gz": (
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        26421880,
    ),
    "train-labels-idx1-ubyte.gz": (
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        29515,
    ),
    "t10k-images-idx3-ubyte.gz": (
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        4422102,
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        5148,
    ),
}


def convert(files: Files) -> Contents:
    """Images and labels of the official files."""
    return {"fashion_mnist.npz": idx_splits(files, "fashion-mnist")}


def convert_hub(splits: Splits, _: Files) -> Contents:
    """Images and labels of the hub."""
    return {"fashion_mnist.npz": hub_splits(splits)}


SET = DataSet(
    name="fashion_mnist",
    about="pieces of clothing, 60,000 and 10,000 images of 28 × 28",
    clients="none of its own",
    licence="MIT",
    source="https://github.com/zalandoresearch/fashion-mnist",
    size=31_000_000,
    made=("fashion_mnist.npz",),
    files=files_of("fashion-mnist", PLACES, HASHES),
    convert=convert,
    hub=Hub("zalando-datasets/fashion_mnist", convert_hub),
    digest="f012f75c697a54aaa9b3635f032b8468d2f95e067e669582cde71b7b6ecceb92",
)
