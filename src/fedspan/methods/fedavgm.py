"""FedAvgM: federated averaging with momentum on the server (Hsu et al. 2019, arXiv:1909.06335).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  m ← β m + mean_S (y_i − x)
     4  x ← x + η_g m

Lines 1 and 2 are those of the whole family and are in `_averaging`. In Reddi et al. (2021, arXiv:2003.00295) it is the
member of FedOpt whose server is SGD with momentum. β = 0 is FedAvg; in the long run a step goes 1/(1 − β) times as far
as one of FedAvg.

Differences from the paper: a server step size η_g, which is 1 there. β is `server_momentum`; `momentum` is that of the
local steps. A round without replies does not change x and m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Layout, Round, Vector, register
from fedspan.core.errors import below_one
from fedspan.methods._averaging import Averaging, ServerState, Up


@register
@dataclass(frozen=True, kw_only=True)
class FedAvgM(Averaging):
    """Momentum on the server."""

    uses_mean_only = True
    server_momentum: float = 0.9  # β: momentum of the server

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one("server_momentum", self.server_momentum)

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, torch.zeros_like(x0))

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        assert server.m is not None
        m = (self.server_momentum * server.m).add_(rnd.mean(up.dy))  # 3
        return ServerState((self.server_lr * m).add_(server.x), m)  # 4
