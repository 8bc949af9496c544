"""FedExP: a server step that grows with the disagreement of the clients (Jhunjhunwala et al. 2023, arXiv:2301.09604).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                                     K times, from y = x;  Δ_i ← x − y
     3  η ← max(1, mean_S ‖Δ_i‖² / (2 ‖mean_S Δ_i‖²))
     4  x ← x − η mean_S Δ_i

Differences from the paper: it adds ε to ‖mean_S Δ_i‖², here the step is η_g where that is 0. It evaluates the mean of
the last two models, because x swings under such steps; here x itself is evaluated. Line 4 has a factor η_g. Clients may
have weights.
"""

from dataclasses import dataclass

from fedspan import Server, register
from fedspan.methods.box import Box
from fedspan.servers.fedexp import FedExP as Extrapolated


@register
@dataclass(frozen=True, kw_only=True)
class FedExP(Box):
    """An extrapolated server step."""

    server: Server = Extrapolated()  # what the server makes of the mean
