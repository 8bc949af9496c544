"""FedAdagrad: federated averaging with Adagrad on the server (Reddi et al. 2021, arXiv:2003.00295), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  Δ ← mean_S (y_i − x)
     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← v + Δ²                     elementwise, from v = τ²
     6  x ← x + η_g m / (√v + τ)

Lines 4 to 6 are in `fedspan.servers`. As in the paper's experiments, β_1 is 0 by default.
"""

from dataclasses import dataclass

from fedspan import Server, register
from fedspan.methods.box import Box
from fedspan.servers.adagrad import Adagrad


@register
@dataclass(frozen=True, kw_only=True)
class FedAdagrad(Box):
    """v only grows, so that steps only get shorter."""

    server: Server = Adagrad()  # what the server makes of the mean
