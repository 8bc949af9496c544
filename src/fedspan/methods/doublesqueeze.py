"""DoubleSqueeze: error feedback at the clients and again at the server (Tang et al. 2019, arXiv:1905.05957).

     1  send what i lacks of x: the Q of the rounds it missed
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  u ← e_i + D_i
     4  q_i ← C(u);  send q_i
     5  e_i ← u − q_i
     6  w ← E + η_g mean_S q_i
     7  Q ← C(w);  E ← w − Q
     8  x ← x − Q                         at the server, and at each client when it next takes part

C must be contractive, as top-k is. Differences from the paper: K local steps, a server step size η_g, and client
sampling. A client is sent every Q that it missed, each as it was packed, or x in full if that is fewer bytes. A round
without replies has a Q of zeros. After a lost reply the client returns to the e_i it had. As in `ef`, no server can
keep a copy of e_i; a client that loses it continues from zero.
"""

from dataclasses import dataclass

from fedspan import Downlink, Uplink, register
from fedspan.downlinks.coded import Coded
from fedspan.methods.box import Box
from fedspan.uplinks.feedback import Feedback


@register
@dataclass(frozen=True, kw_only=True)
class DoubleSqueeze(Box):
    """Few bytes in both directions; top-k by default."""

    uplink: Uplink = Feedback()  # how a client's vector is sent
    downlink: Downlink = Coded()  # how x is sent
