"""Fed-TCGA-BRCA, which comes with fedspan: 15 kB of unrestricted clinical data, as FLamby preprocessed them."""

from __future__ import annotations

from fedspan.data.sets import DataSet

SET = DataSet(
    name="tcga_brca",
    about="breast-cancer patients, 866 and 222, with 39 clinical features and their survival",
    clients="hospitals of 6 regions",
    licence="open-access data of The Cancer Genome Atlas; preprocessing (FLamby) MIT",
    source="https://portal.gdc.cancer.gov/projects/TCGA-BRCA and https://github.com/owkin/FLamby",
    size=15_000,
    made=("tcga_brca/tcga_brca.npz",),
)
