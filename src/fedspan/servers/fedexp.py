"""FedExP: a step that grows with the disagreement of the clients (Jhunjhunwala et al. 2023, arXiv:2301.09604).

The mean direction is multiplied by max(1, mean_S ‖Δ_i‖² / (2 ‖mean_S Δ_i‖²)), from the direction Δ_i of each client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedspan import Round, Server, Vector, register
from fedspan.core.axes import Parts
from fedspan.core.bundle import Bundle
from fedspan.core.errors import positive
from fedspan.core.linear_map import LinearMap


@register
@dataclass(frozen=True)
class FedExP(Server):
    """An extrapolated step."""

    lr: float = 1.0  # η_g: step size of the server
    needs_each_reply = True

    def __post_init__(self) -> None:
        positive("lr", self.lr)

    def step(
        self,
        server: Bundle,
        direction: Vector,
        P: LinearMap,
        rnd: Round,
        each: Callable[[], Vector],
    ) -> tuple[Vector, Parts]:
        changes = each()
        apart = rnd.mean((changes * changes).sum(-1, keepdim=True))
        together = rnd.mean(changes)
        size = (together * together).sum(-1, keepdim=True)
        factor = torch.where(size > 0, apart / (2 * size), torch.ones_like(size)).clamp(min=1.0)
        return self.lr * direction * factor, {}
