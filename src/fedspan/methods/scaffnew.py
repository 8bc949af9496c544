"""Scaffnew: corrected local steps, averaged after a random number of them (Mishchenko et al. 2022, arXiv:2202.09357).

     1  L ← Geometric(p), p = 1/K                  server and clients, from the shared seed; E L = K
     2  y ← y − η_l (g_i(y) − h_i)                 L times, from y = x;  send y
     3  x ← mean_S y_i
     4  h_i ← h_i + (p/η_l) (x − y_i)              x of line 3;  Σ_i h_i = 0

It is ProxSkip with the consensus constraint. With exact gradients and all clients it needs of the order of √κ rounds at
η_l = 1/smoothness and K = √κ, where `scaffold` needs κ. With L = K in each round and all clients it would be
`scaffold`, h_i being c_i − c.

Differences from the paper: there all clients take part. Under sampling it is `tamuna` without masks, with its remarks
about the download and about weights.
"""

from dataclasses import dataclass

from fedspan import register
from fedspan.methods.tamuna import Tamuna


@register
@dataclass(frozen=True, kw_only=True)
class Scaffnew(Tamuna):
    """Corrected local steps of a random number."""

    owners: int | None = None  # s: clients of a round that send each value; None: all of them
