"""Whether clients correct their local steps, decided by a test: what SSF and SCAFFOLD share.

v = P c_i − P c is what client i subtracts from its gradients. On some networks a client's deviation along v vanishes
after its first step, and the constant correction pushes on for K − 1 steps. With correction = "tested" clients measure
this, and the server switches the correction of the local steps (P = I in SCAFFOLD):

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

import functools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch

from fedspan import Round, Vector
from fedspan.core import seeds
from fedspan.core.errors import ProtocolError, one_of
from fedspan.core.objective import Direction, InPlaceDirection, SteppingDirection
from fedspan.core.reply import statistics

OFF, ON, TRIAL = 0, 1, 2
TEST = statistics((-0.5, 0.5), (0, 1))  # n_i and d_i
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


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A method whose clients can leave out the correction of their local steps."""

    correction: Literal["always", "tested", "never"] = (
        "always"  # whether clients correct their local steps
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        one_of("correction", self.correction, ("always", "tested", "never"))

    @functools.cached_property
    def tests(self) -> bool:
        """Whether the server switches the correction."""
        return self.correction == "tested"

    def without_tests(self) -> Self:
        """All clients correct: the two numbers have no noise under privacy, and trials end before the first test."""
        return replace(self, correction="always") if self.tests else self

    def no_tests(self, x0: Vector) -> Vector:
        """What the server knows before the first test: the switch, s̄, k, and the round of the next trial."""
        return x0.new_zeros(*x0.shape[:-1], 4 if self.tests else 0, dtype=torch.float64)

    def switch(self, test: Vector) -> torch.Tensor | None:
        """One byte for each run: OFF, ON or TRIAL; None if nothing is tested."""
        return test[..., :1].to(torch.uint8) if self.tests else None

    def corrects(self, switch: torch.Tensor | None, rnd: Round) -> Vector | int:
        """b_i: 1 for clients that correct their steps; one number if all are alike, otherwise (runs, S, 1)."""
        if not self.tests:
            return int(self.correction == "always")
        if switch is None:
            raise ProtocolError(
                "the download does not say whether to correct; both ends must use the same settings"
            )
        modes = (
            {ON} if switch.is_meta else set(switch.flatten().tolist())
        )  # ON costs most, in a rehearsal
        if len(modes) == 1 and TRIAL not in modes:
            return int(ON in modes)
        coin = seeds.uniform(
            seeds.children(seeds.keys(rnd.seeds, "trial", rnd.t)[:, None], rnd.ids), 1
        )
        return ((switch == ON) | ((switch == TRIAL) & torch.from_numpy(coin < SHARE))).to(
            rnd.layout.dtype
        )

    def watched(self, direction: Direction, u: Vector, b: Vector | int) -> Direction:
        """The direction of the local steps, from which `measured` learns its first value where it is tested."""
        off = not self.tests or (isinstance(b, int) and not b)
        return direction if off else First.of(direction, u)

    def measured(
        self, u: Vector, Pc: Vector, b: Vector | int, a: Vector, direction: Direction, steps: int
    ) -> Vector | None:
        """(n_i, d_i) of a cohort, from u = −v, a_i = P ḡ_i − P c_i and the watched direction, P g_i − b v."""
        if not isinstance(direction, First):
            return u.new_zeros(*u.shape[:-1], 2) if self.tests else None
        size, along_Pc = ((u * part).sum(-1, keepdim=True) for part in (u, Pc))
        along = (u * a).sum(-1, keepdim=True) + along_Pc - (1 - b) * size  # ⟨u, P ḡ − b v⟩
        along = (
            (steps * along - direction.along) / (steps - 1) if steps > 1 else along
        )  # 1: ⟨u, h − b v⟩
        n = b * size + along_Pc - along
        filled: torch.Tensor = (
            torch.linalg.vector_norm(u - Pc, dim=-1, keepdim=True) > 0
        )  # P c_i ≠ 0
        total = size + (a - u).square().sum(-1, keepdim=True)
        told = torch.cat([n, size], -1) / total
        told = torch.where(torch.isfinite(told), told, 0.0)  # of a client that has diverged
        return b * filled * torch.cat([told[..., :1].clamp(-0.5, 0.5), told[..., 1:]], -1)  # 2

    def told(self, test: Vector, replies: Vector, rnd: Round) -> Vector:
        """The mean of (n_i, d_i) over a cohort; in a trial those of clients that are not tested do not count."""
        if replies.shape[1] == rnd.ids.shape[1] and not replies.is_meta:
            replies = self.corrects(self.switch(test), rnd) * replies
        return rnd.average(replies)

    def judged(self, test: Vector, sums: Vector, rho: float, rnd: Round) -> Vector:
        """What the server knows after the replies of a round, from the mean of (n_i, d_i)."""
        if test.is_meta:  # a rehearsal without numbers
            return test
        filled = 2 * rnd.clients / (rho * max(rnd.ids.shape[1], 1))
        runs = zip(
            test.flatten(0, 1).tolist(), sums.flatten(0, 1).tolist(), strict=True
        )  # faster than in tensors
        known = [_after(before, told, filled, rnd.t + 1) for before, told in runs]
        return test.new_tensor(known).view_as(test)

    def test_values(self, test: Vector) -> dict[str, np.ndarray]:
        """For the history: whether the correction is on, and s̄."""
        if not self.tests:
            return {}
        mode, mean = test[..., 0, :2].unbind(-1)
        return {"correction": (mode == ON).double().numpy(), "correction_test": mean.numpy()}


def corrected(b: Vector | int, u: Vector) -> Vector | None:
    """b u, which is added to the gradients; None for zeros."""
    if isinstance(b, int):
        return u if b else None
    return b * u


def completed(v: Vector, b: Vector | int, u: Vector) -> Vector:
    """v + (1 − b) u: with u where the steps left it out."""
    if isinstance(b, int):
        return v if b else v + u
    return v + (1 - b) * u


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
