"""Banking77: questions of a bank's customers and what they are about. Labels number the intents in ASCII order."""

from __future__ import annotations

import csv

from fedspan.data.sets import REINSTALL, DataSet, Files
from fedspan.data.store import Contents, files_of

LICENCE, PAGE = "CC BY 4.0", "https://github.com/PolyAI-LDN/task-specific-datasets"
FROM = "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/57ec275d8078af65b7731c2a98be812d844a6d6b/"


def convert(files: Files) -> Contents:
    """Rows of the official .csv files."""
    found = {}
    for part in ("train", "test"):
        with files[f"banking77/{part}.csv"].open(encoding="utf-8", newline="") as file:
            found[part] = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    known = sorted({intent for rows in found.values() for _, intent in rows})
    return {
        f"text/banking77_{part}.jsonl.gz": [
            {"text": text, "label": known.index(intent), "intent": intent} for text, intent in rows
        ]
        for part, rows in found.items()
    }


SETS = (
    DataSet(
        name="banking77",
        about="10,003 and 3,080 questions of a bank's customers, 77 intents",
        licence=LICENCE,
        source=PAGE,
        size=216_000,
        made=("text/banking77_train.jsonl.gz", "text/banking77_test.jsonl.gz"),
        files=files_of(
            "banking77",
            (f"{FROM}banking_data/",),
            {
                "train.csv": ("b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b", 839073),
                "test.csv": ("d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d", 239961),
            },
        ),
        convert=convert,
        digest="438503d64c3eb6d89e83b080536abb3d284543855d265df859e66eb30c1ddcce",
    ),
    DataSet(
        name="banking77_mini",
        about="20 training and 5 test questions of each of the first 5 intents of Banking77",
        licence=LICENCE,
        source=PAGE,
        size=4_000,
        made=("text/banking77_mini_train.jsonl.gz", "text/banking77_mini_test.jsonl.gz"),
        install=REINSTALL,
    ),
)  # fmt: skip
