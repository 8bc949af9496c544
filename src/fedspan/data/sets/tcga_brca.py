"""Fed-TCGA-BRCA, which comes with fedspan: 15 kB of unrestricted clinical data, as FLamby preprocessed them."""

from __future__ import annotations

import numpy as np

from fedspan.data import columns
from fedspan.data.sets import DataSet, Files, Splits
from fedspan.data.store import Contents, File

FROM = (
    "https://raw.githubusercontent.com/owkin/FLamby/edacf54d5211520583b0133d55ac39b6fda8324b/"
    "flamby/datasets/fed_tcga_brca/"
)
OTHERS = ("pid", "E", "T")  # patient, event, time: all other columns are features


def convert(files: Files, _: Splits | None) -> Contents:
    """The patients that are in FLamby's split, in the order of its table; their identifiers are left out."""
    table = columns.read(files["tcga_brca/brca.csv"])
    split = columns.read(files["tcga_brca/train_test_split.csv"])
    folds = dict(zip(split["pid"].tolist(), split["fold2"].tolist(), strict=True))  # as in train_0
    kept = np.isin(table["pid"], split["pid"])
    part, center = np.array([folds[pid].split("_") for pid in table["pid"][kept].tolist()]).T
    names = [name for name in table if name not in OTHERS]
    return {
        "tcga_brca/tcga_brca.npz": {
            "x": np.stack([table[name][kept] for name in names], 1).astype(np.float32),
            "event": table["E"][kept].astype(np.float32),
            "time": table["T"][kept].astype(np.float32),
            "train": part == "train",
            "center": center.astype(np.int64),
            "columns": np.array(names),
        }
    }


SETS = (DataSet(
    name="tcga_brca",
    about="breast-cancer patients, 866 and 222, with 39 clinical features and their survival",
    clients="hospitals of 6 regions",
    licence="open-access data of The Cancer Genome Atlas; preprocessing (FLamby) MIT",
    source="https://portal.gdc.cancer.gov/projects/TCGA-BRCA and https://github.com/owkin/FLamby",
    size=15_000,
    made=("tcga_brca/tcga_brca.npz",),
    files=(
        File(
            "tcga_brca/brca.csv", (f"{FROM}brca.csv",),
            "07cb53423f7d579d33cfdbf2cba57b2aee75318b85866c68ce39a75b1f1ba020", 113184,
        ),
        File(
            "tcga_brca/train_test_split.csv", (f"{FROM}dataset_creation_scripts/train_test_split.csv",),
            "1249c6543a4060ff0fdaf8510fc37017755836db6c9fc5e6af96057c36510990", 28946,
        ),
    ),
    convert=convert,
    digest="d52e4e48571347648dd8a39d323d448c2da0a2574d7c19f45633323a24b30332",
),)  # fmt: skip
