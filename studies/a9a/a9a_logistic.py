"""Logistic regression on a9a as in the logs of VR-ProxSkip: clients sorted by label, or all with all examples.

    f_i(x) = mean_j log(1 + exp(⟨a_j, x⟩)) − b_j ⟨a_j, x⟩ + (λ/2) ‖x‖²,   λ = L/κ,   gap = F(x) − F(x*)

L is the smoothness of mini-batches: of 16 drawn from all examples, without λ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedspan import Objective, Round, Vector, register
from fedspan.core import seeds
from fedspan.core.config import Settings
from fedspan.core.layout import Block, Layout
from fedspan.core.objective import Problem
from fedspan.core.task import Task
from fedspan.data import sets, store

Floats = npt.NDArray[np.float64]
AHEAD = 128  # mini-batches that are drawn at once
DIVERGED = 1e6


@register
@dataclass(frozen=True, kw_only=True)
class A9aLogistic(Task):
    """A regularized logistic model of 123 binary features."""

    clients: int = 10  # number of clients
    kappa: float = 1e4  # κ = L/λ
    shared: bool = False  # whether every client has all examples
    made: int = 0  # examples drawn at random in place of a9a's; 0: a9a

    several_seeds = False

    def build(self, seeds: tuple[int, ...], settings: Settings) -> "Logistic":
        if self.made:
            rng = np.random.default_rng(self.made)
            x = (rng.random((self.made, 123)) < 0.11).astype(np.float64)
            y = (x @ rng.normal(size=123) + rng.logistic(size=self.made) > 0).astype(np.float64)
        else:
            (path,) = sets.paths("a9a").values()
            found = store.read(path)
            x = np.unpackbits(found["x"], axis=1)[:, : int(found["features"])].astype(np.float64)
            y = found["y"].astype(np.float64)
        order = np.argsort(y, kind="stable")  # VR-ProxSkip's own sort is not stable
        sizes = len(y) // self.clients
        rows = order[: sizes * self.clients].reshape(self.clients, sizes)
        if self.shared:
            rows = np.broadcast_to(np.arange(len(y)), (self.clients, len(y)))
        return Logistic(x, y, rows, self.kappa, seeds, settings)

    def requires(self) -> list[str]:
        return [] if self.made else ["a9a"]


class Logistic(Problem):
    """The examples of all clients, and the optimum."""

    def __init__(
        self,
        x: Floats,
        y: Floats,
        rows: npt.NDArray[np.int64],
        kappa: float,
        of_runs: tuple[int, ...],
        settings: Settings,
    ) -> None:
        n, d = x.shape
        self.seeds, self.rows, self.batch = of_runs, rows, int(settings.batch_size)
        self.clients, self.weights = len(rows), None
        smooth = np.linalg.eigvalsh(x.T @ x / n)[-1] / 4
        rare = (n / self.batch - 1) / (n - 1) * (x**2).sum(1).max() / 4
        self.ridge = float(n / (n - 1) * (1 - 1 / self.batch) * smooth + rare) / kappa
        self.layout = Layout((Block("x", (d,)),), settings.torch_dtype)
        self.x0 = torch.zeros(1, 1, d, dtype=settings.torch_dtype)
        self.x = torch.from_numpy(x).to(settings.torch_dtype)
        self.y = torch.from_numpy(y).to(settings.torch_dtype)
        self.whole = x, y
        best = np.zeros(d)
        for _ in range(50):  # Newton's method
            p = 1 / (1 + np.exp(-(x @ best)))
            gradient = x.T @ (p - y) / n + self.ridge * best
            hessian = (x.T * (p * (1 - p))) @ x / n + self.ridge * np.eye(d)
            best = best - np.linalg.solve(hessian, gradient)
            if np.linalg.norm(gradient) < 1e-13:
                break
        self.least = self._value(best)

    def _value(self, point: Floats) -> float:
        x, y = self.whole
        z = x @ point
        return float((np.logaddexp(0, z) - y * z).mean() + self.ridge / 2 * (point @ point))

    def examples(self, client: int) -> int:
        return int(self.rows.shape[1])

    def cohort(self, rnd: Round) -> "LogisticObjective":
        return LogisticObjective(self, rnd)

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> Mapping[str, Floats]:
        values = np.array([self._value(point) for point in x.double().numpy()[:, 0]])
        return {"gap": values - self.least, "loss": values}

    def diverged(self, metrics: Mapping[str, Floats]) -> npt.NDArray[np.bool_]:
        return ~(metrics["gap"] < DIVERGED)


class LogisticObjective(Objective):
    """f_i of a cohort in one round; mini-batches are drawn with replacement."""

    def __init__(self, problem: Logistic, rnd: Round) -> None:
        self.problem, self.rnd, self.taken = problem, rnd, 0

    def grad(self, y: Vector) -> Vector:
        return self.grads(y)[0]

    def grads(self, *points: Vector) -> list[Vector]:
        """Return the gradients at several points on the same next mini-batch."""
        problem, at = self.problem, self.taken % AHEAD
        if at == 0:
            keys = seeds.keys(problem.seeds, "batch", self.rnd.t, self.taken // AHEAD)[:, None]
            count = AHEAD * problem.batch
            of = seeds.children(keys, self.rnd.ids)
            self.drawn = seeds.integers(of, count, problem.rows.shape[1])
        self.taken += 1
        places = self.drawn[..., at * problem.batch : (at + 1) * problem.batch]
        rows = torch.from_numpy(problem.rows[self.rnd.ids[..., None], places])
        return [self._at(point, problem.x[rows], problem.y[rows]) for point in points]

    def full_grad(self, x: Vector) -> Vector:
        own = self.problem.rows[self.rnd.ids]
        parts = [
            self._at(x[:, [min(i, x.shape[1] - 1)]], self.problem.x[rows], self.problem.y[rows])
            for i, rows in enumerate(torch.from_numpy(own[:, [i]]) for i in range(own.shape[1]))
        ]
        return torch.cat(parts, 1)

    def _at(self, point: Vector, x: Tensor, y: Tensor) -> Vector:
        point = point.expand(*x.shape[:2], -1)
        wrong = torch.sigmoid((x @ point.unsqueeze(-1)).squeeze(-1)) - y
        g = (wrong.unsqueeze(-2) @ x).squeeze(-2) / x.shape[2]
        return g + self.problem.ridge * point
