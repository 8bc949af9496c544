"""MNIST with the writer of each digit, and Fashion-MNIST in the same format.

The writers are in the extended labels of QMNIST, whose rows are MNIST's.
"""

from __future__ import annotations

import numpy as np

from fedspan.core.errors import DataError
from fedspan.data.archives import idx
from fedspan.data.columns import Columns
from fedspan.data.sets import DataSet, Files
from fedspan.data.store import Contents, files_of

WRITER = 2  # the column of the extended labels


def _images(folder: str, files: Files) -> Columns:
    arrays = {}
    for part, name in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_x"] = idx(files[f"{folder}/{name}-images-idx3-ubyte.gz"])
        arrays[f"{part}_y"] = idx(files[f"{folder}/{name}-labels-idx1-ubyte.gz"])
    return arrays


def mnist(files: Files) -> Contents:
    """Images and labels of MNIST, writers of QMNIST."""
    arrays = _images("mnist", files)
    for part in ("train", "test"):
        y = arrays[f"{part}_y"]
        extended = idx(files[f"mnist/qmnist-{part}-labels-idx2-int.gz"])
        extended = extended[: len(y)]  # test: 50,000 more follow
        wide = extended.ndim == 2 and extended.shape[1] > WRITER
        if not wide or not np.array_equal(extended[:, 0], y):
            raise DataError("the labels of QMNIST are not those of MNIST")
        arrays[f"{part}_writer"] = extended[:, WRITER].astype(np.uint16)
    return {"mnist_by_writer.npz": arrays}


def fashion_mnist(files: Files) -> Contents:
    """Images and labels of Fashion-MNIST."""
    return {"fashion_mnist.npz": _images("fashion-mnist", files)}


OF_MNIST = files_of(
    "mnist",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    {
        "train-images-idx3-ubyte.gz": ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9912422),
        "train-labels-idx1-ubyte.gz": ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28881),
        "t10k-images-idx3-ubyte.gz": ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1648877),
        "t10k-labels-idx1-ubyte.gz": ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4542),
    },
)  # fmt: skip
OF_QMNIST = files_of(
    "mnist",
    ("https://raw.githubusercontent.com/facebookresearch/qmnist/94061367ec2e099ea18c553c75727ecf849ddb9b/",),
    {
        "qmnist-train-labels-idx2-int.gz": ("2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f", 463024),
        "qmnist-test-labels-idx2-int.gz": ("9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06", 526800),
    },
)  # fmt: skip
OF_FASHION_MNIST = files_of(
    "fashion-mnist",
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    {
        "train-images-idx3-ubyte.gz": ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26421880),
        "train-labels-idx1-ubyte.gz": ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29515),
        "t10k-images-idx3-ubyte.gz": ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4422102),
        "t10k-labels-idx1-ubyte.gz": ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5148),
    },
)  # fmt: skip
SETS = (
    DataSet(
        name="mnist",
        about="handwritten digits, 60,000 and 10,000 images of 28 × 28",
        clients="539 writers, and 297 others in the test set",
        licence="MNIST CC BY-SA 3.0, writers (QMNIST) BSD-3-Clause",
        source="http://yann.lecun.com/exdb/mnist and https://github.com/facebookresearch/qmnist",
        size=11_600_000,
        made=("mnist_by_writer.npz",),
        files=OF_MNIST + OF_QMNIST,
        convert=mnist,
        digest="bfb77e023218b1c21fc45e6ba1a21a76d2bbc608ab67f402259aadc77a7ece17",
    ),
    DataSet(
        name="fashion_mnist",
        about="pieces of clothing, 60,000 and 10,000 images of 28 × 28",
        licence="MIT",
        source="https://github.com/zalandoresearch/fashion-mnist",
        size=31_000_000,
        made=("fashion_mnist.npz",),
        files=OF_FASHION_MNIST,
        convert=fashion_mnist,
        digest="f012f75c697a54aaa9b3635f032b8468d2f95e067e669582cde71b7b6ecceb92",
    ),
)
