"""FedExP: a step that grows with the disagreement of the clients (Jhunjhunwala et al. 2023, arXiv:2301.09604).

The mean direction is multiplied by max(1, mean_S ‖Δ_i‖² / (2 ‖mean_S Δ_i‖²)), from the direction Δ_i of each client.
"""

from dataclasses import dataclass

import torch

from fedspan import Bundle, LinearMap, Parts, Round, Server, Vector, register


@register
@dataclass(frozen=True)
class FedExP(Server):
    """An extrapolated step."""

    needs_each_reply = True

    def step(
        self, server: Bundle, direction: Vector, P: LinearMap, rnd: Round, each: Vector
    ) -> tuple[Vector, Parts]:
        apart = rnd.mean((each * each).sum(-1, keepdim=True))
        size = rnd.mean(each).square().sum(-1, keepdim=True)
        factor = torch.where(size > 0, apart / (2 * size), torch.ones_like(size)).clamp(min=1.0)
        return self.lr * direction * factor, {}
