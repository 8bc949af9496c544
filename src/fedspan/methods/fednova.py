"""FedNova: federated averaging of normalized local steps (Wang et al. 2020, arXiv:2007.07481), equation 4 with SGD.

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)             τ_i times, from y = x
     3  d_i ← (x − y_i) / (η_l τ_i)
     4  τ_eff ← Σ_S p_i τ_i            p_i = w_i / Σ_S w_j
     5  x ← x − η_g τ_eff η_l Σ_S p_i d_i

It is FedAvg where all clients take as many steps. Where they do not, as with `epochs` and `training.per_client`, FedAvg
with normalize = false minimizes Σ w_i τ_i f_i, in which a client with many steps counts twice. FedNova minimizes
Σ w_i f_i up to the drift of local steps, which remains.

Differences from the paper: clients send K d_i η_l, with the `local_steps` K of the spec. A server step size η_g, which
is 1 there. With local momentum the paper divides by ‖a_i‖₁, which is larger than τ_i; here it is τ_i. All recipes of
`fedspan.methods.box` normalize by default; this one has the name.
"""

from dataclasses import dataclass

from fedspan import register
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class FedNova(Box):
    """Mean of local directions, whatever the clients' numbers of steps."""
