"""How the tables of patients that come with fedspan were made.

    python studies/patients/convert.py FOLDER

reads the official files in FOLDER and says whether the tables are those of `src/fedspan/data/shipped`:

- heart_disease: processed.{cleveland,hungarian,switzerland,va}.data of
  https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/
- tcga_brca: brca.csv and dataset_creation_scripts/train_test_split.csv of flamby/datasets/fed_tcga_brca/ in
  https://github.com/owkin/FLamby at edacf54d5211520583b0133d55ac39b6fda8324b
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedspan.data import columns, store
from fedspan.data.columns import Columns
from fedspan.data.sets import SHIPPED

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
OTHERS = ("pid", "E", "T")  # patient, event, time: all other columns are features


def heart_disease(folder: Path) -> Columns:
    """Return the patients without gaps, hospital by hospital; "?" is a gap."""
    x, y, train, center = [], [], [], []
    for number, (name, mask) in enumerate(TEST.items()):
        lines = (folder / f"processed.{name}.data").read_text("ascii").split()
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
        "x": np.concatenate(x).astype(np.float32),
        "y": np.concatenate(y).astype(np.int64),
        "train": np.concatenate(train),
        "center": np.concatenate(center),
        "columns": np.array([*NUMBERS, *names]),
    }


def tcga_brca(folder: Path) -> Columns:
    """Return the patients that are in FLamby's split, in the order of its table, without their identifiers."""
    table = columns.read(folder / "brca.csv")
    split = columns.read(folder / "train_test_split.csv")
    folds = dict(zip(split["pid"].tolist(), split["fold2"].tolist(), strict=True))  # as in train_0
    kept = np.isin(table["pid"], split["pid"])
    part, center = np.array([folds[pid].split("_") for pid in table["pid"][kept].tolist()]).T
    names = [name for name in table if name not in OTHERS]
    return {
        "x": np.stack([table[name][kept] for name in names], 1).astype(np.float32),
        "event": table["E"][kept].astype(np.float32),
        "time": table["T"][kept].astype(np.float32),
        "train": part == "train",
        "center": center.astype(np.int64),
        "columns": np.array(names),
    }


if __name__ == "__main__":
    for convert in (heart_disease, tcga_brca):
        name = f"{convert.__name__}/{convert.__name__}.npz"
        found = store.digest({name: convert(Path(sys.argv[1]))})
        same = found == store.digest({name: store.read(SHIPPED / name)})
        print(f"{name}: {'the same' if same else 'another table'}, {found}")
