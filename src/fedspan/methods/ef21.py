"""EF21: clients send compressed changes of an estimate of their gradient (Richtárik et al. 2021, arXiv:2106.05203).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  q_i ← C(D_i/(η_l K) − h_i);  send q_i
     4  h_i ← h_i + q_i
     5  h ← h + (|S|/N) mean_S q_i        keeps h = mean_i h_i over ALL clients
     6  x ← x − γ h,   γ = η_g η_l K

C must be contractive, as top-k is. Differences from the paper: K local steps, whose mean gradient D_i/(η_l K) replaces
∇f_i(x), and h starts at zero. Client sampling is that of EF21-PP (arXiv:2110.03294). Clients may have weights w_i; then
h = Σ w_i h_i. After a lost reply the client returns to the h_i it had, and h does not change.
"""

from dataclasses import dataclass

from fedspan import Uplink, register
from fedspan.methods.box import Box
from fedspan.uplinks.ef21 import EF21 as Estimates  # noqa: N811


@register
@dataclass(frozen=True, kw_only=True)
class EF21(Box):
    """Contractive compression of the change of a gradient estimate."""

    uplink: Uplink = Estimates()  # how a client's vector is sent
