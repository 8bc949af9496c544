"""SCALLION: SCAFFOLD with compressed changes of the controls (Huang, Li and Li 2023, arXiv:2308.08165), Algorithm 1.

     1  send (x, c) to the clients in S
     2  y ← y − η_l (g_i(y) − c_i + c)              K times, from y = x
     3  δ_i ← α ((x − y)/(η_l K) − c)
     4  q_i ← C(δ_i);  send q_i
     5  c_i ← c_i + q_i
     6  x ← x − η_g η_l K (c + mean_S q_i)
     7  c ← c + (|S|/N) mean_S q_i                  keeps c = mean_i c_i over ALL clients

C must be unbiased, as rand-k and QSGD are. By default α is 1/(1 + ω), which shrinks the error of
c_i most: it is multiplied by 1 − 2α + α²(1 + ω) on average. With C = I and α = 1 it is SCAFFOLD.

Differences from the paper: clients may have weights w_i; then c = Σ w_i c_i. After a lost reply the client returns to
the c_i it had, and c does not change.
"""

from dataclasses import dataclass

from fedspan import Drift, Uplink, register
from fedspan.compressors.randk import RandK
from fedspan.drifts.controls import Controls
from fedspan.methods.box import Box
from fedspan.uplinks.code import Code


@register
@dataclass(frozen=True, kw_only=True)
class Scallion(Box):
    """Drift correction with unbiased compression."""

    drift: Drift = Controls()  # what keeps local steps from drifting
    uplink: Uplink = Code(RandK(k=0.1), alpha="unbiased")  # how a client's vector is sent
