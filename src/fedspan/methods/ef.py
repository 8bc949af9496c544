"""Error feedback: what a code left out is added to the next one (Stich et al. 2018, arXiv:1809.07599).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  u ← e_i + D_i
     4  q_i ← C(u);  send q_i
     5  e_i ← u − q_i
     6  x ← x − η_g mean_S q_i

C must be contractive, as top-k is. Differences from the paper: K local steps, client sampling and a server step η_g.
A client that is not in S keeps e_i until it is. A reply that is lost has not happened: the client goes back to the e_i
it had before, and the D_i of that round is lost as it is in FedAvg. e_i follows from the client's data, so that no
server can keep a copy of it; a client that loses it goes on from zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.core.registry import register
from fedspan.methods._feedback import ErrorFeedback


@register
@dataclass(frozen=True, kw_only=True)
class EF(ErrorFeedback):
    """Compressed averaging in which nothing is lost for good; top-k by default."""
