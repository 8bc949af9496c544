"""LoRA as PEFT trains it, on the layers that fedspan projects: the step that SSF's memory is compared with."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.extras import needs
from fedspan.core.method import Footprint
from fedspan.nn.projection_rules import ProjectionRule

Loss = Callable[[nn.Module], torch.Tensor]
Step = Callable[[], None]
RATE = 1e-6  # of the steps; nothing depends on it


def lora(
    model: nn.Module, loss: Loss, choices: Sequence[ProjectionRule], footprint: Footprint
) -> tuple[Step, nn.Module, int]:
    """(a local step, the model with adapters, numbers trained) of a method that declares adapters."""
    adapted = with_adapters(model, choices, footprint)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return (
        stepper(adapted, loss, round(footprint.optimizer / max(1, footprint.trained))),
        adapted,
        trained,
    )


def with_adapters(
    model: nn.Module, choices: Sequence[ProjectionRule], footprint: Footprint
) -> nn.Module:
    """The model with PEFT's adapters on its fused layers; other trained tensors stay trained."""
    assert footprint.ranks is not None
    needs("nlp", "peft")
    from peft import LoraConfig, get_peft_model

    ranks = {c.layer: footprint.ranks[c.name] for c in choices if c.how == "fused"}
    layers: dict[
        int, list[str]
    ] = {}  # of each rank: PEFT tries one pattern after the other, so few are quick
    for layer, rank in ranks.items():
        layers.setdefault(rank, []).append(re.escape(layer))
    patterns = {f"^({'|'.join(names)})": rank for rank, names in layers.items()}
    named = dict(model.named_parameters())
    full = [named[c.name] for c in choices if c.how == "full"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied and of transposed weights
        config = LoraConfig(
            rank_pattern=patterns, alpha_pattern=patterns, target_modules=list(ranks)
        )
        adapted: Any = get_peft_model(model, config)
    for parameter in full:
        parameter.requires_grad_(True)
    for name, parameter in adapted.named_parameters():
        if not footprint.train_a and (
            "lora_A" in name or "lora_embedding_B" in name
        ):  # an embedding's A is named B
            parameter.requires_grad_(False)
    return adapted  # type: ignore[no-any-return]


def stepper(model: nn.Module, loss: Loss, states: int = 0) -> Step:
    """A step of torch's own optimizer with so many numbers per trained one: SGD, with momentum, or AdamW."""
    kinds: dict[int, Any] = {
        0: (torch.optim.SGD, {}),
        1: (torch.optim.SGD, {"momentum": 0.9}),
        2: (torch.optim.AdamW, {}),
    }
    if states not in kinds:
        raise SpecError(
            f"an optimizer that keeps {states} numbers per trained one has no counterpart in torch"
        )
    kind, more = kinds[states]
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=RATE, **more)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step
