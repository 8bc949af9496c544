"""Error feedback: what a code leaves out is kept and added to the next one. The box is in `ef.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Down, Round, ServerState
from fedspan.core.objective import Objective
from fedspan.methods._coded import Coded, Model, Up


@dataclass(frozen=True, eq=False)
class Unsent:
    """What the client has yet to send: d numbers that follow from its data, and that nobody else knows."""

    e: Vector


class Feedback(Coded[ServerState, Unsent, Down]):
    """The client's half of error feedback."""

    needs = "contractive"
    private = ("e",)

    def init_client(self, x0: Vector, layout: Layout) -> Unsent:
        return Unsent(torch.zeros_like(x0))

    def feed_back(self, client: Unsent, x: Vector, f: Objective, rnd: Round) -> tuple[Unsent, Up]:
        """Local steps from x, and the code of their outcome together with what was unsent."""
        u = client.e + self.moved(x, f, rnd)  # 2, 3
        up = Up(self.encode(u, rnd))  # 4
        return self._left(Unsent(u), up, rnd), up

    def settle(self, client: Unsent, down: Down, up: Up, rnd: Round) -> Unsent:
        return self._left(client, up, rnd)

    def _left(self, client: Unsent, up: Up, rnd: Round) -> Unsent:
        return Unsent(client.e - self.decode(up.q, rnd))  # 5


class ErrorFeedback(Feedback[Model, Model]):
    """Error feedback whole."""

    def init_server(self, x0: Vector, layout: Layout) -> Model:
        return Model(x0)

    def broadcast(self, server: Model, rnd: Round) -> Model:
        return server  # 1

    def client_step(self, client: Unsent, down: Model, f: Objective, rnd: Round) -> tuple[Unsent, Up]:
        return self.feed_back(client, down.x, f, rnd)  # 2 to 5

    def server_step(self, server: Model, up: Up, rnd: Round) -> Model:
        return Model(server.x - self.server_lr * rnd.mean(self.decode(up.q, rnd)))  # 6
