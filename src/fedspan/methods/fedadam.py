"""FedAdam: federated averaging with Adam on the server (Reddi et al. 2021, arXiv:2003.00295), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  Δ ← mean_S (y_i − x)
     4  m ← β_1 m + (1 − β_1) Δ
     5  v ← β_2 v + (1 − β_2) Δ²       elementwise, from v = τ²
     6  x ← x + η_g m / (√v + τ)

Lines 4 to 6 are in `fedspan.servers`.

Differences from the paper: none known. As in its box, m and v have no bias correction; PyTorch's Adam and Flower's
FedAdam have one.
"""

from dataclasses import dataclass

from fedspan import Server, register
from fedspan.methods.box import Box
from fedspan.servers.adam import Adam


@register
@dataclass(frozen=True, kw_only=True)
class FedAdam(Box):
    """v is an exponential mean of Δ²."""

    server: Server = Adam()  # what the server makes of the mean
