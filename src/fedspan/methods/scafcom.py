"""SCAFCOM: SCALLION for biased compressors, by momentum in the controls (Huang, Li and Li 2023, arXiv:2308.08165).

     1  send (x, c) to the clients in S
     2  y ← y − η_l (g_i(y) − c_i + c)                      K times, from y = x
     3  v_i ← (1 − β) v_i + β ((x − y)/(η_l K) + c_i − c)
     4  q_i ← C(v_i − c_i);  send q_i
     5  c_i ← c_i + q_i
     6  x ← x − η_g η_l K (c + mean_S q_i)
     7  c ← c + (|S|/N) mean_S q_i                          keeps c = mean_i c_i over ALL clients

C must be contractive, as top-k is. With C = I and β = 1 it is SCAFFOLD.

Differences from the paper: v_i is kept as u_i = v_i − c_i, which is what C compresses. Line 3 is then
u_i ← (1 − β) u_i + β ((x − y)/(η_l K) − c), and line 5 subtracts q_i from it. Clients may have weights w_i; then
c = Σ w_i c_i. After a lost reply the client returns to the c_i and u_i it had. A server can keep a copy of c_i but not
of u_i: a client that loses both continues with its c_i and with v_i = c_i.
"""

from dataclasses import dataclass

from fedspan import Drift, Uplink, register
from fedspan.compressors.topk import TopK
from fedspan.drifts.controls import Controls
from fedspan.methods.box import Box
from fedspan.uplinks.running_mean import RunningMean


@register
@dataclass(frozen=True, kw_only=True)
class Scafcom(Box):
    """Drift correction with contractive compression."""

    drift: Drift = Controls()  # what keeps local steps from drifting
    uplink: Uplink = RunningMean(beta=0.2, compressor=TopK(k=0.1))  # how a client's vector is sent
