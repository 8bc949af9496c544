"""Small networks on random classes, as problems."""

from __future__ import annotations

from typing import Any

import torch

from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from support.loops import settings


def network(
    model: torch.nn.Module, clients: int, examples: int, batch: int, shape: tuple[int, ...], apart: float = 0.0,
    **others: Any,
) -> TorchProblem:  # fmt: skip
    """Ten classes of random inputs, whose means are `apart`."""
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(examples, *shape, generator=generator),
            torch.randint(0, 10, (examples,), generator=generator),
        )
        for _ in range(clients)
    ]
    means = apart * torch.randn(10, *shape, generator=generator)
    data = [(inputs + means[targets], targets) for inputs, targets in data]
    sources = [as_client_data(one, "client") for one in data]
    loss = torch.nn.functional.cross_entropy
    return TorchProblem(
        model,
        sources,
        lambda m, b: loss(m(b[0]), b[1]),
        projection_rules(model, min_numel=64),
        settings(batch, torch.float32, **others),
    )
