"""A plan's model from its config alone, and methods that train about as many numbers of it.

All methods train the same tensors: LoRA's adapters are on the layers that SSF projects, and what SSF trains in full
LoRA trains in full.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedspan.core import building, registry
from fedspan.core.errors import SpecError, at_least, count_or_ratio, one_of
from fedspan.core.layout import Layout
from fedspan.costs.dry_run import NOWHERE
from fedspan.costs.sketch import Sketch
from fedspan.costs.traffic import AnyMethod, FlatProblem
from fedspan.huggingface.models import own_loss
from fedspan.huggingface.outline import batch_of, outline
from fedspan.nn.projection_rules import layout_of, projection_rules

METHODS = ("ssf", "fedit", "ffalora", "fedavg", "scaffold")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adamw": {"optimizer": {"name": "adamw"}},
}
FINE = 2**20  # shares of a layer's inputs that are told apart


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A Hugging Face model, how it is trained, and by how many clients.

    Args:
        model: The model's directory or its config.json.
        rank: SSF's rank: directions, or a share of a layer's inputs.
        trained: Numbers that SSF and LoRA train. By default as many as LoRA at `lora_rank`.
        lora_rank: LoRA's rank.
        batch_size: Texts per batch.
        length: Tokens per text.
        dtype: The type of the weights; x and what is sent are float32.
        rounds: Number of rounds.
        clients: Number of clients.
        clients_per_round: Clients that take part in a round. None takes all.
        frozen_modules: Patterns of tensors that are neither trained nor sent.
        optimizer: That of local steps: "sgd", "momentum" or "adamw".
        labels: Classes, for a classifier.
        checkpointing: Gradient checkpointing, for all methods.
        recompute: Recomputes outputs of SSF's layers in the backward pass instead of keeping them.
    """

    model: Path
    rank: float | None = None
    trained: int | None = None
    lora_rank: int = 8
    batch_size: int = 16
    length: int = 64
    dtype: str = "float32"
    rounds: int = 100
    clients: int = 10
    clients_per_round: int | None = None
    frozen_modules: tuple[str, ...] = ()
    optimizer: str = "sgd"
    labels: int | None = None
    checkpointing: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.rank is not None and self.trained is not None:
            raise SpecError("`rank` and `trained` both say how much SSF trains; give one of them")
        if self.rank is not None:
            count_or_ratio("rank", self.rank)
        for name in ("lora_rank", "batch_size", "length", "rounds", "clients"):
            at_least(name, getattr(self, name), 1)
        one_of("dtype", self.dtype, DTYPES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.clients_per_round is not None and not 1 <= self.clients_per_round <= self.clients:
            raise SpecError(
                f"`clients_per_round` must be from 1 to the {self.clients} clients, got {self.clients_per_round}"
            )

    def outline(self) -> tuple[FlatProblem, int, Sketch]:
        """(problem, parameters, sketch) of the model, from its config."""
        model = outline(self.model, DTYPES[self.dtype], self.labels, self.checkpointing)
        choices = projection_rules(model, frozen_modules=self.frozen_modules)
        with torch.device(NOWHERE):
            batch = batch_of(model, self.batch_size, self.length)
        kept = model.state_dict().keys()
        buffers = sum(
            b.numel() for name, b in model.named_buffers() if b.is_floating_point() and name in kept
        )
        problem = FlatProblem(layout_of(choices), self.clients, buffers)
        sketch = Sketch(model, choices, own_loss, batch, recompute=self.recompute)
        return problem, sum(p.numel() for p in model.parameters()), sketch


def comparable(
    asked: ModelRequest, layout: Layout, methods: Sequence[str] | None = None
) -> Iterator[tuple[str, AnyMethod]]:
    """Methods by name; those with a rank train about as many numbers as are asked for."""
    if all(block.axis is None for block in layout.blocks):
        raise SpecError(
            "nothing of this model is projected: every large tensor is frozen; freeze less"
        )

    def make(name: str, **more: Any) -> AnyMethod:
        table = {"name": name, "lr": 1.0, **OPTIMIZERS[asked.optimizer], **more}
        return building.build("method", table)  # type: ignore[no-any-return]

    def trained(name: str, rank: int | float) -> int:
        return make(name, rank=rank).footprint(layout).trained

    wanted = asked.trained or (
        trained("fedit", asked.lora_rank) if asked.rank is None else trained("ssf", asked.rank)
    )
    if wanted < (least := trained("ssf", 1)):
        raise SpecError(
            f"`trained` {wanted:,} is too few: rank 1 trains {least:,} here; freeze more"
        )
    for name in methods or METHODS:
        one_of("methods", name, registry.choices("method"))
        known = {field.name for field in dataclasses.fields(registry.choices("method")[name])}
        if "rank" not in known or trained(name, 1) == trained(
            name, 1.0
        ):  # PowerSGD's is that of messages alone
            yield name, make(name)
        elif name == "ssf" and asked.rank is not None:
            yield name, make(name, rank=asked.rank)
        elif make(name, rank=1).footprint(layout).adapters is not None:
            rank = _nearest(lambda r, name=name: trained(name, r), wanted, _largest(layout))  # type: ignore[misc]
            yield name, make(name, rank=rank)
        else:
            share = _nearest(lambda s, name=name: trained(name, s / FINE), wanted, FINE)  # type: ignore[misc]
            yield name, make(name, rank=share / FINE)


def _nearest(trained: Callable[[int], int], wanted: int, most: int) -> int:
    """The rank from 1 to `most` that trains the number nearest to the wanted one."""
    above = bisect.bisect_left(range(1, most), wanted, key=trained) + 1
    return min((max(1, above - 1), above), key=lambda rank: abs(trained(rank) - wanted))


def _largest(layout: Layout) -> int:
    """The largest rank that an adapter may have in every block."""
    return min(min(block.shape[:2]) for block in layout.blocks if block.axis is not None)
