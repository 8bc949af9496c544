"""FedAvg with compressed uploads: any compressor, such as QSGD (FedPAQ, Reisizadeh et al. 2020, arXiv:1909.13014).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  q_i ← C(D_i);  send q_i
     4  x ← x − η_g mean_S q_i

Differences from the paper: a server step size η_g, which is 1 there. What C leaves out is lost, so a biased C such as
top-k leads to a wrong model: use `ef` with it.
"""

from dataclasses import dataclass

from fedspan import Uplink, register
from fedspan.compressors.qsgd import QSGD
from fedspan.methods.box import Box
from fedspan.uplinks.code import Code


@register
@dataclass(frozen=True, kw_only=True)
class Compressed(Box):
    """Mean of compressed local changes."""

    uplink: Uplink = Code(QSGD(bits=4, bucket=512))  # how a client's vector is sent
