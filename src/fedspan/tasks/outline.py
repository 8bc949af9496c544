"""The shapes of a Hugging Face model, from its config.json alone: what `fedspan plan` needs, and no data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import torch

from fedspan.core.config import Participation, Settings
from fedspan.core.errors import SpecError, at_least
from fedspan.core.registry import register
from fedspan.core.task import Task
from fedspan.huggingface.checkpoints import batch_of, outline
from fedspan.huggingface.models import own_loss
from fedspan.nn.batches import Tensors
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules


@register
@dataclass(frozen=True, kw_only=True)
class Outline(Task):
    """A model without weights and clients without texts, to plan a run before anything is downloaded."""

    model: str  # the model's directory or its config.json
    clients: int = 10  # number of clients
    length: int = 64  # tokens of a text
    labels: int | None = None  # classes, for a classifier
    precision: Literal["full", "bfloat16"] = "full"  # of the weights; x keeps the run's dtype
    gradient_checkpointing: bool = False  # computes most activations twice

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        at_least("length", self.length, 1)

    def build(self, seeds: tuple[int, ...], settings: Settings) -> NoReturn:
        """Refuse: there is nothing to train on."""
        raise SpecError(
            "the task 'outline' has the shapes of a model and no data; it can be planned, not run"
        )

    def shapes(self, settings: Settings) -> TorchProblem:
        """Return the problem on torch's meta device; every client has one batch of the longest texts."""
        dtype = torch.bfloat16 if self.precision == "bfloat16" else settings.torch_dtype
        model = outline(Path(self.model), dtype, self.labels, self.gradient_checkpointing)
        rules = projection_rules(model, **vars(settings.projection))
        if settings.batch_size == "full":
            raise SpecError("`batch_size` is 'full', but an outline has no texts; give a number")
        with torch.device("meta"):
            batch = Tensors(batch_of(model, settings.examples_per_batch, self.length))
        own = Settings(
            batch_size=settings.batch_size,
            device="meta",
            training=settings.training,
            participation=Participation(weights="uniform"),
            engine=settings.engine,
        )
        return TorchProblem(model, [batch] * self.clients, own_loss, rules, own, on_client=True)
