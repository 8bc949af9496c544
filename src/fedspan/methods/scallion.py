"""SCALLION: SCAFFOLD with compressed changes of the controls (Huang, Li and Li 2023, arXiv:2308.08165), Algorithm 1.

     1  send (x, c) to the clients in S
     2  y ← y − η_l (g_i(y) − c_i + c)              K times, from y = x
     3  δ_i ← α ((x − y)/(η_l K) − c)
     4  q_i ← C(δ_i);  send q_i
     5  c_i ← c_i + q_i
     6  x ← x − η_g η_l K (c + mean_S q_i)
     7  c ← c + (|S|/N) mean_S q_i                  keeps c = mean_i c_i over ALL clients

C must be unbiased, as rand-k, QSGD and natural compression are. By default α is 1/(1 + ω), which shrinks the error of
c_i most: it is multiplied by 1 − 2α + α²(1 + ω) on average. With C = I and α = 1 it is SCAFFOLD.

Differences from the paper: clients may have weights w_i; then c = Σ w_i c_i. After a lost reply the client returns to
the c_i it had, and c does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Compressor, Layout, Objective, Round, Vector, register
from fedspan.compressors.randk import RandK
from fedspan.core.errors import positive_share
from fedspan.methods._coded import Up
from fedspan.methods._controlled import Controlled, Controls

TENTH = RandK(k=0.1)


@dataclass(frozen=True, eq=False)
class ClientState:
    """The client's control."""

    c: Vector


@register
@dataclass(frozen=True, kw_only=True)
class Scallion(Controlled[ClientState]):
    """Drift correction with unbiased compression."""

    compressor: Compressor = TENTH  # C: how uploads are compressed; unbiased
    alpha: float | None = None  # α: step of the controls; none: 1/(1 + ω)
    needs = "unbiased"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            positive_share("alpha", self.alpha)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState(torch.zeros_like(x0))

    def client_step(
        self, client: ClientState, down: Controls, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        delta = self._alpha(rnd) * self.control_change(client.c, down, f, rnd)  # 2, 3
        up = Up(self.encode(delta, rnd))  # 4
        return self.update_client_state(client, down, up, rnd), up

    def update_client_state(
        self, client: ClientState, down: Controls, up: Up, rnd: Round
    ) -> ClientState:
        return ClientState(client.c + self.decode(up.q, rnd))  # 5

    def _alpha(self, rnd: Round) -> float:
        if self.alpha is not None:
            return self.alpha
        return 1 / (1 + (self.compressor.omega(rnd.layout.size) or 0.0))
