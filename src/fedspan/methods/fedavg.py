"""FedAvg: federated averaging of plain local steps (McMahan et al. 2017, arXiv:1602.05629).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

Lines 1 and 2 are those of the whole family and are in `_averaging`.

Differences from the paper: a server step size η_g, which is 1 there.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Round, register
from fedspan.methods._averaging import Averaging, ServerState, Up


@register
@dataclass(frozen=True, kw_only=True)
class FedAvg(Averaging):
    """Mean of local models."""

    uses_mean_only = True

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        return ServerState((self.server_lr * rnd.mean(up.dy)).add_(server.x))  # 3
