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
from fedspan.theory.gradient_probe import all_clients, client_weights


def measure(loop: Loop) -> dict[str, npt.NDArray[np.float64]]:
    """All quantities above, one number per run."""
    clients = getattr(loop.transport, "clients", None)
    if clients is None:
        raise SpecError("`diagnostics` needs all clients on one machine; leave it out")
    with torch.inference_mode():
        states, weights = clients(), client_weights(loop.problem)
        grads = all_clients(loop.problem).full_grads(loop.server.x).double()
        mean_grad = (weights * grads).sum(1, keepdim=True)
        found = {"grad_sq": mean_grad.square().sum((1, 2)), "drift": _drift(loop, states)}
        if hasattr(states, "c") and hasattr(loop.server, "c"):
            found |= _controls(loop.server.c.double(), states.c.double(), grads, mean_grad, weights)
    return {name: value.numpy() for name, value in found.items()}


def _controls(
    c: Vector, own: Vector, grads: Vector, mean_grad: Vector, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    cosine = torch.nn.functional.cosine_similarity(c - own, mean_grad - grads, dim=-1, eps=1e-30)
    return {
        "control_error": (weights * (own - grads).square()).sum((1, 2)),
        "control_gap": (c - (weights * own).sum(1, keepdim=True)).norm(dim=-1)[:, 0],
        "correction_cos": (weights[..., 0] * cosine).sum(1),
    }


def _drift(loop: Loop, states: Any) -> torch.Tensor:
    """E_t of the next round with all clients, (runs,)."""
    problem, method, everyone = loop.problem, loop.method, loop.last_round
    runs, n = everyone.shape
    weights = client_weights(problem).to(problem.layout.dtype).expand(runs, -1, -1)
    rnd = Round(
        t=loop.t, seeds=loop.seeds, clients=n, layout=problem.layout,
        ids=np.broadcast_to(np.arange(n), (runs, n)).copy(), last_round=everyone,
        weights=None if problem.weights is None else weights, everyone=everyone,
        local_steps=method.local_steps, rounds=loop.rounds,
    )  # fmt: skip
    down = method.broadcast(loop.server, rnd)

    def distances(own: Any, part: Round) -> torch.Tensor:
        recorder = _DistanceRecorder(problem.cohort(part))
        recorder.begin(loop.buffers)
        method.client_step(own, down, recorder, part)
        return recorder.mean()

    with torch_generator():
        if problem.cohort_mode == "batched":
            return distances(states, rnd).mean(1)
        found = []
        for i in range(n):
            own = {name: part[:, i : i + 1] for name, part in vars(states).items()}
            found.append(distances(Bundle(**own), rnd.subset(np.array([i]))))
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

    def begin(self, buffers: Vector | None) -> None:
        self.inner.begin(buffers)

    def direction(self, plus: Plus = None) -> Direction:
        return self._recorded(self.inner.direction(plus))

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self._recorded(self.inner.restrict(x, P, plus))

    def mean(self) -> torch.Tensor:
        """Mean over the local steps, (runs, clients)."""
        return self.total / max(1, self.calls)

    def _recorded(self, direction: Direction) -> Direction:
        def at(y: Vector) -> Vector:
            self.start = y if self.start is None else self.start
            g = direction(y)
            moved = (y - self.start).double().square().sum(-1)
            self.total, self.calls = self.total + moved.expand(g.shape[:2]), self.calls + 1
            return g

        return at
