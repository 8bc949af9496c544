"""What text tasks share: the precision of the model, and its checkpointing."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fedspan.core.errors import below_one
from fedspan.core.extras import needs
from fedspan.data import sets
from fedspan.huggingface import checkpoints
from fedspan.huggingface.models import prepare
from fedspan.tasks._module import ModuleTask


@dataclass(frozen=True, kw_only=True)
class TextTask(ModuleTask):
    """What all text tasks have in common."""

    data: Any
    model: str
    precision: Literal["full", "bfloat16"] = "full"  # of the weights; x keeps the run's dtype
    gradient_checkpointing: bool = False  # keep few activations, and compute the others twice
    dropout: float = 0.0  # replaces the model's own

    def __post_init__(self) -> None:
        below_one("dropout", self.dropout)

    def requires(self) -> list[str]:
        """Data sets and models by name."""
        needs("nlp", "transformers")
        return [name for name in (self.data, self.model) if name in sets.names()]

    def load(
        self, kind: checkpoints.ModelKind, seed: int, dtype: torch.dtype, **settings: Any
    ) -> nn.Module:
        """The model in the precision, and with the checkpointing, of the task."""
        model = checkpoints.load_model(self.model, kind, seed, self.dropout, **settings)
        model = model.to(torch.bfloat16 if self.precision == "bfloat16" else dtype)
        return prepare(model, self.gradient_checkpointing)
