"""Fed-Heart-Disease, which comes with fedspan: four hospitals' patients, with the features and split of FLamby."""

from __future__ import annotations

import numpy as np

from fedspan.data.sets import DataSet, Files, Splits
from fedspan.data.store import Contents, files_of

FROM = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
KEPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 13)  # without columns that most hospitals lack
NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
DUMMIES = {"cp": (2, 2, 3, 4), "restecg": (6, 1, 2)}  # column, and its categories but the first
# Test patients of each hospital, bit by bit: scikit-learn's train_test_split as in FLamby's dataset.py at edacf54.
TEST = {
    "cleveland": 0x20240501059E2CEE24501DA82E0240843E000D64A180C0542380AD2CC2489307C71000E75F2,
    "hungarian": 0x220108F97083A85910E01AA201270D2331A288269090245ED2740823005221746,
    "switzerland": 0x1E18EA32030,
    "va": 0x1192000916D94083AE16C1221800E9D16,
}


def convert(files: Files, _: Splits | None) -> Contents:
    """The patients without gaps, hospital by hospital; "?" is a gap."""
    x, y, train, center = [], [], [], []
    for number, (name, mask) in enumerate(TEST.items()):
        lines = files[f"heart_disease/processed.{name}.data"].read_text("ascii").split()
        cells = np.array([line.split(",") for line in lines])[:, KEPT]
        rows = cells[(cells != "?").all(1)].astype(np.float64)
        plain = np.delete(rows[:, :-1], [column for column, *_ in DUMMIES.values()], 1)
        dummies = [rows[:, c] == one for c, *others in DUMMIES.values() for one in others]
        x.append(np.column_stack([plain, *dummies]))
        y.append(rows[:, -1] > 0)
        train.append(np.array([bit == "0" for bit in f"{mask:0{len(rows)}b}"]))
        center.append(np.full(len(rows), number))
    names = [f"{name}={one}" for name, (_, *others) in DUMMIES.items() for one in others]
    return {
        "heart_disease/heart_disease.npz": {
            "x": np.concatenate(x).astype(np.float32),
            "y": np.concatenate(y).astype(np.int64),
            "train": np.concatenate(train),
            "center": np.concatenate(center),
            "columns": np.array([*NUMBERS, *names]),
        }
    }


SETS = (DataSet(
    name="heart_disease",
    about="heart patients, 486 and 254, with 13 features and whether they are ill",
    clients="4 hospitals",
    licence="CC BY 4.0 (A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, 1988)",
    source="https://archive.ics.uci.edu/dataset/45/heart+disease",
    size=7_000,
    made=("heart_disease/heart_disease.npz",),
    files=files_of("heart_disease", (FROM,), {
        "processed.cleveland.data": ("a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8", 18461),
        "processed.hungarian.data": ("d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796", 10263),
        "processed.switzerland.data": ("834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314", 4109),
        "processed.va.data": ("e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f", 6737),
    }),
    convert=convert,
    digest="176b58a8746ab134fd91a94e81346dcc91ed4bff68698add185b2af6e3febb63",
),)  # fmt: skip
