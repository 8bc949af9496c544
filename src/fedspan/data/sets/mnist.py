"""MNIST with the writer of each digit. The writers are in the extended labels of QMNIST, whose rows are MNIST's."""

from __future__ import annotations

import numpy as np

from fedspan.core.errors import DataError
from fedspan.data.archives import Array, hub_splits, idx, idx_splits
from fedspan.data.download import files_of
from fedspan.data.sets import DataSet, Files, Hub, Splits
from fedspan.data.store import Contents

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
QMNIST = "https://raw.githubusercontent.com/facebookresearch/qmnist/94061367ec2e099ea18c553c75727ecf849ddb9b/"
WRITER = 2  # the column of the extended labels
HASHES = {
    "train-images-idx3-ubyte.gz": (
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        9912422,
    ),
    "train-labels-idx1-ubyte.gz": (
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        28881,
    ),
    "t10k-images-idx3-ubyte.gz": (
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        1648877,
    ),
    "t10k-labels-idx1-ubyte.gz": (
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        4542,
    ),
}
WRITERS = {
    "qmnist-train-labels-idx2-int.gz": (
        "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
        463024,
    ),
    "qmnist-test-labels-idx2-int.gz": (
        "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
        526800,
    ),
}


def convert(files: Files) -> Contents:
    """Images and labels of MNIST, writers of QMNIST."""
    return _with_writers(idx_splits(files, "mnist"), files)


def convert_hub(splits: Splits, files: Files) -> Contents:
    """Images and labels of the hub, writers of QMNIST."""
    return _with_writers(hub_splits(splits), files)


def _with_writers(arrays: dict[str, Array], files: Files) -> Contents:
    for part in ("train", "test"):
        y = arrays[f"{part}_y"]
        extended = idx(files[f"mnist/qmnist-{part}-labels-idx2-int.gz"])
        extended = extended[: len(y)]  # test: 50,000 more follow
        wide = extended.ndim == 2 and extended.shape[1] > WRITER
        if not wide or not np.array_equal(extended[:, 0], y):
            raise DataError("the labels of QMNIST are not those of MNIST")
        arrays[f"{part}_writer"] = extended[:, WRITER].astype(np.uint16)
    return {"mnist_by_writer.npz": arrays}


_WRITERS = files_of("mnist", (QMNIST,), WRITERS)
SET = DataSet(
    name="mnist",
    about="handwritten digits, 60,000 and 10,000 images of 28 × 28",
    clients="539 writers, and 297 others in the test set",
    licence="MNIST CC BY-SA 3.0, writers (QMNIST) BSD-3-Clause",
    source="http://yann.lecun.com/exdb/mnist and https://github.com/facebookresearch/qmnist",
    size=11_600_000,
    made=("mnist_by_writer.npz",),
    files=files_of("mnist", MIRRORS, HASHES) + _WRITERS,
    convert=convert,
    hub=Hub("ylecun/mnist", convert_hub, files=_WRITERS),
    digest="bfb77e023218b1c21fc45e6ba1a21a76d2bbc608ab67f402259aadc77a7ece17",
)
