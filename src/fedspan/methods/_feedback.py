"""Error feedback: what compression leaves out is kept and added to the next upload. The box is in `ef.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Layout, Objective, Restorable, Round, Vector
from fedspan.core.method import Down, ServerState
from fedspan.methods._coded import Coded, Up
from fedspan.methods.base import FullModel


@dataclass(frozen=True, eq=False)
class Unsent:
    """What the client has not sent yet: d numbers that follow from its data and that nobody else knows."""

    e: Vector


class Feedback(Coded[ServerState, Unsent, Down], Restorable[Unsent, Down, Up]):
    """The client's half of error feedback."""

    needs = "contractive"
    private = ("e",)

    def init_client(self, x0: Vector, layout: Layout) -> Unsent:
        return Unsent(torch.zeros_like(x0))

    def feed_back(self, client: Unsent, x: Vector, f: Objective, rnd: Round) -> tuple[Unsent, Up]:
        """Local steps from x, and their outcome compressed together with what was not sent before."""
        u = client.e + self.moved(x, f, rnd)  # 2, 3
        up = Up(self.encode(u, rnd))  # 4
        return Unsent(u - self.decode(up.q, rnd)), up  # 5

    def update_client_state(self, client: Unsent, down: Down, up: Up, rnd: Round) -> Unsent:
        return Unsent(client.e - self.decode(up.q, rnd))  # 5


class ErrorFeedback(Feedback[FullModel, FullModel]):
    """Error feedback at the clients; the server sends the model in full."""

    def init_server(self, x0: Vector, layout: Layout) -> FullModel:
        return FullModel(x0)

    def broadcast(self, server: FullModel, rnd: Round) -> FullModel:
        return server  # 1

    def client_step(
        self, client: Unsent, down: FullModel, f: Objective, rnd: Round
    ) -> tuple[Unsent, Up]:
        return self.feed_back(client, down.x, f, rnd)  # 2 to 5

    def server_step(self, server: FullModel, up: Up, rnd: Round) -> FullModel:
        return FullModel(server.x - self.server_lr * rnd.mean(self.decode(up.q, rnd)))  # 6
