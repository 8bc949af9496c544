"""FedAvg with compressed uploads: any compressor, such as QSGD (FedPAQ, Reisizadeh et al. 2020, arXiv:1909.13014).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  q_i ← C(D_i);  send q_i
     4  x ← x − η_g mean_S q_i

Differences from the paper: a server step size η_g, which is 1 there. What C leaves out is lost, so a biased C such as
top-k leads to a wrong model: use `ef` with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan import Compressor, Layout, Objective, Round, Vector, register
from fedspan.compressors.qsgd import QSGD
from fedspan.methods._coded import Coded, Up
from fedspan.methods.base import FullModel, NoState

FOUR_BITS = QSGD(levels=7, bucket=512)


@register
@dataclass(frozen=True, kw_only=True)
class Compressed(Coded[FullModel, NoState, FullModel]):
    """Mean of compressed local changes."""

    compressor: Compressor = FOUR_BITS  # C: how uploads are compressed

    def init_server(self, x0: Vector, layout: Layout) -> FullModel:
        return FullModel(x0)

    def init_client(self, x0: Vector, layout: Layout) -> NoState:
        return NoState()

    def broadcast(self, server: FullModel, rnd: Round) -> FullModel:
        return server  # 1

    def client_step(
        self, client: NoState, down: FullModel, f: Objective, rnd: Round
    ) -> tuple[NoState, Up]:
        return client, Up(self.encode(self.moved(down.x, f, rnd), rnd))  # 2, 3

    def server_step(self, server: FullModel, up: Up, rnd: Round) -> FullModel:
        return FullModel(server.x - self.server_lr * rnd.mean(self.decode(up.q, rnd)))  # 4
