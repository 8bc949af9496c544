"""Small text data sets of the same form as the real ones, and tasks on them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

QUESTIONS = [
    "my card was lost",
    "where is my money",
    "please close the account",
    "how do I change the code",
]
CLASSIFY: dict[str, Any] = {
    "name": "text_classification",
    "model": "tiny",
    "partition": {"name": "dirichlet", "clients": 4, "alpha": 1.0},
}
SPEAK: dict[str, Any] = {
    "name": "language_model",
    "model": "tiny",
    "min_characters": 300,
    "block": 32,
}


@pytest.fixture(name="data")
def text_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with small files of the same form as the real ones."""
    rng = np.random.default_rng(0)
    (tmp_path / "data/text").mkdir(parents=True)

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        with gzip.open(tmp_path / "data/text" / name, "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)

    for part, n in (("train", 60), ("test", 20)):
        labels = rng.integers(4, size=n).tolist()
        said = [
            " ".join(rng.permutation(QUESTIONS[label].split())) + " thanks" * int(rng.integers(4))
            for label in labels
        ]
        write(
            f"banking77_{part}.jsonl.gz",
            [{"text": t, "label": k} for t, k in zip(said, labels, strict=True)],
        )
    roles = [
        {"client": str(i), "text": "to be or not to be, " * n}
        for i, n in enumerate((30, 20, 5, 16))
    ]
    write("shakespeare_roles.jsonl.gz", roles)
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path / "data"))
    return tmp_path
