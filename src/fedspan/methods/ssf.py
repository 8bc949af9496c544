"""SSF: SCAFFOLD inside a random subspace that all parties draw from a shared seed (arXiv:2604.25467), Algorithm 1.

     1  P ← projector(seed, t)                       server and clients; only the seed is shared
     2  send what i lacks of x, and P c              r numbers each
     3  u ← P c − P c_i;  z ← 0
     4  z ← z − η_l (P ∇f_i(x + Pᵀz; ξ) + u)         K times
     5  a_i ← −z/(η_l K) − P c                       ( = P ḡ_i − P c_i );  send a_i
     6  c_i ← c_i + Pᵀ a_i                           backfill: outside the subspace c_i stays
     7  x ← x − η_g η_l K Pᵀ(P c + mean_S a_i)       backfill of the model
     8  c ← c + (|S|/N) Pᵀ mean_S a_i                keeps c = mean_i c_i over ALL clients

Line 1 is `space`, lines 2 and 7 `downlink`, 3, 6 and 8 `drift`, 4 `local`, 5 `uplink`, and 7 `server`: the box of
`fedspan.methods.box` over the choices below. Line 8' and whether clients correct are settings of `Controls`.

Differences from the paper: its box has no client sampling. Read literally under sampling it is the rule "paper" of
`Controls`, which breaks c = mean c_i. The paper always corrects; here the server decides it by a test. Line 5 is
computed from the copy of P c that the client was sent. Clients may have weights w_i; then c = Σ w_i c_i.
"""

from dataclasses import dataclass

from fedspan import Drift, register
from fedspan.drifts.controls import Controls
from fedspan.methods.box import InSubspace


@register
@dataclass(frozen=True, kw_only=True)
class SSF(InSubspace):
    """Drift correction with r values per message."""

    drift: Drift = Controls(correction="tested")  # what keeps local steps from drifting
