"""DoubleSqueeze: error feedback at the clients and again at the server (Tang et al. 2019, arXiv:1905.05957).

     1  send what i lacks of x: the Q of the rounds it missed
     2  y ← y − η_l g_i(y)                K times, from y = x;  D_i ← x − y
     3  u ← e_i + D_i
     4  q_i ← C(u);  send q_i
     5  e_i ← u − q_i
     6  w ← E + mean_S q_i
     7  Q ← C(w);  E ← w − Q
     8  x ← x − η_g Q                     at the server, and at each client when it next takes part

C must be contractive, as top-k is. Differences from the paper: K local steps, a server step size η_g, and client
sampling. A client is sent every Q that it missed, each as it was packed, or x in full if that is fewer bytes. A round
without replies has a Q of zeros. After a lost reply the client returns to the e_i it had. As in `ef`, no server can
keep a copy of e_i; a client that loses it continues from zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedspan import (
    Encoded,
    Layout,
    Log,
    LogsChanges,
    ModelSync,
    Objective,
    Round,
    SyncedDown,
    Vector,
    register,
)
from fedspan.core.sync import bytes_of
from fedspan.methods._coded import Up
from fedspan.methods._feedback import Feedback, Unsent


@dataclass(frozen=True, eq=False)
class ServerState:
    """The model, what the server has not sent yet, and the compressed changes of the last rounds."""

    x: Vector
    e: Vector  # E
    log: Log


@register
@dataclass(frozen=True, kw_only=True)
class DoubleSqueeze(Feedback[ServerState, SyncedDown], LogsChanges[ServerState]):
    """Few bytes in both directions."""

    def init_server(self, x0: Vector, layout: Layout) -> ServerState:
        return ServerState(x0, torch.zeros_like(x0), Log())

    def broadcast(self, server: ServerState, rnd: Round) -> SyncedDown:
        return SyncedDown(ModelSync.of(server.x, server.log, rnd))  # 1

    def client_step(
        self, client: Unsent, down: SyncedDown, f: Objective, rnd: Round
    ) -> tuple[Unsent, Up]:
        return self.feed_back(client, down.sync.model, f, rnd)  # 2 to 5

    def server_step(self, server: ServerState, up: Up, rnd: Round) -> ServerState:
        w = server.e + rnd.mean(self.decode(up.q, rnd))  # 6
        Q = self.compressor.compress(w, self.compressor.server_keys(rnd))  # 7
        sent = self._opened(Q, rnd)
        return ServerState(
            server.x - self.server_lr * sent, w - sent, self._push(server, Q)
        )  # 8, 7

    def empty_round(self, server: ServerState, rnd: Round) -> ServerState:
        nothing = self.compressor.compress(
            torch.zeros_like(server.x), self.compressor.server_keys(rnd)
        )
        return replace(server, log=self._push(server, nothing))

    def expand_entry(self, entry: Encoded, rnd: Round) -> Vector:
        """−η_g Q."""
        return -self.server_lr * self._opened(entry, rnd)

    def _opened(self, Q: Encoded, rnd: Round) -> Vector:
        return self.compressor.decompress(
            Q, rnd.layout.size, self.compressor.server_keys(rnd), rnd.layout.dtype
        )

    def _push(self, server: ServerState, Q: Encoded) -> Log:
        """The log with this round's Q, and as many before it as are cheaper than x."""
        return server.log.push(Q, max(1, bytes_of(server.x) // Q.bytes))
