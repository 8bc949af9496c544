"""SubAvg: federated averaging inside the shared random subspace; SSF without its controls, as an ablation.

1  P ← projector(seed, t)                 server and clients
2  send what i lacks of x
3  z ← z − η_l P ∇f_i(x + Pᵀz; ξ)         K times, from z = 0;  send z_i
4  x ← x + η_g Pᵀ mean_S z_i
"""

from dataclasses import dataclass

from fedspan import register
from fedspan.methods.box import InSubspace


@register
@dataclass(frozen=True, kw_only=True)
class SubAvg(InSubspace):
    """r values per message, and no drift correction."""
