"""LoRA as PEFT has it, on the layers that SSF covers: the client to compare with."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fedspan.core.extras import needs
from fedspan.costs.memory import Client, OptimizerName, plain
from fedspan.nn.module import Loss
from fedspan.nn.projection_rules import ProjectionRule


def lora(
    model: nn.Module,
    loss: Loss,
    choices: Sequence[ProjectionRule],
    rank: int | Mapping[str, int],
    optimizer: OptimizerName = "sgd",
    freeze_a: bool = False,
) -> Client:
    """Local steps of LoRA, at one rank or at one for each layer; with `freeze_a` those of FFA-LoRA.

    What SSF trains whole is trained whole here, too.
    """
    needs("nlp", "peft")
    from peft import LoraConfig, get_peft_model

    covered = [c.layer for c in choices if c.how == "fused"]
    layers: dict[int, list[str]] = {}  # of each rank: PEFT tries one pattern after the other, so few are quick
    for layer in covered:
        layers.setdefault(rank if isinstance(rank, int) else rank[layer], []).append(re.escape(layer))
    patterns = {f"^({'|'.join(names)})": own for own, names in layers.items()}
    named = dict(model.named_parameters())
    whole = [named[c.name] for c in choices if c.how == "full"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied and of transposed weights
        config = LoraConfig(rank_pattern=patterns, alpha_pattern=patterns, target_modules=covered)
        adapted: Any = get_peft_model(model, config)
    for parameter in whole:
        parameter.requires_grad_(True)
    for name, parameter in adapted.named_parameters():
        if freeze_a and ("lora_A" in name or "lora_embedding_B" in name):  # of a table A and B are turned round
            parameter.requires_grad_(False)
    return plain(adapted, loss, optimizer)
