"""Momentum and extrapolation on the server, for methods whose rounds move x inside a subspace.

δ is what a round would add to x inside the subspace of P. With `server_momentum` β the server keeps m, d numbers:

     P m ← β P m + δ;   x ← x + Pᵀ P m              outside the subspace m and x stay

What is sent of the round is P m: r numbers, as without momentum. With P = I it is the momentum of FedAvgM.

With `extrapolate`, δ is first multiplied by FedExP's step size (Jhunjhunwala et al. 2023, arXiv:2301.09604), which is
large where the clients disagree: max(1, mean_S ‖Δ_i‖² / (2 ‖mean_S Δ_i‖²)), from the changes Δ_i that the clients sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Round, Vector
from fedspan.core.errors import below_one
from fedspan.core.projector import LinearMap


@dataclass(frozen=True, kw_only=True)
class ServerMomentum:
    """A method whose server can move x with momentum."""

    server_momentum: float = 0.0  # β: momentum of the server inside the subspace
    extrapolate: bool = False  # whether the server's step grows with the disagreement of the clients, as in FedExP

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        below_one("server_momentum", self.server_momentum)

    def no_velocity(self, x0: Vector) -> Vector:
        """m before round 0; empty without momentum."""
        return torch.zeros_like(x0 if self.server_momentum else x0[..., :0])

    def moved_on(self, m: Vector, delta: Vector, P: LinearMap | None = None) -> tuple[Vector, Vector]:
        """(P m, m) after δ; without P for P = I."""
        if not self.server_momentum:
            return delta, m
        before = m if P is None else P @ m
        now = self.server_momentum * before + delta
        return now, now if P is None else m + P.T @ (now - before)

    def stretch(self, changes: Vector, rnd: Round) -> torch.Tensor | float:
        """FedExP's step size for the changes of a cohort, (runs, 1, 1)."""
        if not self.extrapolate:
            return 1.0
        apart, together = rnd.mean((changes * changes).sum(-1, keepdim=True)), rnd.mean(changes)
        size = (together * together).sum(-1, keepdim=True)
        return torch.where(size > 0, apart / (2 * size), torch.ones_like(size)).clamp(min=1.0)
