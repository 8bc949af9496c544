"""Quantities of the lemmas, measured in a run: at the server's model, over all clients.

    grad_sq         ‖∇F(x)‖²
    drift           E_t = (1/NK) Σ_i Σ_k ‖y_i^k − x‖² of the next round, as if all clients took part in it
    control_error   C_t = mean_i ‖c_i − ∇f_i(x)‖²
    control_gap     ‖c − mean_i c_i‖: rounding errors, or a control rule that does not keep the mean
    correction_cos  cosine between c − c_i and ∇F(x) − ∇f_i(x), mean over clients; 1 is a perfect correction

The last three need a control `c` on the server and on the clients. A measurement costs about two rounds of all clients
and a pass over their data. It draws nothing from the run's streams and does not change the run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.objective import Direction, Objective, Plus
from fedspan.core.projector import LinearMap
from fedspan.core.round import Round
from fedspan.core.seeds import torch_generator
from fedspan.engine.loop import Loop
from fedspan.theory.gradient_probe import client_weights, computed_together, full_grads


def measure(loop: Loop) -> dict[str, npt.NDArray[np.float64]]:
    """All quantities above, one number per run."""
    clients = getattr(loop.transport, "clients", None)
    if clients is None:
        raise SpecError("`diagnostics` needs all clients on one machine; leave it out")
    with torch.inference_mode():
        states, weights = clients(), client_weights(loop.problem)
        grads = full_grads(loop.problem, loop.server.x).double()
        mean_grad = (weights * grads).sum(1, keepdim=True)
        found = {"grad_sq": mean_grad.square().sum((1, 2)), "drift": _drift(loop, states)}
        if hasattr(states, "c") and hasattr(loop.server, "c"):
            c, own = loop.server.c.double(), states.c.double()
            apart = mean_grad - grads
            cosine = torch.nn.functional.cosine_similarity(c - own, apart, dim=-1, eps=1e-30)
            found |= {
                "control_error": (weights * (own - grads).square()).sum((1, 2)),
                "control_gap": (c - (weights * own).sum(1, keepdim=True)).norm(dim=-1)[:, 0],
                "correction_cos": (weights[..., 0] * cosine).sum(1),
            }
    return {name: value.numpy() for name, value in found.items()}


def _drift(loop: Loop, states: Any) -> torch.Tensor:
    """E_t of the next round with all clients, (runs,)."""
    problem, method, everyone = loop.problem, loop.method, loop.last_round
    runs, n = everyone.shape
    weights = None
    if problem.weights is not None:
        weights = client_weights(problem).to(problem.layout.dtype).expand(runs, -1, -1)
    rnd = Round(
        t=loop.t, seeds=loop.seeds, clients=n, layout=problem.layout, ids=np.tile(np.arange(n), (runs, 1)),
        last_round=everyone, weights=weights, everyone=everyone, local_steps=method.local_steps, rounds=loop.rounds,
    )  # fmt: skip
    down, found = method.broadcast(loop.server, rnd), []
    with torch_generator():
        for part in computed_together(problem, n):
            own = Bundle(**{name: values[:, part] for name, values in vars(states).items()})
            some = rnd.subset(np.arange(n)[part])
            recorder = _DistanceRecorder(problem.cohort(some))
            recorder.inner.begin(loop.buffers)
            method.client_step(own, down, recorder, some)
            found.append(recorder.total / max(1, recorder.calls))  # mean over the local steps
    return torch.cat(found, 1).mean(1)


class _DistanceRecorder(Objective):
    """An objective that records how far from the starting point its gradients are evaluated."""

    def __init__(self, inner: Objective) -> None:
        self.inner, self.calls, self.total = inner, 0, torch.zeros(())
        self.start: Vector | None = None

    def grad(self, y: Vector) -> Vector:
        return self._recorded(self.inner.grad)(y)

    def full_grad(self, x: Vector) -> Vector:
        return self.inner.full_grad(x)

    def direction(self, plus: Plus = None) -> Direction:
        return self._recorded(self.inner.direction(plus))

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self._recorded(self.inner.restrict(x, P, plus))

    def _recorded(self, direction: Direction) -> Direction:
        def at(y: Vector) -> Vector:
            self.start = y if self.start is None else self.start
            g = direction(y)
            moved = (y - self.start).double().square().sum(-1)
            self.total, self.calls = self.total + moved.expand(g.shape[:2]), self.calls + 1
            return g

        return at
