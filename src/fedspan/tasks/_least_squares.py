"""The losses of the regression task and their optimum; gradients for a whole cohort as batched products."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import seeds
from fedspan.core.config import Settings
from fedspan.core.errors import SpecError
from fedspan.core.layout import Block, Layout, Vector
from fedspan.core.linear_map import LinearMap
from fedspan.core.memory_limit import check_memory
from fedspan.core.objective import Direction, Objective, Plus, Problem, SteppingDirection
from fedspan.core.round import Round, Schedule

DIVERGED = 1e6  # a relative error above this will not recover
Floats = npt.NDArray[np.float64]
Batch = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # rows of A or of A Pᵀ, their transpose, columns of −B or A x − B


class RegressionProblem(Problem):
    """The data of all clients in all runs, and the optimum."""

    def __init__(
        self,
        data: list[tuple[Floats, Floats, npt.NDArray[np.int64]]],
        of_runs: tuple[int, ...],
        reg: float,
        settings: Settings,
    ) -> None:
        batch, dtype = settings.batch_size, settings.torch_dtype
        (self.clients, self.samples, d), m = data[0][0].shape, data[0][1].shape[2]
        if batch != "full":  # drawn with replacement, so that it may exceed the rows of a client
            check_memory(8 * len(of_runs) * batch * (d + m), f"make `batch_size` {batch} smaller")
        self.seeds, self.batch, self.reg = of_runs, batch, reg
        self.ahead: tuple[object, tuple[torch.Tensor, ...]] | None = (
            None  # mini-batches of several rounds
        )
        self.counts = data[0][2]  # n_i
        self.layout = Layout((Block("X", (m, d), axis=1),), dtype)
        self.weights = settings.participation.shares(self.counts)
        self.steps_per_epoch = (
            1 if batch == "full" else max(1, round(float(self.counts.mean()) / batch))
        )
        # Rows are scaled by 1/√|batch|, so that rowsᵀ(rows y − goal) is the mean over a batch.
        self.scale = 1 / np.sqrt(self.counts if batch == "full" else np.full(self.clients, batch))
        joined = (
            np.stack([np.concatenate([a, -b], -1) for a, b, _ in data]) * self.scale[:, None, None]
        )
        self.data = torch.from_numpy(joined).to(dtype)  # [A −B], (runs, N, n, d + m)
        self.by_client, self.by_row = self.data.flatten(0, 1), self.data.flatten(0, 2)
        self.x0 = torch.zeros(len(of_runs), 1, d * m, dtype=dtype)
        share = np.full(self.clients, 1 / self.clients) if self.weights is None else self.weights
        row = share / self.counts  # weight of one row of client i in F
        self._terms = [_normal_equations(a, b, row, reg) for a, b, _ in data]

    def examples(self, client: int) -> int:
        """n_i."""
        return int(self.counts[client])

    def picks(
        self,
        of_runs: tuple[int, ...],
        rounds: range,
        part: int,
        ids: npt.NDArray[np.int64],
        steps: int,
    ) -> torch.Tensor:
        """Row numbers of mini-batches, (rounds, steps, runs · S, batch), decided by (seed, round, client, step)."""
        assert self.batch != "full"
        keys = seeds.keys_of_rounds(of_runs, "batch", rounds, part)[..., None]
        drawn = seeds.integers(
            seeds.children(keys, ids), steps * self.batch, self.counts[ids][..., None]
        )
        return (
            torch.from_numpy(drawn)
            .view(len(rounds), -1, steps, self.batch)
            .transpose(1, 2)
            .contiguous()
        )

    def index(
        self, of_runs: tuple[int, ...], rounds: Schedule, part: int, steps: int, inside: bool
    ) -> tuple[torch.Tensor, ...]:
        """The picks of each round as row numbers, in the rows of all clients or (`inside`) in those of the cohort."""
        numbers = range(rounds.first, rounds.first + len(rounds.ids))
        clients = np.arange(rounds.rows.shape[1])[None] if inside else rounds.rows
        first = torch.from_numpy(clients * self.samples)[:, None, :, None]
        return (
            self.picks(of_runs, numbers, part, rounds.ids, steps).add_(first).flatten(1).unbind(0)
        )

    def rows_of(self, rnd: Round) -> torch.Tensor:
        """[A −B] of a cohort, (runs · S, n, d + m)."""
        return self.by_client.index_select(0, torch.from_numpy(rnd.rows))

    def batches(
        self, rnd: Round, width: int, inside: torch.Tensor | None = None
    ) -> Iterator[Batch]:
        """One mini-batch per step, gathered K steps at a time from [A −B], or from `inside`: the cohort's rows × P.

        It is the problem's and not the objective's, which holds it: in a cycle, batches would wait for the collector.
        """
        count, steps, m = rnd.ids.size, max(1, rnd.local_steps), self.layout.blocks[0].shape[0]
        for part in itertools.count():
            if self.batch == "full":
                taken = (self.rows_of(rnd) if inside is None else inside).view(
                    1, count, self.samples, -1
                )
            else:
                flat, index = (
                    self.by_row if inside is None else inside,
                    self._index(rnd, part, steps, inside is not None),
                )
                taken = flat.index_select(0, index).view(steps, count, self.batch, -1)
            left, right = taken.narrow(3, 0, width), taken.narrow(3, width, m).mT
            yield from zip(left.unbind(0), left.mT.unbind(0), right.unbind(0), strict=True)

    def _index(self, rnd: Round, part: int, steps: int, inside: bool) -> torch.Tensor:
        """Which rows the mini-batches of `steps` local steps take, one after the other."""
        if part > 0 or rnd.schedule is None:
            return self.index(
                rnd.seeds, Schedule(rnd.t, rnd.ids[None], rnd.rows[None]), part, steps, inside
            )[0]
        key = (rnd.schedule, steps, inside)
        if self.ahead is None or self.ahead[0] != key:
            self.ahead = (key, self.index(rnd.seeds, rnd.schedule, 0, steps, inside))
        return self.ahead[1][rnd.t - rnd.schedule.first]

    def cohort(self, rnd: Round) -> RegressionObjective:
        """The objectives of the clients in a round."""
        return RegressionObjective(self, rnd)

    def optimum(self) -> Vector:
        """X*, (runs, 1, d·m) in float64."""
        return torch.from_numpy(np.stack([best.T.reshape(1, -1) for _, _, _, best in self._terms]))

    def lowest(self) -> Floats:
        """F(X*)."""
        return self.evaluate(self.optimum())["loss"]

    def smoothness(self) -> tuple[Floats, Floats]:
        """Largest eigenvalues of A_iᵀA_i/n_i + λ, and of the Hessian of F."""
        rows = self.data[..., : self.layout.blocks[0].inputs].double().numpy()
        top = np.linalg.norm(rows, 2, (2, 3)) ** 2 / (self.counts * self.scale**2)
        return top + self.reg, np.array(
            [np.linalg.norm(hessian, 2) for hessian, _, _, _ in self._terms]
        )

    def hessians(self) -> list[Floats]:
        """H of F for each run, (d, d)."""
        return [hessian for hessian, _, _, _ in self._terms]

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> Mapping[str, Floats]:
        """`rel_err` and `loss` = F(X), from the normal equations: no pass over the data."""
        points = (
            x.double().numpy().reshape(len(self.seeds), *self.layout.blocks[0].shape).swapaxes(1, 2)
        )
        out: dict[str, list[float]] = {"rel_err": [], "loss": []}
        with np.errstate(over="ignore", invalid="ignore"):
            for point, (hessian, linear, constant, best) in zip(points, self._terms, strict=True):
                out["rel_err"].append(float(np.linalg.norm(point - best) / np.linalg.norm(best)))
                out["loss"].append(
                    float(0.5 * np.vdot(point, hessian @ point) - np.vdot(point, linear) + constant)
                )
        return {name: np.array(values) for name, values in out.items()}

    def diverged(self, metrics: Mapping[str, Floats]) -> npt.NDArray[np.bool_]:
        """Not finite, or a relative error above a million."""
        return ~(metrics["rel_err"] < DIVERGED)


class RegressionObjective(Objective):
    """f_i of a cohort in one round; the mini-batches of all its local steps are gathered at once."""

    def __init__(self, problem: RegressionProblem, rnd: Round) -> None:
        self.problem, self.rnd = problem, rnd
        self.runs, self.cohort = rnd.ids.shape
        self.m, self.d = problem.layout.blocks[0].shape
        self._batches = problem.batches(rnd, self.d)

    def grad(self, y: Vector) -> Vector:
        """(A y − B)ᵀ A / |batch| + λ y on the next mini-batch."""
        return self._along(self._batches)(y)

    def direction(self, plus: Plus = None) -> Direction:
        return super().direction(plus) if callable(plus) else self._along(self._batches, plus)

    def full_grad(self, x: Vector) -> Vector:
        """The same on all rows."""
        rows, offset = (self.problem.rows_of(self.rnd) * self._all_rows()).split(
            [self.d, self.m], -1
        )
        return self._along(iter([(rows, rows.mT, offset.mT)]))(x)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f(x + Pᵀz) + plus. A Pᵀ and A x − B come from one product, [A −B] [[Pᵀ, x], [0, I]]."""
        (factor,), d, m = P.factors, self.d, self.m
        if factor is None:
            return super().restrict(x, P, plus)
        below, beside = _frame(self.runs, d, factor.rank, m, x.dtype)
        right = torch.cat(
            [torch.cat([factor.columns().mT, x.view(self.runs, m, d), below], 1), beside], 2
        )
        inside = torch.bmm(
            self.problem.rows_of(self.rnd).view(self.runs, -1, d + m), right.mT
        )  # [A Pᵀ, A x − B, 0]
        ridge = (
            self.problem.reg * (P @ x)
            if plus is None
            else torch.add(plus, P @ x, alpha=self.problem.reg)
        )
        return self._along(
            self.problem.batches(self.rnd, factor.rank, inside.view(-1, right.shape[1])), ridge
        )

    def _along(self, batches: Iterator[Batch], plus: Vector | None = None) -> Descent:
        count = self.runs * self.cohort
        fixed = (
            None
            if plus is None
            else plus.expand(self.runs, self.cohort, -1).reshape(count, self.m, -1)
        )
        return Descent(batches, fixed, self.problem.reg, (self.runs, self.cohort), self.m)

    def _all_rows(self) -> torch.Tensor:
        """The factor from rows scaled for a mini-batch to rows scaled for all n_i."""
        factor = 1 / (np.sqrt(self.problem.counts) * self.problem.scale)
        return (
            torch.from_numpy(factor[self.rnd.ids.ravel()])
            .to(self.problem.data.dtype)
            .view(-1, 1, 1)
        )


class Descent(SteppingDirection):
    """y ↦ (y rowsᵀ + offset) rows + λ y + fixed on the next batch. Products with the wider side last are faster."""

    takes_steps = True

    def __init__(
        self,
        batches: Iterator[Batch],
        fixed: torch.Tensor | None,
        reg: float,
        cohort: tuple[int, int],
        m: int,
    ) -> None:
        self.batches, self.fixed, self.reg, self.m = batches, fixed, reg, m
        self.cohort, self.count = cohort, cohort[0] * cohort[1]

    def __call__(self, y: Vector) -> Vector:
        everyone = y if y.shape[1] == self.cohort[1] else y.expand(*self.cohort, -1)
        return self._at(everyone.reshape(self.count, self.m, -1)).view(*self.cohort, -1)

    def descend(self, start: Vector, lr: float, steps: int) -> Vector:
        y = start.expand(*self.cohort, -1).reshape(self.count, self.m, -1).clone()
        for _ in range(steps):
            y.add_(self._at(y), alpha=-lr)
        return y.view(*self.cohort, -1)

    def _at(self, y: torch.Tensor) -> torch.Tensor:
        """The direction at a matrix (m, r) of each client."""
        rows, columns, offset = next(self.batches)
        g = torch.baddbmm(y, torch.baddbmm(offset, y, columns), rows, beta=self.reg)
        return g if self.fixed is None else g.add_(self.fixed)


@functools.lru_cache(maxsize=16)
def _frame(
    runs: int, d: int, r: int, m: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What completes [P; xᵀ] to [[P, 0], [xᵀ, I], [0, 0]]; products are faster if one side is a multiple of 16."""
    zeros = -(r + m) % 16
    beside = torch.eye(r + m + zeros, m, dtype=dtype).roll(r, 0)
    return torch.zeros(runs, zeros, d, dtype=dtype), beside.expand(runs, -1, -1)


def _normal_equations(
    a: Floats, b: Floats, row: Floats, reg: float
) -> tuple[Floats, Floats, float, Floats]:
    """(H, G, const, X*) of F(X) = ½⟨X, H X⟩ − ⟨X, G⟩ + const, in float64."""
    weighted = a * row[:, None, None]
    hessian = np.tensordot(weighted, a, ((0, 1), (0, 1))) + reg * np.eye(a.shape[2])
    linear = np.tensordot(weighted, b, ((0, 1), (0, 1)))
    constant = 0.5 * float((row[:, None, None] * b * b).sum())
    try:
        best = np.linalg.solve(hessian, linear).astype(np.float64)
    except np.linalg.LinAlgError:
        raise SpecError("the regression has no unique optimum; set `task.reg` above 0") from None
    return hessian, linear, constant, best
