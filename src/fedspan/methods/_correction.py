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
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedspan import Round, Vector
from fedspan.core import seeds
from fedspan.core.errors import one_of
from fedspan.core.objective import Direction

OFF, ON, TRIAL = 0, 1, 2
SHARE = 0.25  # of the clients that correct in a trial


class First:
    """A direction that remembers its first value."""

    def __init__(self, direction: Direction) -> None:
        self.direction, self.value = direction, torch.empty(0)

    def __call__(self, y: Vector) -> Vector:
        g = self.direction(y)
        if not self.value.numel():
            self.value = g.clone()  # the next call may overwrite it
        return g


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

    def measured(self, v: Vector, Pc: Vector, b: Vector, mean: Vector, first: Vector, steps: int) -> Vector:
        """(n_i, d_i) of a cohort; `mean` and `first` are of the directions P g_i − b v."""  # 1, 2
        later = (steps * mean - first) / (steps - 1) if steps > 1 else mean
        h = later + b * v
        counts = b * ((v + Pc) != 0).any(-1, keepdim=True)
        return torch.cat([counts * (v * (h - Pc)).sum(-1, keepdim=True), counts * (v * v).sum(-1, keepdim=True)], -1)

    def judged(self, test: Vector, sums: Vector, rho: float, rnd: Round) -> Vector:
        """What the server knows after the replies of a round, from the mean of (n_i, d_i)."""
        mode, mean, count, due = test.split(1, -1)
        n, d = sums.to(test.dtype).split(1, -1)
        told = d > 0
        count = torch.where(told, count + 1, count)
        s = (n / torch.where(told, d, torch.ones_like(d))).clamp(0, 1)  # 3
        mean = torch.where(told, mean + 3 / (count + 2) * (s - mean), mean)  # 4
        failed = told & (mean <= 0.5)
        mode = torch.where(failed, torch.full_like(mode, OFF), torch.where(told, torch.full_like(mode, ON), mode))  # 5
        due = torch.where(failed, torch.full_like(due, 2 * (rnd.t + 1)), due)
        return self.begun(torch.cat([mode, mean, count, due], -1), rho, rnd)

    def begun(self, test: Vector, rho: float, rnd: Round) -> Vector:
        """The same with a trial begun in the next round, where one is due."""
        mode, mean, count, due = test.split(1, -1)
        filled = 2 * rnd.clients / (rho * max(rnd.ids.shape[1], 1))
        starts = (mode == OFF) & (due.clamp(min=filled) <= rnd.t + 1)
        zero = torch.zeros_like(mode)
        mode = torch.where(starts, torch.full_like(mode, TRIAL), mode)
        return torch.cat([mode, torch.where(starts, zero, mean), torch.where(starts, zero, count), due], -1)

    def test_values(self, test: Vector) -> dict[str, np.ndarray]:
        """For the history: whether the correction is on, and s̄."""
        if not self.tests:
            return {}
        mode, mean = test[..., 0, :2].unbind(-1)
        return {"correction": (mode == ON).double().numpy(), "correction_test": mean.numpy()}
