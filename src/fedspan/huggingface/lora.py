"""LoRA as PEFT trains it, on the layers that fedspan projects: the step that SSF's memory is compared with."""

import re
import warnings
from collections.abc import Callable, Sequence

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
    step = stepper(adapted, loss, round(footprint.optimizer / max(1, footprint.trained)))
    return step, adapted, sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def with_adapters(
    model: nn.Module, choices: Sequence[ProjectionRule], footprint: Footprint
) -> nn.Module:
    """The model with PEFT's adapters on its fused layers; other trained tensors stay trained."""
    assert footprint.ranks is not None
    needs("nlp", "peft")
    from peft import LoraConfig, get_peft_model

    # PEFT tries one pattern after the other, so one for each rank is quick
    layers: dict[int, list[str]] = {}
    for rule in choices:
        if rule.how == "fused":
            layers.setdefault(footprint.ranks[rule.name], []).append(rule.layer)
    ranks = {f"^({'|'.join(map(re.escape, names))})": rank for rank, names in layers.items()}
    targets = [name for names in layers.values() for name in names]
    full = [model.get_parameter(rule.name) for rule in choices if rule.how == "full"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied and of transposed weights
        config = LoraConfig(rank_pattern=ranks, alpha_pattern=ranks, target_modules=targets)
        adapted: nn.Module = get_peft_model(model, config)
    for parameter in full:
        parameter.requires_grad_(True)
    for name, parameter in adapted.named_parameters():
        a = "lora_A" in name or "lora_embedding_B" in name  # an embedding's A is named B
        if a and not footprint.train_a:
            parameter.requires_grad_(False)
    return adapted


def stepper(model: nn.Module, loss: Loss, states: int = 0) -> Step:
    """A step of torch's own optimizer with so many numbers per trained one: SGD, with momentum, or AdamW."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if states not in (0, 1, 2):
        raise SpecError(
            f"an optimizer that keeps {states} numbers per trained one has no counterpart in torch"
        )
    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    optimizer = adamw(trained, RATE) if states == 2 else sgd(trained, RATE, momentum=0.9 * states)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step
