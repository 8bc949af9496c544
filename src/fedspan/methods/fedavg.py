"""FedAvg: federated averaging of plain local steps (McMahan et al. 2017, arXiv:1602.05629).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

It is the box with the default of every axis.

Differences from the paper: a server step size η_g, which is 1 there.
"""

from dataclasses import dataclass

from fedspan import register
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class FedAvg(Box):
    """Mean of local models."""
