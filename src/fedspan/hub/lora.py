"""LoRA as PEFT has it, on the layers that SSF covers: the client to compare with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from fedspan.core.errors import SpecError
from fedspan.core.extras import needs
from fedspan.nn.cover import Choice
from fedspan.nn.footprint import Client, Optimiser, plain
from fedspan.nn.restricted import Loss


def lora(
    model: nn.Module,
    loss: Loss,
    choices: Sequence[Choice],
    rank: int,
    optimiser: Optimiser = "sgd",
    freeze_a: bool = False,
) -> Client:
    """Local steps of LoRA; with `freeze_a` those of FFA-LoRA. What SSF trains whole is trained whole here, too."""
    needs("nlp", "peft")
    from peft import LoraConfig, get_peft_model

    covered = [c for c in choices if c.how == "covered"]
    for c in covered:
        if rank > min(c.shape[:2]):
            raise SpecError(f"LoRA at rank {rank} is too large for {c.name!r}, {c.shape[0]} × {c.shape[1]}; train less")
    named = dict(model.named_parameters())
    whole = [named[c.name] for c in choices if c.how == "whole"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied and of transposed weights
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=[c.layer for c in covered])
        adapted: Any = get_peft_model(model, config)
    for parameter in whole:
        parameter.requires_grad_(True)
    for name, parameter in adapted.named_parameters():
        if freeze_a and ("lora_A" in name or "lora_embedding_B" in name):  # of a table A and B are turned round
            parameter.requires_grad_(False)
    return plain(adapted, loss, optimiser)
