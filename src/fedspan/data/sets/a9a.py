"""LIBSVM's a9a: UCI Adult as 123 binary features, the convex test problem of many papers on local training."""

from __future__ import annotations

import numpy as np

from fedspan.data.sets import DataSet, Files
from fedspan.data.store import Contents, File

FEATURES = 123
FROM = "https://raw.githubusercontent.com/VinceShieh/Spark-AdaOptimizer/03a3f4ac1fc83c4ce724ddc3b1ccfe78e1f66341/data/"


def convert(files: Files) -> Contents:
    """Each row as bits; labels are 0 and 1."""
    rows = [line.split() for line in files["libsvm/a9a"].read_text("ascii").splitlines()]
    x = np.zeros((len(rows), FEATURES), np.uint8)
    for number, row in enumerate(rows):
        x[number, [int(one.partition(":")[0]) - 1 for one in row[1:]]] = 1
    y = np.array([float(row[0]) > 0 for row in rows], np.int8)
    packed = {"x": np.packbits(x, axis=1), "y": y, "features": np.array(FEATURES)}
    return {"libsvm/a9a.npz": packed}


SETS = (DataSet(
    name="a9a",
    about="census records of 32,560 people as 123 binary features, income above 50,000 or not",
    licence="CC BY 4.0 (UCI Adult)",
    source="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html#a9a",
    size=160_000,
    made=("libsvm/a9a.npz",),
    files=(
        File(
            "libsvm/a9a", (f"{FROM}a9a",),
            "ef89967ad487b189379ef13ff752b69bf3487c07ff50f821c800aa983b6ae819", 2297242,
        ),
    ),
    convert=convert,
    digest="e13836d8e55973d5961e1d93678095b7f5d69c8c813eb66624873a41eddb4677",
),)  # fmt: skip
