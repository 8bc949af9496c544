"""FedAvg with compressed uploads: any compressor, such as QSGD (FedPAQ, Reisizadeh et al. 2020, arXiv:1909.13014).

     1  send x to the clients in S
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  q_i ← C(D_i);  send q_i
     4  x ← x − η_g mean_S q_i

Differences from the paper: a server step η_g, which is 1 there. Nothing is kept of what C leaves out, so a biased C,
such as top-k, leads to a wrong place: use `ef` with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.compressors.qsgd import QSGD
from fedspan.core.compressor import Compressor
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Round
from fedspan.core.objective import Objective
from fedspan.core.registry import register
from fedspan.methods._coded import Coded, Model, Up

FOUR_BITS = QSGD(levels=7, bucket=512)


@dataclass(frozen=True, eq=False)
class ClientState:
    """Clients remember nothing."""


@register
@dataclass(frozen=True, kw_only=True)
class Compressed(Coded[Model, ClientState, Model]):
    """Average of compressed local progress."""

    compressor: Compressor = FOUR_BITS

    def init_server(self, x0: Vector, layout: Layout) -> Model:
        return Model(x0)

    def init_client(self, x0: Vector, layout: Layout) -> ClientState:
        return ClientState()

    def broadcast(self, server: Model, rnd: Round) -> Model:
        return server  # 1

    def client_step(self, client: ClientState, down: Model, f: Objective, rnd: Round) -> tuple[ClientState, Up]:
        return client, Up(self.encode(self.moved(down.x, f, rnd), rnd))  # 2, 3

    def settle(self, client: ClientState, down: Model, up: Up, rnd: Round) -> ClientState:
        return client

    def server_step(self, server: Model, up: Up, rnd: Round) -> Model:
        return Model(server.x - self.server_lr * rnd.mean(self.decode(up.q, rnd)))  # 4
