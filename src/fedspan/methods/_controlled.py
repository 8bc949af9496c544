"""SCAFFOLD's local steps and server with compressed changes of the controls: what SCALLION and SCAFCOM share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedspan import Layout, Objective, Restorable, Round, Vector
from fedspan.core.method import ClientState
from fedspan.methods._coded import Coded, Up


@dataclass(frozen=True, eq=False)
class Controls:
    """2d numbers: the model and the mean of all controls, as the server holds and sends them."""

    x: Vector
    c: Vector


class Controlled(Coded[Controls, ClientState, Controls], Restorable[ClientState, Controls, Up]):
    """A method whose clients send a compressed change of their control."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.only_plain(
            "its controls are mean gradients, which follow from the end point of plain steps only"
        )

    @property
    def follows_states(self) -> bool:
        """c = mean c_i."""
        return True

    def init_server(self, x0: Vector, layout: Layout) -> Controls:
        return Controls(x0, torch.zeros_like(x0))

    def broadcast(self, server: Controls, rnd: Round) -> Controls:
        return server

    def control_change(self, c_i: Vector, down: Controls, f: Objective, rnd: Round) -> Vector:
        """(x − y)/(η_l K) − c after K steps along g_i − c_i + c: what SCAFFOLD adds to c_i."""
        total = self.moved(down.x, f, rnd, plus=down.c - c_i)
        return total / (self.rate(rnd) * self.local_steps) - down.c

    def server_step(self, server: Controls, up: Up, rnd: Round) -> Controls:
        x, c, mean_q = server.x, server.c, rnd.mean(self.decode(up.q, rnd))
        x = x - self.server_lr * self.rate(rnd) * self.local_steps * (c + mean_q)
        return Controls(x, c + rnd.share * mean_q)
