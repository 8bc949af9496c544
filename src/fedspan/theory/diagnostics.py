"""What the lemmas speak of, measured in a run: in every row, at the server's model, with all clients asked.

    grad_sq         ‖∇F(x)‖²
    drift           E_t = (1/NK) Σ_i Σ_k ‖y_i^k − x‖²: the next round's local steps, taken by all clients to no effect
    control_error   C_t = mean_i ‖c_i − ∇f_i(x)‖²
    control_gap     ‖c − mean_i c_i‖: rounding, or a control rule that breaks the mean
    correction_cos  cosine of c − c_i and ∇F(x) − ∇f_i(x), mean over clients: 1 where the correction is the true drift

The last three are for methods whose server and clients keep a control `c`. The measurement costs about two rounds of
all clients and a pass over their data, draws nothing from the run's streams, and leaves no trace in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.method import Round
from fedspan.core.objective import Direction, Objective, Plus
from fedspan.core.projector import LinearMap
from fedspan.engine.loop import Loop
from fedspan.theory.gradient_probe import everyone, weights

Numbers = dict[str, npt.NDArray[np.float64]]


def observe(loop: Loop) -> Numbers:
    """All of the above, one number a run."""
    clients = getattr(loop.transport, "clients", None)
    if clients is None:
        raise SpecError("`diagnostics` needs all clients on one machine; leave it out")
    with torch.inference_mode():
        states, share = clients(), weights(loop.problem)
        grads = everyone(loop.problem).full(loop.method.model(loop.server)).double()
        whole = (share * grads).sum(1, keepdim=True)
        found = {"grad_sq": whole.square().sum((1, 2)), "drift": drift(loop, states)}
        if hasattr(states, "c") and hasattr(loop.server, "c"):
            found |= _controls(loop.server.c.double(), states.c.double(), grads, whole, share)
    return {name: value.numpy() for name, value in found.items()}


def _controls(c: Vector, own: Vector, grads: Vector, whole: Vector, share: torch.Tensor) -> dict[str, torch.Tensor]:
    correction, needed = c - own, whole - grads
    cosine = torch.nn.functional.cosine_similarity(correction, needed, dim=-1, eps=1e-30)
    return {
        "control_error": (share * (own - grads).square()).sum((1, 2)),
        "control_gap": (c - (share * own).sum(1, keepdim=True)).norm(dim=-1)[:, 0],
        "correction_cos": (share[..., 0] * cosine).sum(1),
    }


def drift(loop: Loop, states: Any) -> torch.Tensor:
    """E_t of the next round if all clients took part in it, (runs,)."""
    problem, method, rnd = loop.problem, loop.method, _next_round(loop)
    down = method.broadcast(loop.server, rnd)

    def one(own: Any, part: Round) -> torch.Tensor:
        recorder = Recorder(problem.cohort(part))
        recorder.begin(loop.buffers)
        method.client_step(own, down, recorder, part)
        return recorder.mean()

    with torch.random.fork_rng(devices=[]):
        if problem.cohort_mode == "batched":
            return one(states, rnd).mean(1)
        places = range(problem.clients)
        return torch.cat([one(_cut(states, i), rnd.subset(np.array([i]))) for i in places], 1).mean(1)


class Recorder(Objective):
    """An objective that notes how far from their start its gradients are asked for."""

    def __init__(self, inner: Objective) -> None:
        self.inner, self.calls, self.total = inner, 0, torch.zeros(())
        self.start: Vector | None = None

    def grad(self, y: Vector) -> Vector:
        return self._noted(self.inner.grad)(y)

    def full_grad(self, x: Vector) -> Vector:
        return self.inner.full_grad(x)

    def begin(self, buffers: Vector | None) -> None:
        self.inner.begin(buffers)

    def direction(self, plus: Plus = None) -> Direction:
        return self._noted(self.inner.direction(plus))

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self._noted(self.inner.restrict(x, P, plus))

    def mean(self) -> torch.Tensor:
        """Mean over the local steps, (runs, clients)."""
        return self.total / max(1, self.calls)

    def _noted(self, direction: Direction) -> Direction:
        def at(y: Vector) -> Vector:
            self.start = y if self.start is None else self.start
            g = direction(y)
            moved = (y - self.start).double().square().sum(-1)
            self.total, self.calls = self.total + moved.expand(g.shape[:2]), self.calls + 1
            return g

        return at


def _next_round(loop: Loop) -> Round:
    """The round to come with all clients in it."""
    runs, n = loop.last_round.shape
    ids = np.broadcast_to(np.arange(n), (runs, n)).copy()
    dtype = loop.problem.layout.dtype
    share = None if loop.problem.weights is None else weights(loop.problem).to(dtype).expand(runs, -1, -1)
    return Round(
        t=loop.t, seeds=loop.seeds, clients=n, layout=loop.problem.layout, ids=ids, last_round=loop.last_round,
        weights=share, everyone=loop.last_round, local_steps=loop.method.local_steps,
    )  # fmt: skip


def _cut(states: Any, place: int) -> Any:
    fields = dataclasses.fields(states)
    return type(states)(**{f.name: getattr(states, f.name)[:, place : place + 1] for f in fields})
