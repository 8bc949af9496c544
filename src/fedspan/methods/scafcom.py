"""SCAFCOM: SCALLION for biased compressors, by momentum in the controls (Huang, Li and Li 2023, arXiv:2308.08165).

     1  send (x, c) to the clients in S
     2  y ← y − η_l (g_i(y) − c_i + c)                      K times, from y = x
     3  v_i ← (1 − β) v_i + β ((x − y)/(η_l K) + c_i − c)
     4  q_i ← C(v_i − c_i);  send q_i
     5  c_i ← c_i + q_i
     6  x ← x − η_g η_l K (c + mean_S q_i)
     7  c ← c + (|S|/N) mean_S q_i                          keeps c = mean_i c_i over ALL clients

C must be contractive, as top-k is. With C = I and β = 1 it is SCAFFOLD.

Differences from the paper: v_i is kept as u_i = v_i − c_i, which is what C compresses. Line 3 is then
u_i ← (1 − β) u_i + β ((x − y)/(η_l K) − c), and line 5 subtracts q_i from it. Clients may have weights w_i; then
c = Σ w_i c_i. After a lost reply the client returns to the c_i and u_i it had. A server can keep a copy of c_i but not
of u_i: a client that loses both continues with its c_i and with v_i = c_i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Layout, Objective, Round, Vector, register
from fedspan.core.errors import positive_share
from fedspan.methods._coded import Up
from fedspan.methods._controlled import Controlled, Controls


@dataclass(frozen=True, eq=False)
class ClientState:
    """The client's control, and what its running mean has beyond it."""

    c: Vector
    u: Vector  # v_i − c_i


@register
@dataclass(frozen=True, kw_only=True)
class Scafcom(Controlled[ClientState]):
    """Drift correction with contractive compression."""

    beta: float = 0.2  # β: weight of this round's gradient in the running mean v_i
    needs = "contractive"
    private = ("u",)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_share("beta", self.beta)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState(torch.zeros_like(x0), torch.zeros_like(x0))

    def client_step(
        self, client: ClientState, down: Controls, f: Objective, rnd: Round
    ) -> tuple[ClientState, Up]:
        u = (1 - self.beta) * client.u + self.beta * self.control_change(
            client.c, down, f, rnd
        )  # 2, 3
        up = Up(self.encode(u, rnd))  # 4
        return self.update_client_state(ClientState(client.c, u), down, up, rnd), up

    def update_client_state(
        self, client: ClientState, down: Controls, up: Up, rnd: Round
    ) -> ClientState:
        q = self.decode(up.q, rnd)
        return ClientState(client.c + q, client.u - q)  # 5
