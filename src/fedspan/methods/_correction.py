"""Whether clients correct their local steps, decided by a test: what SSF and SCAFFOLD share.

v = P c_i − P c is what client i subtracts from its gradients. On some networks a client's deviation along v vanishes
after its first step, and the constant correction pushes on for K − 1 steps. With correction = "tested" clients measure
this, and the server switches the correction of the local steps (P = I in SCAFFOLD):

     1  h_i ← mean of P g_i over the steps 2 … K
     2  n_i ← ⟨v, h_i − P c⟩,  d_i ← ‖v‖²             two numbers of the reply; 0 while P c_i = 0
     3  s ← Σ n_i / Σ d_i, between 0 and 1             at the server, while the correction is on or on trial
     4  s̄ ← s̄ + 3/(k + 2) (s − s̄)                      k: tests since the trial began
     5  on if s̄ > ½; otherwise off, and on trial again at twice this round

Σ‖h_i − P c − v‖² < Σ‖h_i − P c‖² exactly if s > ½: the correction stays while it predicts the deviations of the clients
better than no correction does. The correction is off until the controls are filled, after 2 N/(ρ S) rounds, and then on
trial. In a trial each client corrects with probability 1/4, drawn from the shared seed, and only those are tested: a
trial that fails costs little. Clients compute c_i from their gradients alone, so c = mean c_i holds in every phase.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch

from fedspan import Round, Vector
from fedspan.core import seeds
from fedspan.core.errors import one_of
from fedspan.core.objective import Direction, InPlaceDirection

OFF, ON, TRIAL = 0, 1, 2
SHARE = 0.25  # of the clients that correct in a trial


class First:
    """A direction that remembers the product of its first value with u, one number per client."""

    def __init__(self, direction: Direction, u: Vector) -> None:
        self.direction, self.u, self.along = direction, u, torch.empty(0)

    def __call__(self, y: Vector) -> Vector:
        g = self.direction(y)
        if not self.along.numel():
            self.along = (self.u * g).sum(-1, keepdim=True)
        return g

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


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A method whose clients can leave out the correction of their local steps."""

    correction: Literal["always", "tested", "never"] = "always"  # whether clients correct their local steps

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        one_of("correction", self.correction, ("always", "tested", "never"))

    @functools.cached_property
    def tests(self) -> bool:
        """Whether the server switches the correction."""
        return self.correction == "tested"

    def without_tests(self) -> Self:
        """All clients correct: with privacy the two numbers would be clipped, and trials end before the first test."""
        return replace(self, correction="always") if self.tests else self

    def no_tests(self, x0: Vector) -> Vector:
        """What the server knows before the first test: the switch, s̄, k, and the round of the next trial."""
        return x0.new_zeros(*x0.shape[:-1], 4 if self.tests else 0, dtype=torch.float64)

    def switch(self, test: Vector) -> torch.Tensor | None:
        """One byte for each run: OFF, ON or TRIAL; None if nothing is tested."""
        return test[..., :1].to(torch.uint8) if self.tests else None

    def corrects(self, switch: torch.Tensor | None, rnd: Round) -> Vector | None:
        """b_i of a cohort, (runs, S, 1): 1 for clients that correct their steps; None if all do."""
        if self.correction == "always":
            return None
        if switch is None:
            return torch.zeros(*rnd.ids.shape, 1, dtype=rnd.layout.dtype)
        coin = seeds.uniform(seeds.children(seeds.keys(rnd.seeds, "trial", rnd.t)[:, None], rnd.ids), 1)
        return ((switch == ON) | ((switch == TRIAL) & torch.from_numpy(coin < SHARE))).to(rnd.layout.dtype)

    def measured(self, u: Vector, Pc: Vector, b: Vector, mean: Vector, first: Vector, steps: int) -> Vector:
        """(n_i, d_i) of a cohort, from u = −v, the mean of the directions P g_i − b v, and ⟨u, the first of them⟩."""
        along = (u * mean).sum(-1, keepdim=True)
        along = (steps * along - first) / (steps - 1) if steps > 1 else along  # 1: ⟨u, h − b v⟩
        size = (u * u).sum(-1, keepdim=True)
        n = b * size + (u * Pc).sum(-1, keepdim=True) - along
        return b * (u != Pc).any(-1, keepdim=True) * torch.cat([n, size], -1)  # 2

    def judged(self, test: Vector, sums: Vector, rho: float, rnd: Round) -> Vector:
        """What the server knows after the replies of a round, from the mean of (n_i, d_i)."""
        if test.is_meta:  # a rehearsal without numbers
            return test
        known = test.numpy(force=True).copy()  # a few numbers: numpy handles them faster than torch
        mode, mean, count, due = np.moveaxis(known, -1, 0)
        n, d = np.moveaxis(sums.double().numpy(force=True), -1, 0)
        told = (d > 0) & np.isfinite(n) & np.isfinite(d)  # nothing follows from replies that have diverged
        count[told] += 1
        s = np.clip(n[told] / d[told], 0, 1)  # 3
        mean[told] += 3 / (count[told] + 2) * (s - mean[told])  # 4
        failed = told & (mean <= 0.5)
        mode[told] = ON  # 5
        mode[failed] = OFF
        due[failed] = 2 * (rnd.t + 1)
        starts = (mode == OFF) & (np.maximum(due, 2 * rnd.clients / (rho * max(rnd.ids.shape[1], 1))) <= rnd.t + 1)
        mode[starts], mean[starts], count[starts] = TRIAL, 0, 0
        return torch.from_numpy(known).to(test.device)

    def test_values(self, test: Vector) -> dict[str, np.ndarray]:
        """For the history: whether the correction is on, and s̄."""
        if not self.tests:
            return {}
        mode, mean = test[..., 0, :2].unbind(-1)
        return {"correction": (mode == ON).double().numpy(), "correction_test": mean.numpy()}
