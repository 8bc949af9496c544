"""What text tasks share: texts as tokens, and the precision of the model."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedspan.core.errors import below_one
from fedspan.core.extras import needs
from fedspan.data import sets
from fedspan.data.datasets import Split
from fedspan.huggingface import checkpoints
from fedspan.huggingface.models import prepare
from fedspan.tasks._module import ModuleTask


@dataclass(frozen=True, kw_only=True)
class TextTask(ModuleTask):
    """What all text tasks have in common."""

    precision: Literal["full", "bfloat16"] = (
        "full"  # of the weights; x and the controls keep the run's dtype
    )
    gradient_checkpointing: bool = (
        False  # keeps the activations of few layers, and computes the others twice
    )
    dropout: float = 0.0  # replaces the model's own

    def __post_init__(self) -> None:
        below_one("dropout", self.dropout)

    def requires(self) -> list[str]:
        """Data sets and models by name."""
        needs("nlp", "transformers")
        named = (self.data, self.model)  # type: ignore[attr-defined]
        return [name for name in named if name in sets.names()]

    def prepared(self, model: nn.Module, dtype: torch.dtype) -> nn.Module:
        """The model in the precision, and with the checkpointing, of the task."""
        return prepare(
            model.to(torch.bfloat16 if self.precision == "bfloat16" else dtype),
            self.gradient_checkpointing,
        )


@functools.lru_cache(maxsize=4)
def sentences(
    texts: Split, place: Path | None, longest: int, which: tuple[int, ...]
) -> dict[int, list[int]]:
    """Row of a data set → its text as ids with marks of beginning and end, cut to `longest`."""
    return dict(
        zip(which, checkpoints.sentences(place, [texts.x[i] for i in which], longest), strict=True)
    )


@functools.lru_cache(maxsize=4)
def running(
    texts: Split, place: Path | None, which: tuple[int, ...]
) -> tuple[list[int], dict[int, list[int]]]:
    """The mark of a beginning, and row of a data set → its text as ids, uncut and without marks."""
    begin, found = checkpoints.running(place, [texts.x[i] for i in which])
    return begin, dict(zip(which, found, strict=True))
