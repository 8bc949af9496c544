"""SparseLoCo: few large values of decaying error feedback, in 2 bits each (Sarfi et al. 2025, arXiv:2508.15706).

     1  send x to the clients in S
     2  y ← K steps of AdamW on f_i, from y = x;  D_i ← x − y
     3  e_i ← β e_i + D_i
     4  q_i ← Q(top-k(e_i));  send q_i            the k largest of each chunk of 4096 values
     5  e_i ← e_i − q_i
     6  x ← x − η_g mean_S q_i

e_i takes the place of the server's momentum in DiLoCo: a value that is not sent grows until it is, and fades by β.

Differences from the paper: client sampling. There chunks are 64 × 64 blocks of a matrix, here 4096 consecutive values
of the flat vector. In the authors' code Q has equal bins over ±3 standard deviations, and each value becomes the mean
of its bin; here the bins are the sign and whether |v| is above the mean, because the largest values are not near zero.
There the means of the clients that sent a value are taken value by value; in the paper and here, sums are divided by S.
η_g is 1 there as well. AdamW keeps its moments from round to round.
"""

from dataclasses import dataclass

from fedspan import Optimizer, Uplink, register
from fedspan.compressors.compose import Compose
from fedspan.compressors.sign import Sign
from fedspan.compressors.topk import TopK
from fedspan.methods.box import Box
from fedspan.optimizers.adamw import AdamW
from fedspan.uplinks.feedback import Feedback


@register
@dataclass(frozen=True, kw_only=True)
class SparseLoCo(Box):
    """About 14 bits for each of 2 % of the values."""

    local: Optimizer = AdamW(moments="project")  # optimizer of the local steps
    uplink: Uplink = Feedback(  # how a client's vector is sent
        Compose(outer=Sign(sizes=2, bucket=4096), inner=TopK(k=0.02, chunk=4096)), decay=0.95
    )
