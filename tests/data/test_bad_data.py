"""Data that cannot be used is refused in one line that names the file, the column or the value."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.core.errors import DataError, FedspanError, SpecError
from fedspan.data import columns, images
from fedspan.data.own import OwnData
from fedspan.data.partitions.iid import IID
from fedspan.nn.client_data import as_client_data


def refused(own: OwnData, *words: str) -> None:
    """Reading the data fails in one line with these words."""
    with pytest.raises(FedspanError) as error:
        own.divide("classes", IID(clients=2), 0)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits(kind: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((4, 4), 1000, kind)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match=r"deep\.tif.*8 bits per channel"):
        images.read([tmp_path / "deep.tif"])


def test_a_word_among_many_numbers(tmp_path: Path) -> None:
    cells = [str(i) for i in range(1500)]
    cells[1200] = "high"
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "\n".join(f"{cell},{i % 2}" for i, cell in enumerate(cells)))
    refused(OwnData(path=str(path), target="y"), "'x'", "'high' in row 1201", "`features`")


def test_numbers_written_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(f'{{"x": "{i}.5", "y": {i % 2}}}' for i in range(8)))
    refused(OwnData(path=str(path), target="y"), "'x'", "'0.5' in row 1", "without quotes")
