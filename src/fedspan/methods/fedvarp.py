"""FedVARP: SAGA over clients at the server (Jhunjhunwala et al. 2022, arXiv:2207.14130), Algorithm 1.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                         K times, from y = x;  Δ_i ← x − y
     3  v ← mean_S (Δ_i − y_i) + (1/N) Σ_j y_j     over ALL clients j
     4  y_i ← Δ_i                                  for i in S
     5  x ← x − η_g v

The last change of every client stands in for those that are not in the round, which removes the noise of client
sampling. Local steps are not corrected, so x stops at the same distance as with `fedavg` and all clients.

It is `scaffold` with correction = "never": c_i = y_i/(η_l K), clients send a_i = ḡ_i − c_i, and x moves along
c + mean_S a_i.

Differences from the paper: there the server keeps the table of all y_i, N d values; here each client keeps its own c_i,
so the server keeps d values and needs only a sum. c_i is a mean gradient: with a schedule of η_l the paper's y_i has
the η_l of its round, and c_i that of the present one. Clients may have weights w_i; then c = Σ w_i c_i. Clustered
clients (ClusterFedVARP) are not offered.
"""

from dataclasses import dataclass

from fedspan import Drift, register
from fedspan.drifts.controls import Controls
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class FedVARP(Box):
    """Control variates that only the server uses."""

    drift: Drift = Controls(correction="never")  # what the server knows of absent clients
