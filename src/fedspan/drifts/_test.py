"""Whether clients correct their local steps with controls, decided by a test.

v = P c_i − P c is what client i subtracts from its gradients. On some networks a client's deviation along v vanishes
after its first step, and the constant correction pushes on for K − 1 steps. With correction = "tested" clients measure
this, and the server switches the correction of the local steps:

     1  h_i ← mean of P g_i over the steps 2 … K;  D_i ← ‖v‖² + ‖P ḡ_i − P c‖²
     2  n_i ← ⟨v, h_i − P c⟩ / D_i,  d_i ← ‖v‖² / D_i  in the reply, n_i cut to ±½; 0 while P c_i = 0
     3  s ← Σ n_i / Σ d_i, between 0 and 1              at the server, while the correction is on or on trial
     4  s̄ ← s̄ + 3/(k + 2) (s − s̄)                      k: tests since the trial began
     5  on if s̄ > ½; otherwise off, and on trial again at twice this round

Where no n_i is cut, Σ‖h_i − P c − v‖²/D_i < Σ‖h_i − P c‖²/D_i exactly if s > ½: the correction stays while it predicts
the deviations of the clients, relative to their size, better than no correction does. d_i is between 0 and 1, and n_i
is cut to ±½, which it reaches where h_i = P ḡ_i = P c + v. So the unit of the loss does not matter, and no client
counts for much more than another, whatever it sends.

The correction is off until the controls are filled, after 2 N/(ρ S) rounds, and then on trial. In a trial each client
corrects with probability 1/4, drawn from the shared seed, and only those are tested: a trial that fails costs little.
Clients compute c_i from their gradients alone, so c = mean c_i holds in every phase.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import numpy as np
import torch

from fedspan import Round, Vector
from fedspan.core import seeds
from fedspan.core.bundle import Bundle
from fedspan.core.objective import Direction, InPlaceDirection, SteppingDirection

OFF, ON, TRIAL = 0, 1, 2
RANGES = ((-0.5, 0.5), (0.0, 1.0))  # of n_i and d_i
SHARE = 0.25  # of the clients that correct in a trial


class First(SteppingDirection):
    """A direction that remembers the product of its first value with u, one number per client."""

    def __init__(self, direction: Direction, u: Vector) -> None:
        self.direction, self.u, self.along = direction, u, torch.empty(0)

    @property
    def takes_steps(self) -> bool:
        return isinstance(self.direction, SteppingDirection) and self.direction.takes_steps

    def __call__(self, y: Vector) -> Vector:
        g = self.direction(y)
        if not self.along.numel():
            self.along = (self.u * g).sum(-1, keepdim=True)
        return g

    def descend(self, start: Vector, lr: float, steps: int) -> Vector:
        """The first step is taken alone, and its length tells the first value."""
        assert isinstance(self.direction, SteppingDirection)
        y = self.direction.descend(start, lr, 1)
        self.along = (self.u * (start - y)).sum(-1, keepdim=True) / lr
        return self.direction.descend(y, lr, steps - 1) if steps > 1 else y

    @staticmethod
    def of(direction: Direction, u: Vector) -> First:
        """The same kind of direction: steps in place stay so."""
        return (FirstInPlace if isinstance(direction, InPlaceDirection) else First)(direction, u)


class FirstInPlace(First, InPlaceDirection):
    """The same for steps in place."""

    def in_place(self, start: Vector) -> AbstractContextManager[Vector]:
        """See `InPlaceDirection`."""
        assert isinstance(self.direction, InPlaceDirection)
        return self.direction.in_place(start)


def no_tests(x0: Vector) -> Vector:
    """What the server knows before the first test: the switch, s̄, k, and the round of the next trial."""
    return x0.new_zeros(*x0.shape[:-1], 4, dtype=torch.float64)


def switch(test: Vector) -> torch.Tensor:
    """One byte for each run: OFF, ON or TRIAL."""
    return test[..., :1].to(torch.uint8)


def corrects(switched: torch.Tensor, rnd: Round) -> Vector | int:
    """b_i: 1 for clients that correct their steps; one number if all are alike, otherwise (runs, S, 1)."""
    modes = {ON} if switched.is_meta else set(switched.flatten().tolist())  # ON costs most
    if len(modes) == 1 and TRIAL not in modes:
        return int(ON in modes)
    keys = seeds.children(seeds.keys(rnd.seeds, "trial", rnd.t)[:, None], rnd.ids)
    coin = torch.from_numpy(seeds.uniform(keys, 1) < SHARE)
    return ((switched == ON) | ((switched == TRIAL) & coin)).to(rnd.layout.dtype)


def measured(
    u: Vector, Pc: Vector, b: Vector | int, a: Vector, watched: Direction, steps: int
) -> Vector:
    """(n_i, d_i) of a cohort, from u = −v, a_i = P ḡ_i − P c_i and the watched direction, P g_i − b v."""
    if not isinstance(watched, First):
        return u.new_zeros(*u.shape[:-1], 2)
    size, along_Pc = ((u * part).sum(-1, keepdim=True) for part in (u, Pc))
    along = (u * a).sum(-1, keepdim=True) + along_Pc - (1 - b) * size  # ⟨u, P ḡ − b v⟩
    if steps > 1:
        along = (steps * along - watched.along) / (steps - 1)  # 1: ⟨u, h − b v⟩
    n = b * size + along_Pc - along
    filled: torch.Tensor = torch.linalg.vector_norm(u - Pc, dim=-1, keepdim=True) > 0  # P c_i ≠ 0
    total = size + (a - u).square().sum(-1, keepdim=True)
    told = torch.cat([n, size], -1) / total
    told = torch.where(torch.isfinite(told), told, 0.0)  # of a client that has diverged
    return b * filled * torch.cat([told[..., :1].clamp(-0.5, 0.5), told[..., 1:]], -1)  # 2


def told(test: Vector, replies: Vector, rnd: Round) -> Vector:
    """The mean of (n_i, d_i) over a cohort; in a trial those of clients that are not tested do not count."""
    if replies.shape[1] == rnd.ids.shape[1] and not replies.is_meta:
        replies = corrects(switch(test), rnd) * replies
    return rnd.average(replies)


def judged(test: Vector, sums: Vector, rho: float, rnd: Round) -> Vector:
    """What the server knows after the replies of a round, from the mean of (n_i, d_i)."""
    if test.is_meta:  # a rehearsal without numbers
        return test
    filled = 2 * rnd.clients / (rho * max(rnd.ids.shape[1], 1))
    runs = zip(test.flatten(0, 1).tolist(), sums.flatten(0, 1).tolist(), strict=True)
    known = [
        _after(before, told, filled, rnd.t + 1) for before, told in runs
    ]  # faster than in tensors
    return test.new_tensor(known).view_as(test)


def measures(server: Bundle) -> dict[str, np.ndarray]:
    """For the history: whether the correction is on, and s̄."""
    mode, mean = server.test[..., 0, :2].unbind(-1)
    return {"correction": (mode == ON).double().numpy(), "correction_test": mean.numpy()}


def _after(known: list[float], told: list[float], filled: float, t: int) -> list[float]:
    """What is known of one run before round t, after replies that told n and d. Controls are full from `filled` on."""
    (mode, mean, count, due), (n, d) = known, told
    if (
        d > 0 and math.isfinite(n) and math.isfinite(d)
    ):  # nothing follows from replies that have diverged
        s, count = min(max(n / d, 0.0), 1.0), count + 1  # 3
        mean += 3 / (count + 2) * (s - mean)  # 4
        mode = ON if mean > 0.5 else OFF  # 5
        due = due if mode == ON else 2 * t
    if mode == OFF and max(due, filled) <= t:
        return [TRIAL, 0.0, 0.0, due]
    return [mode, mean, count, due]
