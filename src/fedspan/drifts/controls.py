"""Control variates: each client's own direction is replaced by the common one (SCAFFOLD, arXiv:1910.06378).

     1  u ← P c − P c_i                         added to local gradients
     2  a_i ← P ḡ_i − P c_i                     sent; ḡ_i is the mean gradient of the local steps, without u
     3  c_i ← c_i + Pᵀ a_i                      outside the subspace c_i stays
     4  x moves along P c + mean_S a_i
     5  c ← c + (|S|/N) Pᵀ mean_S a_i           keeps c = mean_i c_i over ALL clients
    5'  c ← c + Pᵀ(mean_S P ḡ_i − P c)          rule = "paper"

Clients compute a_i from the mean of g_i + u and the copy of P c that they were sent, so an error of that copy cancels.
After plain steps that mean follows from their end point; after others z is sent too, and x moves along it.

Line 5' reads the SSF paper's box literally under client sampling. It breaks c = mean c_i and needs P ḡ_i on the uplink
as well. A robust aggregator needs it: whatever the aggregator leaves out of a round, line 5' forgets and line 5 keeps.
With full participation and the mean both are the same. Clients may have weights w_i; then c = Σ w_i c_i.

With correction = "never" local steps leave out u; lines 2 to 5 stay the same, and P c is not sent. With correction =
"tested" the server decides it by a test. v = P c_i − P c is what client i subtracts from its gradients. On some
networks a client's deviation along v vanishes after its first step, and the constant correction pushes on for K − 1
steps. Clients measure this, and the server switches the correction of the local steps:

     6  h_i ← mean of P g_i over the steps 2 … K;  D_i ← ‖v‖² + ‖P ḡ_i − P c‖²
     7  n_i ← ⟨v, h_i − P c⟩ / D_i,  d_i ← ‖v‖² / D_i  in the reply, n_i cut to ±½; 0 while P c_i = 0
     8  s ← Σ n_i / Σ d_i, between 0 and 1              at the server, while the correction is on or on trial
     9  s̄ ← s̄ + 3/(k + 2) (s − s̄)                      k: tests since the trial began
    10  on if s̄ > ½; otherwise off, and on trial again at twice this round

Where no n_i is cut, Σ‖h_i − P c − v‖²/D_i < Σ‖h_i − P c‖²/D_i exactly if s > ½: the correction stays while it predicts
the deviations of the clients, relative to their size, better than no correction does. d_i is between 0 and 1, and n_i
is cut to ±½, which it reaches where h_i = P ḡ_i = P c + v. So the unit of the loss does not matter, and no client
counts for much more than another, whatever it sends.

The correction is off until the controls are filled, after 2 N/(ρ S) rounds, and then on trial. In a trial each client
corrects with probability 1/4, drawn from the shared seed, and only those are tested: a trial that fails costs little.
Clients compute c_i from their gradients alone, so c = mean c_i holds in every phase.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch

from fedspan import Bundle, Drift, LinearMap, Parts, Round, Vector, register
from fedspan.core import seeds
from fedspan.core.bundle import Ranges
from fedspan.core.objective import Direction, Plus

OFF, ON, TRIAL = 0, 1, 2
RANGES = ((-0.5, 0.5), (0.0, 1.0))  # of n_i and d_i
SHARE = 0.25  # of the clients that correct in a trial


@register
@dataclass(frozen=True)
class Controls(Drift):
    """Drift correction by control variates."""

    correction: Literal["always", "tested", "never"] = "always"  # whether clients correct
    rule: Literal["exact", "paper"] = "exact"  # how the server renews c: line 5 or line 5'

    in_gradients = True
    controls = ("c",)

    @property
    def statistics(self) -> Mapping[str, Ranges]:  # type: ignore[override]
        """n_i and d_i, by which the correction is tested."""
        return {"stat_test": RANGES} if self.correction == "tested" else {}

    @property
    def follows_states(self) -> bool:  # type: ignore[override]
        """Line 5 does. Line 5' puts the mean gradient of the round in the place of P c."""
        return self.rule == "exact"

    def without_tests(self) -> Self:
        """All clients correct: two numbers have no noise under privacy, and trials end before the first test."""
        return replace(self, correction="always") if self.correction == "tested" else self

    def init_server(self, x0: Vector) -> Parts:
        parts = {"c": torch.zeros_like(x0)}
        if self.correction == "tested":  # the switch, s̄, k, and the round of the next trial
            parts["test"] = x0.new_zeros(*x0.shape[:-1], 4, dtype=torch.float64)
        return parts

    def init_client(self, x0: Vector) -> Parts:
        return {"c": torch.zeros_like(x0)}

    def down(self, server: Bundle, P: LinearMap, rnd: Round) -> Parts:
        if self.correction == "never":
            return {}
        parts = {"Pc": P @ server.c}
        if self.correction == "tested":
            parts["switch"] = server.test[..., :1].to(torch.uint8)
        return parts

    def begin(
        self, client: Bundle, down: Bundle, P: LinearMap, rnd: Round
    ) -> tuple[Vector, Vector | int, Vector]:
        if self.correction == "never":  # u = 0, and 2 needs the client's own control alone
            own = P @ client.c
            return own.new_zeros(()), 0, own
        b: Vector | int = int(self.correction == "always")
        if self.correction == "tested":
            b = corrects(down.switch, rnd)
        return down.Pc - P @ client.c, b, down.Pc  # 1

    def plus(self, work: Any, x: Vector, P: LinearMap) -> Plus:
        u, b, _ = work
        if isinstance(b, int):
            return u if b else None
        plus: Vector = b * u
        return plus

    def watch(self, work: Any, direction: Direction) -> Direction:
        u, b, _ = work
        off = self.correction != "tested" or (isinstance(b, int) and not b)
        return direction if off else First(direction, u)

    def reply(
        self,
        work: Any,
        came: Vector,
        watched: Direction,
        client: Bundle,
        P: LinearMap,
        steps: int | torch.Tensor,
    ) -> Parts:
        u, b, Pc = work
        a = came.sub_(Pc)  # 2
        if not isinstance(b, int):
            a = a + (1 - b) * u
        elif not b:
            a = a + u
        parts = {"v": a}
        if self.rule == "paper":
            parts["Pg"] = a + P @ client.c
        if self.correction == "tested":
            parts["stat_test"] = measured(u, Pc, b, a, watched, steps)
        return parts

    def after(self, client: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Parts:
        return {"c": P.T.plus(v, client.c, rnd.overwrite)}  # 3

    def direction(self, server: Bundle, v: Vector, P: LinearMap, rnd: Round) -> Vector:
        along: Vector = P @ server.c + v  # 4
        return along

    def server(self, server: Bundle, mean: Vector, up: Bundle, P: LinearMap, rnd: Round) -> Parts:
        if self.rule == "paper":
            change = rnd.mean(up.Pg) - P @ server.c  # 5'
        else:
            change = rnd.share * mean  # 5
        parts = {"c": P.T.plus(change, server.c, rnd.overwrite)}
        if self.correction == "tested" and (told := up.get("stat_test")) is not None:
            if (
                told.shape[1] == rnd.ids.shape[1] and not told.is_meta
            ):  # in a trial some do not count
                told = corrects(server.test[..., :1].to(torch.uint8), rnd) * told
            rho = P.rank / rnd.layout.size
            parts["test"] = judged(server.test, rnd.average(told), rho, rnd)
        return parts

    def measures(self, server: Bundle) -> Mapping[str, Any]:
        """Return whether the correction is on, and s̄."""
        if self.correction != "tested":
            return {}
        mode, mean = server.test[..., 0, :2].unbind(-1)
        return {"correction": (mode == ON).double().numpy(), "correction_test": mean.numpy()}


class First:
    """A direction that remembers the product of its first value with u, one number per client."""

    def __init__(self, direction: Any, u: Vector) -> None:
        self.direction, self.u, self.along = direction, u, torch.empty(0)
        self.takes_steps = getattr(direction, "takes_steps", False)
        self.in_place = getattr(direction, "in_place", None)

    def __call__(self, y: Vector) -> Vector:
        g: Vector = self.direction(y)
        if not self.along.numel():
            self.along = (self.u * g).sum(-1, keepdim=True)
        return g

    def descend(self, start: Vector, lr: float, steps: int) -> Vector:
        """Take the first step alone: its length shows the first value."""
        if self.along.numel():
            rest: Vector = self.direction.descend(start, lr, steps)
            return rest
        y: Vector = self.direction.descend(start, lr, 1)
        self.along = (self.u * (start - y)).sum(-1, keepdim=True) / lr
        return self.direction.descend(y, lr, steps - 1) if steps > 1 else y


def corrects(switch: torch.Tensor, rnd: Round) -> Vector | int:
    """Return b_i: 1 for clients that correct their steps; one value if all are alike, otherwise (runs, S, 1)."""
    modes = {ON} if switch.is_meta else set(switch.flatten().tolist())  # ON costs most
    if len(modes) == 1 and TRIAL not in modes:
        return int(ON in modes)
    keys = seeds.children(seeds.keys(rnd.seeds, "trial", rnd.t)[:, None], rnd.ids)
    coin = torch.from_numpy(seeds.uniform(keys, 1) < SHARE)
    return ((switch == ON) | ((switch == TRIAL) & coin)).to(rnd.layout.dtype)


def measured(
    u: Vector,
    Pc: Vector,
    b: Vector | int,
    a: Vector,
    watched: Direction,
    steps: int | torch.Tensor,
) -> Vector:
    """Return (n_i, d_i) of a cohort, from u = −v, a_i = P ḡ_i − P c_i and the watched direction, P g_i − b v."""
    if not isinstance(watched, First):
        return u.new_zeros(*u.shape[:-1], 2)
    size, along_Pc = ((u * part).sum(-1, keepdim=True) for part in (u, Pc))
    along = (u * a).sum(-1, keepdim=True) + along_Pc - (1 - b) * size  # ⟨u, P ḡ − b v⟩
    if isinstance(steps, torch.Tensor):
        later = (steps * along - watched.along) / (steps - 1).clamp(min=1)
        along = torch.where(steps > 1, later, along)
    elif steps > 1:
        along = (steps * along - watched.along) / (steps - 1)  # 6: ⟨u, h − b v⟩
    n = b * size + along_Pc - along
    filled: torch.Tensor = torch.linalg.vector_norm(u - Pc, dim=-1, keepdim=True) > 0  # P c_i ≠ 0
    total = size + (a - u).square().sum(-1, keepdim=True)
    told = torch.cat([n, size], -1) / total
    told = torch.where(torch.isfinite(told), told, 0.0)  # of a client that has diverged
    return b * filled * torch.cat([told[..., :1].clamp(-0.5, 0.5), told[..., 1:]], -1)  # 7


def judged(test: Vector, sums: Vector, rho: float, rnd: Round) -> Vector:
    """Return what the server knows after the replies of a round, from the mean of (n_i, d_i)."""
    if test.is_meta:  # a rehearsal without numbers
        return test
    filled, t = 2 * rnd.clients / (rho * max(rnd.ids.shape[1], 1)), rnd.t + 1
    known = []
    runs = zip(test.flatten(0, 1).tolist(), sums.flatten(0, 1).tolist(), strict=True)
    for (mode, mean, count, due), (n, d) in runs:  # faster than in tensors
        # nothing follows from replies that have diverged
        if d > 0 and math.isfinite(n) and math.isfinite(d):
            s, count = min(max(n / d, 0.0), 1.0), count + 1  # 8
            mean += 3 / (count + 2) * (s - mean)  # 9
            mode = ON if mean > 0.5 else OFF  # 10
            due = due if mode == ON else 2 * t
        if mode == OFF and max(due, filled) <= t:
            mode, mean, count = TRIAL, 0.0, 0.0
        known.append([mode, mean, count, due])
    return test.new_tensor(known).view_as(test)
