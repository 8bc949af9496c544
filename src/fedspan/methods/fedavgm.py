"""FedAvgM: federated averaging with momentum on the server (Hsu et al. 2019, arXiv:1909.06335).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  m ← β m + mean_S (y_i − x)
     4  x ← x + η_g m

In Reddi et al. (2021, arXiv:2003.00295) it is the
member of FedOpt whose server is SGD with momentum. β = 0 is FedAvg; in the long run a step goes 1/(1 − β) times as far
as one of FedAvg.

Differences from the paper: a server step size η_g, which is 1 there. β is that of `server`, not of `local`. A
round without replies does not change x and m.
"""

from dataclasses import dataclass

from fedspan import Server, register
from fedspan.methods.box import Box
from fedspan.servers.momentum import Momentum


@register
@dataclass(frozen=True, kw_only=True)
class FedAvgM(Box):
    """Momentum on the server."""

    server: Server = Momentum(beta=0.9)  # what the server makes of the mean
