"""FedProx: federated averaging with a pull back to the server's model (Li et al. 2020, arXiv:1812.06127), Algorithm 2.

     1  send x to the clients in S
     2  y ← y − η_l (g_i(y) + μ (y − x))     K times, from y = x
     3  x ← x + η_g mean_S (y_i − x)

Line 2 is gradient descent on f_i(y) + (μ/2) ‖y − x‖². μ = 0 is FedAvg.

Differences from the paper: there each client solves its subproblem to an accuracy of its own, with any solver; here all
take K steps. There clients are sampled by weight and averaged uniformly; here they are sampled uniformly and averaged
by weight. A server step size η_g is added, which is 1 there.
"""

from dataclasses import dataclass

from fedspan import Drift, register
from fedspan.drifts.proximal import Proximal
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class FedProx(Box):
    """Local steps that stay near the server's model."""

    drift: Drift = Proximal(mu=0.1)  # what keeps local steps from drifting
