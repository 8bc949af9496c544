"""Error feedback: what compression left out is added to the next upload (Stich et al. 2018, arXiv:1809.07599).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  u ← e_i + D_i
     4  q_i ← C(u);  send q_i
     5  e_i ← u − q_i
     6  x ← x − η_g mean_S q_i

C must be contractive, as top-k is. Differences from the paper: K local steps, client sampling and a server step size
η_g. A client that is not in S keeps e_i until it is. After a lost reply the client returns to the e_i it had, and the
D_i of that round is lost as in FedAvg. e_i follows from the client's data, so no server can keep a copy of it; a client
that loses it continues from zero.
"""

from dataclasses import dataclass

from fedspan import Uplink, register
from fedspan.methods.box import Box
from fedspan.uplinks.feedback import Feedback


@register
@dataclass(frozen=True, kw_only=True)
class EF(Box):
    """Compressed averaging in which nothing is lost forever; top-k by default."""

    uplink: Uplink = Feedback()  # how a client's vector is sent
