"""Tables of patients that come with fedspan: Fed-Heart-Disease and Fed-TCGA-BRCA, with features and splits of FLamby.

`studies/patients/convert.py` made them of the official files.
"""

from __future__ import annotations

from fedspan.data.sets import REINSTALL, DataSet

SETS = (
    DataSet(
        name="heart_disease",
        about="heart patients, 486 and 254, with 13 features and whether they are ill",
        clients="4 hospitals",
        licence="CC BY 4.0 (A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, 1988)",
        source="https://archive.ics.uci.edu/dataset/45/heart+disease",
        size=7_000,
        made=("heart_disease/heart_disease.npz",),
        install=REINSTALL,
    ),
    DataSet(
        name="tcga_brca",
        about="breast-cancer patients, 866 and 222, with 39 clinical features and their survival",
        clients="hospitals of 6 regions",
        licence="open-access data of The Cancer Genome Atlas; preprocessing (FLamby) MIT",
        source="https://portal.gdc.cancer.gov/projects/TCGA-BRCA and https://github.com/owkin/FLamby",
        size=15_000,
        made=("tcga_brca/tcga_brca.npz",),
        install=REINSTALL,
    ),
)
