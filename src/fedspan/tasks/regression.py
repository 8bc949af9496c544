"""Matrix regression with client-specific feature shifts: the paper's toy problem, or your own A and B.

    f_i(X) = ‖A_i X − B_i‖² / (2 n_i) + (λ/2) ‖X‖²,    F = Σ w_i f_i,    rel_err = ‖X − X*‖ / ‖X*‖

Made data: rows of A_i ~ N(μ_i, I) with μ_i ~ N(0, het² I); one shared X_true ~ N(0, 1); B_i = A_i X_true + noise;
X⁰ = 0; mini-batches are drawn with replacement. The flat vector holds Xᵀ (outputs × inputs, as torch keeps weights).
Inside a subspace A Pᵀ and A x − B are computed once per round, so that a local step costs O(r):
P ∇f_i(x + Pᵀz) = (A Pᵀ)ᵀ (A Pᵀ z + A x − B) / n + λ (P x + z).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedspan.core import seeds
from fedspan.core.config import Projection, Settings, Training
from fedspan.core.errors import DataError, SpecError, at_least, not_negative
from fedspan.core.layout import Block, Layout, Vector
from fedspan.core.memory_limit import check_memory
from fedspan.core.objective import Direction, Objective, Plus, Problem
from fedspan.core.projector import LinearMap
from fedspan.core.registry import register
from fedspan.core.round import Round, Schedule
from fedspan.core.task import Holdings, Task
from fedspan.data.columns import digest, read

DIVERGED = 1e6  # a relative error above this will not recover
Floats = npt.NDArray[np.float64]
Data = tuple[Floats, Floats, npt.NDArray[np.int64]]  # A (N, n, d), B (N, n, m), n_i
Batch = tuple[
    Tensor, Tensor, Tensor
]  # rows of A or of A Pᵀ, their transpose, columns of −B or A x − B


@register
@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Linear regression with shifted features; with `data` the shapes come from the file."""

    het: float = 0.5  # spread of the clients' feature means
    target_het: float = 0.0  # spread of client-specific X_true around the shared one
    clients: int = 20  # number of clients, N
    dim: int = 100  # features, d
    outputs: int = 10  # columns of X, m
    samples: int = 50  # examples per client, n
    reg: float = 0.1  # λ: weight of the ridge penalty
    noise: float = 0.01  # standard deviation of the noise in B
    data_seed: int | None = None  # seed of the data; none: that of the run
    data: str | None = None  # .npz with A (N, n, d), B (N, n, m) and, for unequal sizes, n (N,)

    def __post_init__(self) -> None:
        for name in ("clients", "dim", "outputs", "samples"):
            at_least(name, getattr(self, name), 1)
        for name in ("het", "target_het", "noise", "reg"):
            not_negative(name, getattr(self, name))

    def build(self, seeds: tuple[int, ...], settings: Settings) -> RegressionProblem:
        """Loads or makes A and B, one set per run, and solves for X*."""
        training = Training(per_client=settings.training.per_client)
        refused = {"metrics": (), "training": training, "projection": Projection()}
        for name, default in refused.items():
            if getattr(settings, name) != default:
                raise SpecError(
                    f"`{name}` is for tasks with a torch model, and the task is 'regression'; leave it out"
                )
        if self.data is not None:
            data = [_load(Path(self.data))] * len(seeds)
        else:
            data = [self._make(seed, len(seeds)) for seed in seeds]
        return RegressionProblem(data, seeds, self.reg, settings)

    def fingerprint(self) -> dict[str, str]:
        """A hash of the file in place of its path."""
        return {} if self.data is None else {"data": digest(Path(self.data))}

    def holdings(self, seed: int) -> Holdings:
        """How many rows every client has."""
        if self.data is not None:
            rows = _load(Path(self.data))[2]
        else:
            check_memory(100 * self.clients, "make `clients` of the task smaller")
            rows = np.full(self.clients, self.samples)
        return Holdings(rows[:, None], [str(number) for number in range(len(rows))])

    def _make(self, seed: int, runs: int) -> Data:
        n_clients, n, d, m = self.clients, self.samples, self.dim, self.outputs
        # [A B] in two precisions, the clients' own X_true, and H
        numbers = 2 * n_clients * n * (d + m) + n_clients * d * m + 2 * d * d
        remedy = "make `clients`, `samples`, `dim` or `outputs` of the task smaller"
        check_memory(8 * runs * numbers, remedy)

        def normal(purpose: str, *shape: int) -> Floats:
            own = seed if self.data_seed is None else self.data_seed
            key = np.array([seeds.key(own, f"regression.{purpose}")], np.uint64)
            drawn: Floats = seeds.normal(key, math.prod(shape))[0].reshape(shape)
            return drawn

        a = normal("rows", n_clients, n, d) + self.het * normal("shift", n_clients, 1, d)
        target = normal("target", d, m) + self.target_het * normal("own", n_clients, d, m)
        b = a @ target + self.noise * normal("noise", n_clients, n, m)
        return a, b, np.full(n_clients, n)


def _load(path: Path) -> Data:
    """A, B and the rows of each client from an .npz; rows past a client's n are zeroed."""
    found, what = read(path), f"`task.data` {str(path)!r}"
    for name in ("A", "B"):
        if name not in found:
            raise DataError(f"{what} has no array {name!r}; it needs A (N, n, d) and B (N, n, m)")
    a, b = found["A"], found["B"]
    if a.ndim != 3 or b.ndim != 3 or a.shape[:2] != b.shape[:2] or 0 in (*a.shape, *b.shape):
        raise DataError(f"A {a.shape} and B {b.shape} in {what} must be (N, n, d) and (N, n, m)")
    clients, rows = a.shape[:2]
    counts = found.get("n", np.full(clients, rows))
    whole = counts.shape == (clients,) and counts.dtype.kind in "iu"
    if not whole or counts.min() < 1 or counts.max() > rows:
        raise DataError(f"n in {what} must be {clients} whole numbers from 1 to {rows}")
    if a.dtype.kind not in "iuf" or b.dtype.kind not in "iuf":
        raise DataError(f"A and B in {what} must be numbers, got {a.dtype} and {b.dtype}")
    inside = np.arange(rows)[:, None] < counts[:, None, None]
    a, b = (np.where(inside, v, 0).astype(np.float64) for v in (a, b))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise DataError(f"A or B in {what} has values that are not finite; remove or fill them")
    return a, b, counts.astype(np.int64)


class RegressionProblem(Problem):
    """The data of all clients in all runs, and the optimum."""

    def __init__(
        self, data: list[Data], of_runs: tuple[int, ...], reg: float, settings: Settings
    ) -> None:
        batch, dtype = settings.batch_size, settings.torch_dtype
        (self.clients, self.samples, self.d), self.m = data[0][0].shape, data[0][1].shape[2]
        if batch != "full":  # drawn with replacement, so that it may exceed the rows of a client
            needed = 8 * len(of_runs) * batch * (self.d + self.m)
            check_memory(needed, f"make `batch_size` {batch} smaller")
        self.seeds, self.batch, self.reg = of_runs, batch, reg
        # mini-batches of several rounds
        self.ahead: tuple[object, tuple[Tensor, ...]] | None = None
        self.counts = data[0][2]  # n_i
        self.layout = Layout((Block("X", (self.m, self.d), axis=1),), dtype)
        self.weights = settings.participation.shares(self.counts)
        if batch != "full":
            self.steps_per_epoch = max(1, round(float(self.counts.mean()) / batch))
        # Rows are scaled by 1/√|batch|, so that rowsᵀ(rows y − goal) is the mean over a batch.
        self.scale = 1 / np.sqrt(self.counts if batch == "full" else np.full(self.clients, batch))
        joined = np.stack([np.concatenate([a, -b], -1) for a, b, _ in data])
        self.data = torch.from_numpy(joined * self.scale[:, None, None]).to(dtype)
        # [A −B], (runs, N, n, d + m)
        self.by_client, self.by_row = self.data.flatten(0, 1), self.data.flatten(0, 2)
        self.x0 = torch.zeros(len(of_runs), 1, self.layout.size, dtype=dtype)
        share = np.full(self.clients, 1 / self.clients) if self.weights is None else self.weights
        row = share / self.counts  # weight of one row of client i in F
        self.terms = [_normal_equations(a, b, row, reg) for a, b, _ in data]

    def examples(self, client: int) -> int:
        """n_i."""
        return int(self.counts[client])

    def batches_of(self, client: int) -> float:
        """n_i / |batch|."""
        return 1.0 if self.batch == "full" else self.examples(client) / self.batch

    def picks(self, rounds: Schedule, part: int, steps: int) -> Tensor:
        """Row numbers of mini-batches, (rounds, steps, runs · S, batch), decided by (seed, round, client, step)."""
        assert self.batch != "full"
        numbers = range(rounds.first, rounds.first + len(rounds.ids))
        keys = seeds.keys_of_rounds(self.seeds, "batch", numbers, part)[..., None]
        counts = self.counts[rounds.ids][..., None]
        drawn = seeds.integers(seeds.children(keys, rounds.ids), steps * self.batch, counts)
        found = torch.from_numpy(drawn).view(len(numbers), -1, steps, self.batch)
        return found.transpose(1, 2).contiguous()

    def rows_of(self, rnd: Round) -> Tensor:
        """[A −B] of a cohort, (runs · S, n, d + m)."""
        return self.by_client.index_select(0, torch.from_numpy(rnd.rows))

    def batches(self, rnd: Round, width: int, inside: Tensor | None = None) -> Iterator[Batch]:
        """One mini-batch per step, gathered K steps at a time from [A −B], or from `inside`: the cohort's rows × P.

        It is the problem's and not the objective's, which holds it: in a cycle, batches would wait for the collector.
        """
        count, steps = rnd.ids.size, max(1, rnd.local_steps)
        for part in itertools.count():
            if self.batch == "full":
                rows = self.rows_of(rnd) if inside is None else inside
                taken = rows.view(1, count, self.samples, -1)
            else:
                rows = self.by_row if inside is None else inside
                index = self._index(rnd, part, steps, inside is not None)
                taken = rows.index_select(0, index).view(steps, count, self.batch, -1)
            left, right = taken.narrow(3, 0, width), taken.narrow(3, width, self.m).mT
            yield from zip(left.unbind(0), left.mT.unbind(0), right.unbind(0), strict=True)

    def _index(self, rnd: Round, part: int, steps: int, inside: bool) -> Tensor:
        """Which rows of all clients, or of the cohort (`inside`), the mini-batches of `steps` local steps take."""
        rounds, key = rnd.schedule, (rnd.schedule, steps, inside)
        known = part == 0 and rounds is not None  # of several rounds at once
        if rounds is None or not known:
            rounds = Schedule(rnd.t, rnd.ids[None], rnd.rows[None])
        if not known or self.ahead is None or self.ahead[0] != key:
            clients = np.arange(rounds.rows.shape[1])[None] if inside else rounds.rows
            first = torch.from_numpy(clients * self.samples)[:, None, :, None]
            found = self.picks(rounds, part, steps).add_(first).flatten(1).unbind(0)
            if not known:
                return found[0]
            self.ahead = key, found
        return self.ahead[1][rnd.t - rounds.first]

    def cohort(self, rnd: Round) -> RegressionObjective:
        """The objectives of the clients in a round."""
        return RegressionObjective(self, rnd)

    def optimum(self) -> Vector:
        """X*, (runs, 1, d·m) in float64."""
        return torch.from_numpy(np.stack([best.T.reshape(1, -1) for *_, best in self.terms]))

    def lowest(self) -> Floats:
        """F(X*)."""
        return self.evaluate(self.optimum())["loss"]

    def smoothness(self) -> Floats:
        """Largest eigenvalues of A_iᵀA_i/n_i + λ."""
        rows = self.data[..., : self.d].double().numpy()
        top: Floats = np.linalg.norm(rows, 2, (2, 3)) ** 2 / (self.counts * self.scale**2)
        return top + self.reg

    def evaluate(self, x: Vector, buffers: Vector | None = None) -> Mapping[str, Floats]:
        """`rel_err` and `loss` = F(X), from the normal equations: no pass over the data."""
        points = x.double().numpy().reshape(-1, self.m, self.d).swapaxes(1, 2)
        errors, losses = [], []
        with np.errstate(over="ignore", invalid="ignore"):
            for point, (hessian, linear, constant, best) in zip(points, self.terms, strict=True):
                errors.append(np.linalg.norm(point - best) / np.linalg.norm(best))
                square = 0.5 * np.vdot(point, hessian @ point)
                losses.append(square - np.vdot(point, linear) + constant)
        return {"rel_err": np.array(errors), "loss": np.array(losses)}

    def diverged(self, metrics: Mapping[str, Floats]) -> npt.NDArray[np.bool_]:
        """Not finite, or a relative error above a million."""
        return ~(metrics["rel_err"] < DIVERGED)


class RegressionObjective(Objective):
    """f_i of a cohort in one round; the mini-batches of all its local steps are gathered at once."""

    def __init__(self, problem: RegressionProblem, rnd: Round) -> None:
        self.problem, self.rnd = problem, rnd
        self.batches = problem.batches(rnd, problem.d)

    def grad(self, y: Vector) -> Vector:
        """(A y − B)ᵀ A / |batch| + λ y on the next mini-batch."""
        return self.direction()(y)

    def direction(self, plus: Plus = None) -> Direction:
        if callable(plus):
            return super().direction(plus)
        return Descent(self.problem, self.rnd, self.batches, plus)

    def full_grad(self, x: Vector) -> Vector:
        """The same on all rows, which are scaled for a mini-batch."""
        problem = self.problem
        factor = 1 / (np.sqrt(problem.counts) * problem.scale)[self.rnd.ids.ravel()]
        scaled = problem.rows_of(self.rnd) * torch.from_numpy(factor).to(x.dtype).view(-1, 1, 1)
        rows, offset = scaled.split([problem.d, problem.m], -1)
        return Descent(problem, self.rnd, iter([(rows, rows.mT, offset.mT)]))(x)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        """z ↦ P ∇f(x + Pᵀz) + plus. A Pᵀ and A x − B come from one product, [A −B] [[Pᵀ, x], [0, I]]."""
        (factor,), problem, runs = P.factors, self.problem, len(self.rnd.ids)
        if factor is None:
            return super().restrict(x, P, plus)
        d, m = problem.d, problem.m
        below, beside = _frame(runs, d, factor.rank, m, x.dtype)
        upper = torch.cat([factor.columns().mT, x.view(runs, m, d), below], 1)
        right = torch.cat([upper, beside], 2)
        rows = problem.rows_of(self.rnd).view(runs, -1, d + m)
        inside = torch.bmm(rows, right.mT).view(-1, right.shape[1])  # [A Pᵀ, A x − B, 0]
        px, reg = P @ x, problem.reg
        ridge = reg * px if plus is None else torch.add(plus, px, alpha=reg)
        batches = problem.batches(self.rnd, factor.rank, inside)
        return Descent(problem, self.rnd, batches, ridge)


class Descent:
    """y ↦ (y rowsᵀ + offset) rows + λ y + fixed on the next batch. Products with the wider side last are faster."""

    takes_steps = True

    def __init__(
        self,
        problem: RegressionProblem,
        rnd: Round,
        batches: Iterator[Batch],
        fixed: Tensor | None = None,
    ) -> None:
        self.batches, self.reg, self.cohort = batches, problem.reg, rnd.ids.shape
        self.shape = rnd.ids.size, problem.m, -1
        if fixed is not None:
            fixed = fixed.expand(*self.cohort, -1).reshape(self.shape)
        self.fixed = fixed

    def __call__(self, y: Vector) -> Vector:
        everyone = y if y.shape[1] == self.cohort[1] else y.expand(*self.cohort, -1)
        return self._at(everyone.reshape(self.shape)).view(*self.cohort, -1)

    def descend(self, start: Vector, lr: float, steps: int) -> Vector:
        y = start.expand(*self.cohort, -1).reshape(self.shape).clone()
        for _ in range(steps):
            y.add_(self._at(y), alpha=-lr)
        return y.view(*self.cohort, -1)

    def _at(self, y: Tensor) -> Tensor:
        """The direction at a matrix (m, r) of each client."""
        rows, columns, offset = next(self.batches)
        g = torch.baddbmm(y, torch.baddbmm(offset, y, columns), rows, beta=self.reg)
        return g if self.fixed is None else g.add_(self.fixed)


@functools.lru_cache(maxsize=16)
def _frame(runs: int, d: int, r: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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
