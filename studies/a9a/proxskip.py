"""SProxSkip and ProxSkip-VR (Malinovsky et al. 2022, arXiv:2207.04338) as their code runs them, and falling steps.

     1  h_i ← h_i + (p/γ) (x − y_i)              with the x of this round and the y_i of the last one
     2  L ~ Geometric(p), common to all
     3  y ← y − γ (g_i(y) − h_i)                 L times, from y = x
     4  x ← mean y_i

With variance reduction γ is lr/6, g_i(y) is ∇f_i(y; ξ) − ∇f_i(w_i; ξ) + ∇f_i(w_i), and w_i ← x with probability q
before line 2. All clients take part. `WilliamYi96/VR-ProxSkip` at b7673ad, main_0002.py.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedspan import Bundle, Layout, Objective, Round, Vector, register
from fedspan.core import seeds
from fedspan.methods.base import LocalSteps
from fedspan.methods.box import Box


@register
@dataclass(frozen=True, kw_only=True)
class ProxSkip(LocalSteps):
    """Local steps that end at random, corrected by shifts."""

    p: float = 0.01  # probability of a communication after a step
    q: float = 0.0  # probability that w_i becomes x; 0: no variance reduction

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0)

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        zero = torch.zeros_like(x0)  # x0 = 0 here
        return Bundle(h=zero, y=zero, w=zero if self.q else None)

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        return Bundle(x=server.x)

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        x, lr = down.x, self.rate(rnd) / (6 if self.q else 1)
        h = client.h + self.p / lr * (x - client.y)  # 1
        w = client.get("w")
        if w is not None:
            coins = seeds.children(seeds.keys(rnd.seeds, "renew", rnd.t)[:, None], rnd.ids)
            renewed = torch.from_numpy(seeds.uniform(coins, 1) < self.q)
            w = torch.where(renewed, x, w)
            full = f.full_grad(w)
        (u,) = seeds.uniform(seeds.keys(rnd.seeds[:1], "steps", rnd.t), 1)[0]
        steps = int(np.ceil(np.log(u) / np.log1p(-self.p)))  # 2
        y = x.expand_as(h).clone()
        for _ in range(steps):
            if w is None:
                g = f.grad(y)
            else:
                here, there = f.grads(y, w)  # type: ignore[attr-defined]  # of the task beside this file
                g = here - there + full
            y -= lr * (g - h)  # 3
        return client.replace(h=h, y=y, w=w), Bundle(y=y)

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return server.replace(x=rnd.mean(up.y))  # 4


@register
@dataclass(frozen=True, kw_only=True)
class FallingSteps(Box):
    """FedAvg, or SCAFFOLD with `drift = "controls"`, whose step size is 1/(1/η + K γ t) in round t."""

    fall: float = 0.0  # γ

    def rate(self, rnd: Round) -> float:
        return 1 / (1 / super().rate(rnd) + self.local_steps * self.fall * rnd.t)
