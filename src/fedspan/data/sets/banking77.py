"""Banking77: questions of a bank's customers and what they are about. Labels number the intents in ASCII order."""

from __future__ import annotations

import csv

from fedspan.data.download import files_of
from fedspan.data.sets import DataSet, Files, Hub, Splits
from fedspan.data.store import Contents

FROM = (
    "https://raw.githubusercontent.com/PolyAI-LDN/task-specific-datasets/57ec275d8078af65b7731c2a98be812d844a6d6b/"
    "banking_data/"
)
HASHES = {
    "train.csv": ("b06e26ac675513959a63135f11b94ea7786ed02da65db93a5650d8838cbc664b", 839073),
    "test.csv": ("d12d6e3bc4c3103966ae786dc435913c0c563dfa328f5a3646d0e62cfeeb474d", 239961),
}


def convert(files: Files) -> Contents:
    """Rows of the official .csv files."""
    found = {}
    for part in ("train", "test"):
        with files[f"banking77/{part}.csv"].open(encoding="utf-8", newline="") as file:
            found[part] = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    return _numbered(found)


def convert_hub(splits: Splits, _: Files) -> Contents:
    """Rows of the hub, whose labels have another order."""
    return _numbered(
        {
            part: [
                (text, columns["label_names"][label])
                for text, label in zip(columns["text"], columns["label"], strict=True)
            ]
            for part, columns in splits.items()
        }
    )


def _numbered(found: dict[str, list[tuple[str, str]]]) -> Contents:
    intents = sorted({intent for rows in found.values() for _, intent in rows})
    return {
        f"text/banking77_{part}.jsonl.gz": [
            {"text": text, "label": intents.index(intent), "intent": intent}
            for text, intent in rows
        ]
        for part, rows in found.items()
    }


SET = DataSet(
    name="banking77",
    about="10,003 and 3,080 questions of a bank's customers, 77 intents",
    clients="none of its own",
    licence="CC BY 4.0",
    source="https://github.com/PolyAI-LDN/task-specific-datasets",
    size=216_000,
    made=("text/banking77_train.jsonl.gz", "text/banking77_test.jsonl.gz"),
    files=files_of("banking77", (FROM,), HASHES),
    convert=convert,
    hub=Hub("PolyAI/banking77", convert_hub, "refs/convert/parquet"),
    digest="438503d64c3eb6d89e83b080536abb3d284543855d265df859e66eb30c1ddcce",
)
