"""Matrix regression with client-specific feature shifts: the paper's toy problem, or your own A and B.

    f_i(X) = ‖A_i X − B_i‖² / (2 n_i) + (λ/2) ‖X‖²,    F = Σ w_i f_i,    rel_err = ‖X − X*‖ / ‖X*‖

Made data: rows of A_i ~ N(μ_i, I) with μ_i ~ N(0, het² I); one shared X_true ~ N(0, 1); B_i = A_i X_true + noise;
X⁰ = 0; mini-batches are drawn with replacement. The flat vector holds Xᵀ (outputs × inputs, as torch keeps weights).
Inside a subspace A Pᵀ and A x − B are computed once per round, so that a local step costs O(r):
P ∇f_i(x + Pᵀz) = (A Pᵀ)ᵀ (A Pᵀ z + A x − B) / n + λ (P x + z).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedspan.core import seeds
from fedspan.core.config import Projection, Settings, Training
from fedspan.core.errors import DataError, SpecError, at_least, one_line, positive
from fedspan.core.memory_limit import check_memory
from fedspan.core.registry import register
from fedspan.core.task import Holdings, Task
from fedspan.data.columns import UNREADABLE, digest, read_npz
from fedspan.tasks._least_squares import Floats, RegressionProblem


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
    data: str | None = (
        None  # .npz with A (N, n, d), B (N, n, m) and, for clients of unequal size, n (N,)
    )

    def __post_init__(self) -> None:
        for name in ("clients", "dim", "outputs", "samples"):
            at_least(name, getattr(self, name), 1)
        for name in ("het", "target_het", "noise", "reg"):
            if getattr(self, name) != 0:
                positive(name, getattr(self, name))

    def build(self, seeds: tuple[int, ...], settings: Settings) -> RegressionProblem:
        """Loads or makes A and B, one set per run, and solves for X*."""
        for name, default in (
            ("metrics", ()),
            ("training", Training()),
            ("projection", Projection()),
        ):
            if getattr(settings, name) != default:
                raise SpecError(
                    f"`{name}` is for tasks with a torch model, and the task is 'regression'; leave it out"
                )
        if self.data is not None:
            one = _load(Path(self.data))
            data = [one] * len(seeds)
        else:
            self._check_memory(len(seeds))
            data = [
                self._make(seed if self.data_seed is None else self.data_seed) for seed in seeds
            ]
        return RegressionProblem(data, seeds, self.reg, settings)

    def _check_memory(self, runs: int) -> None:
        """Refuses sizes that do not fit: [A B] in two precisions, the clients' own X_true, and H."""
        rows, d, m = self.clients * self.samples, self.dim, self.outputs
        numbers = 2 * rows * (d + m) + self.clients * d * m + 2 * d * d
        check_memory(
            8 * runs * numbers, "make `clients`, `samples`, `dim` or `outputs` of the task smaller"
        )

    def fingerprint(self) -> dict[str, str]:
        """A hash of the file in place of its path."""
        return {} if self.data is None else {"data": digest(Path(self.data))}

    def holdings(self, seed: int) -> Holdings:
        """How many rows every client has."""
        check_memory(100 * self.clients, "make `clients` of the task smaller")
        rows = (
            np.full(self.clients, self.samples) if self.data is None else _load(Path(self.data))[2]
        )
        return Holdings(rows[:, None], [str(number) for number in range(len(rows))])

    def _make(self, seed: int) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
        n_clients, n, d, m = self.clients, self.samples, self.dim, self.outputs

        def normal(purpose: str, *shape: int) -> Floats:
            key = np.array([seeds.key(seed, f"regression.{purpose}")], np.uint64)
            drawn: Floats = seeds.normal(key, math.prod(shape))[0].reshape(shape)
            return drawn

        a = normal("rows", n_clients, n, d) + self.het * normal("shift", n_clients, 1, d)
        target = normal("target", d, m) + self.target_het * normal("own", n_clients, d, m)
        b = a @ target + self.noise * normal("noise", n_clients, n, m)
        return a, b, np.full(n_clients, n)


def _load(path: Path) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """A, B and the rows of each client from an .npz; rows past a client's n are zeroed."""
    if not path.is_file():
        raise DataError(
            f"data file {str(path)!r} does not exist; give `task.data` the path of an .npz with A and B"
        )
    try:
        found = read_npz(path)
    except UNREADABLE as error:
        why = one_line(str(error) or type(error).__name__)
        raise DataError(f"data file {str(path)!r} is not a plain .npz ({why})") from None
    for name in ("A", "B"):
        if name not in found:
            raise DataError(
                f"data file {str(path)!r} has no array {name!r}; it needs A (N, n, d) and B (N, n, m)"
            )
    a, b = found["A"], found["B"]
    if a.ndim != 3 or b.ndim != 3 or a.shape[:2] != b.shape[:2] or 0 in (*a.shape, *b.shape):
        raise DataError(
            f"A {a.shape} and B {b.shape} in {str(path)!r} must be (N, n, d) and (N, n, m)"
        )
    counts = found.get("n", np.full(a.shape[0], a.shape[1]))
    if (
        counts.shape != (a.shape[0],)
        or counts.dtype.kind not in "iu"
        or counts.min() < 1
        or counts.max() > a.shape[1]
    ):
        raise DataError(
            f"n in {str(path)!r} must be {a.shape[0]} whole numbers from 1 to {a.shape[1]}"
        )
    if a.dtype.kind not in "iuf" or b.dtype.kind not in "iuf":
        raise DataError(f"A and B in {str(path)!r} must be numbers, got {a.dtype} and {b.dtype}")
    inside = np.arange(a.shape[1])[None, :, None] < counts[:, None, None]
    a, b = (np.where(inside, v, 0).astype(np.float64) for v in (a, b))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise DataError(
            f"A or B in {str(path)!r} has values that are not finite; remove or fill them"
        )
    return a, b, counts.astype(np.int64)
