"""FedDyn: federated learning with dynamic regularization (Acar et al. 2021, arXiv:2111.04263), Algorithm 1.

     1  send x to the clients in S
     2  y_i ← argmin f_i(y) − ⟨h_i, y⟩ + (α/2) ‖y − x‖²        K local steps, from y = x
     3  h_i ← h_i − α (y_i − x)                                for i in S
     4  h ← h − α (1/N) Σ_S (y_i − x)                          = mean_i h_i over ALL clients
     5  x ← mean_S y_i − h/α

Differences from the paper: K steps of a local optimizer take the place of the exact minimum, as in the authors' code,
which runs SGD for some epochs. h_i is then not exactly ∇f_i(y_i); where all y_i = x, h_i = ∇f_i(x) all the same. A
server step size η_g is added: x ← x − η_g (x − mean_S y_i + h/α). Clients may have weights w_i; the authors' code has
α/(N w_i) in line 2 and an unweighted mean instead. It reports the test accuracy of mean_S y_i, here that of x is
reported, which is what clients are sent.
"""

from dataclasses import dataclass

from fedspan import Drift, register
from fedspan.drifts.dynamic import Dynamic
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class FedDyn(Box):
    """Local losses whose minima agree in the end."""

    drift: Drift = Dynamic()  # what keeps local steps from drifting
