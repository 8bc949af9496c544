"""FedSMU: clients send signs of a momentum of their changes (Lu et al., ICML 2025, PMLR 267:40903).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                          K times, from y = x;  D_i ← x − y
     3  u_i ← sign(β₁ m_i + (1 − β₁) D_i);  send u_i                         d bits
     4  m_i ← β₂ m_i + (1 − β₂) D_i
     5  x ← x − γ₁ (mean_S u_i + γ₂ x)

Lines 3 and 4 are `uplink`, line 5 is `server`: γ₁ is its `lr`, γ₂ its `decay`.

Differences from the paper: K local steps in place of one epoch. Its code multiplies γ₁ by a factor after every round;
here γ₁ is constant. There an entry of zero, such as that of a dead unit, is sent as zero, which does not fit into a
bit; here it is +1 or −1 at random. Clients may have weights. A client that is not in S keeps m_i, as in its code; one
that loses m_i continues from zero.
"""

from dataclasses import dataclass

from fedspan import Server, Uplink, register
from fedspan.methods.box import Box
from fedspan.servers.decay import Decay
from fedspan.uplinks.sign_momentum import SignMomentum


@register
@dataclass(frozen=True, kw_only=True)
class FedSMU(Box):
    """One bit per parameter, and as much say for every client."""

    uplink: Uplink = SignMomentum()  # how a client's vector is sent
    server: Server = Decay()  # what the server makes of the mean
