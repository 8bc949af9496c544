"""What text tasks share: rows of a file, their tokens, and the precision of the model."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedspan.core.errors import DataError, below_one
from fedspan.data import datasets as _datasets
from fedspan.huggingface import checkpoints
from fedspan.huggingface.models import prepare
from fedspan.tasks._module import ModuleTask

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TextTask(ModuleTask):
    """What all text tasks have in common."""

    precision: Literal["full", "bfloat16"] = "full"  # of the weights; x and the controls keep the run's dtype
    gradient_checkpointing: bool = False  # keeps the activations of few layers, and computes the others twice
    dropout: float = 0.0  # replaces the model's own

    def __post_init__(self) -> None:
        below_one("dropout", self.dropout)

    def prepared(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """The model in the precision, and with the checkpointing, of the task."""
        return prepare(model.to(torch.bfloat16 if self.precision == "bfloat16" else dtype), self.gradient_checkpointing)


def file(name: str) -> Path:
    """A text file of the data directory."""
    path = _datasets.folder() / "text" / name
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing; put it there, or set FEDSPAN_DATA to the directory that has it")
    return path


@functools.lru_cache(maxsize=4)
def rows(path: Path) -> list[Row]:
    """The JSON objects of a packed file, one per line."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@functools.lru_cache(maxsize=4)
def sentences(path: Path, place: Path | None, longest: int, which: tuple[int, ...]) -> dict[int, list[int]]:
    """Row of a file → its text as ids with marks of beginning and end, cut to `longest`."""
    texts = [rows(path)[i]["text"] for i in which]
    return dict(zip(which, checkpoints.sentences(place, texts, longest), strict=True))


@functools.lru_cache(maxsize=4)
def running(path: Path, place: Path | None, which: tuple[int, ...]) -> tuple[list[int], dict[int, list[int]]]:
    """The mark of a beginning, and row of a file → its text as ids, uncut and without marks."""
    begin, found = checkpoints.running(place, [rows(path)[i]["text"] for i in which])
    return begin, dict(zip(which, found, strict=True))
