"""Fed-TCGA-BRCA, which comes with fedspan: 15 kB of unrestricted clinical data, as FLamby preprocessed them."""

from __future__ import annotations

import csv

import numpy as np

from fedspan.data.download import File
from fedspan.data.sets import DataSet, Files
from fedspan.data.store import Contents

FROM = (
    "https://raw.githubusercontent.com/owkin/FLamby/edacf54d5211520583b0133d55ac39b6fda8324b/"
    "flamby/datasets/fed_tcga_brca/"
)
PATIENT, EVENT, TIME = "pid", "E", "T"


def convert(files: Files) -> Contents:
    """The patients that are in FLamby's split, in the order of its table; their identifiers are left out."""
    with files["tcga_brca/train_test_split.csv"].open(encoding="utf-8", newline="") as file:
        folds = {
            row[PATIENT]: row["fold2"].split("_") for row in csv.DictReader(file)
        }  # such as train_0
    with files["tcga_brca/brca.csv"].open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row[PATIENT] in folds]
    columns = [name for name in rows[0] if name not in (PATIENT, EVENT, TIME)]
    return {
        "tcga_brca/tcga_brca.npz": {
            "x": np.array([[row[name] for name in columns] for row in rows]).astype(np.float32),
            "event": np.array([row[EVENT] for row in rows]).astype(np.float32),
            "time": np.array([row[TIME] for row in rows]).astype(np.float32),
            "train": np.array([folds[row[PATIENT]][0] == "train" for row in rows]),
            "center": np.array([folds[row[PATIENT]][1] for row in rows]).astype(np.int64),
            "columns": np.array(columns),
        }
    }


SET = DataSet(
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
)  # fmt: skip
