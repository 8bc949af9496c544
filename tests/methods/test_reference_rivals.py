"""Methods with a memory of the clients at the server once more in plain NumPy, in the manner of `test_reference`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fedspan.core import seeds
from support.reference import LR, STEPS, Array, D, M, N, Reference, Rows, compare

Table = dict[str, Any]


def nothing() -> list[Array]:
    return [np.zeros((D, M)) for _ in range(N)]


@dataclass
class Rivals(Reference):
    """Each method as its paper has it; what the package keeps elsewhere or scaled follows from that."""

    table: list[Array] = field(default_factory=nothing)  # FedVARP's y_i, at the server

    h: Array = field(default_factory=lambda: np.zeros((D, M)))  # FedDyn's server state
    slope: list[Array] = field(default_factory=nothing)  # its ∇L_i

    def server(self, method: str) -> dict[str, Array]:
        mean = sum(w * y for w, y in zip(self.w, self.table, strict=True))
        every = {"fedvarp": {"c": mean / (LR * STEPS)}, "feddyn": {"h": self.h}}
        every["mimelite"] = {"m": self.m}
        return every.get(method, {})

    def clients(self, method: str) -> dict[str, list[Array]]:
        controls = [y / (LR * STEPS) for y in self.table]
        return {"fedvarp": {"c": controls}, "feddyn": {"h": self.slope}}.get(method, {})

    def fedvarp(self, rows: Rows, P: Array) -> None:
        change = {i: -delta for i, delta in self.plain(rows).items()}  # Δ_i = x − y
        v = self.mean({i: change[i] - self.table[i] for i in rows})
        for i in range(N):
            v = v + self.w[i] * self.table[i]
        for i in rows:
            self.table[i] = change[i]
        self.x = self.x - self.option["server_lr"] * v

    def feddyn(self, rows: Rows, P: Array) -> None:
        alpha, end = self.option["drift"]["alpha"], {}
        for i in rows:
            y = self.x
            for batch in rows[i]:
                y = y - LR * (self.grad(i, y, batch) - self.slope[i] + alpha * (y - self.x))
            end[i] = y
        for i in rows:
            self.slope[i] = self.slope[i] - alpha * (end[i] - self.x)
            self.h = self.h - alpha * self.w[i] * (end[i] - self.x)  # w_i = 1/N
        model = self.mean(end) - self.h / alpha
        self.x = self.x + self.option["server_lr"] * (model - self.x)

    def mimelite(self, rows: Rows, P: Array) -> None:
        beta1, end = self.option["beta1"], {}
        for i in rows:
            y = self.x
            for batch in rows[i]:
                y = y - LR * ((1 - beta1) * self.grad(i, y, batch) + beta1 * self.m)
            end[i] = y
        g = self.mean({i: self.grad(i, self.x) for i in rows})
        self.x = self.x + self.option["server_lr"] * (self.mean(end) - self.x)
        self.m = (1 - beta1) * g + beta1 * self.m

    def tamuna(self, rows: Rows, P: Array) -> None:
        """With the template as a matrix, and h_i as soon as x is known; both draws are the package's."""
        clients, p = list(rows), 1 / STEPS
        size = len(clients)
        s = size if self.option["owners"] is None else min(self.option["owners"], size)
        template = np.zeros((D * M, size))
        for j in range(D * M):
            for k in range(s):
                template[j, (s * j + k) % size] = 1
        columns = seeds.permute(seeds.keys((self.seed,), "template", self.t), size)[0]
        u = seeds.uniform(seeds.keys((self.seed,), "length", self.t), 1)[0, 0]
        length = next(n for n in range(1, 1000) if (1 - p) ** n < u)  # 1 − (1 − p)^L ≥ 1 − u
        end, mask = {}, {}
        for place, i in enumerate(clients):
            y = self.x
            for step in range(length):
                y = y - LR * (self.grad(i, y, rows[i][step]) - self.slope[i])
            end[i], mask[i] = y, template[:, columns[place]].reshape(M, D).T
        total = sum(self.w[i] * mask[i] * end[i] for i in clients)
        self.x = total / sum(self.w[i] * mask[i] for i in clients)
        eta = p * size * (s - 1) / (s * (size - 1))
        for i in clients:
            self.slope[i] = self.slope[i] + eta / LR * mask[i] * (self.x - end[i])
        whole = sum(w * h for w, h in zip(self.w, self.slope, strict=True))
        assert np.linalg.norm(whole) < 1e-12 * (1 + np.linalg.norm(self.slope))  # Σ w_i h_i = 0

    scaffnew = tamuna

    def fedexp(self, rows: Rows, P: Array) -> None:
        change = self.plain(rows)
        sizes = self.mean({i: np.sum(delta**2) for i, delta in change.items()})
        mean = self.mean(change)
        step = max(1.0, float(sizes) / (2 * np.sum(mean**2)))
        self.x = self.x + self.option["server_lr"] * step * mean


SPECS: list[Table] = [
    {"name": "fedvarp"},
    {"name": "fedvarp", "server_lr": 0.7},
    {"name": "fedexp", "extrapolate": True, "server_lr": 0.7},
    {"name": "fedexp"},
    {"name": "tamuna", "owners": 2},
    {"name": "scaffnew", "owners": None},
    {"name": "feddyn", "drift": {"alpha": 0.3}},
    {"name": "mimelite", "beta1": 0.8},
    {"name": "mimelite", "beta1": 0.5, "server_lr": 0.7},
    {"name": "feddyn", "drift": {"alpha": 2.0}, "server_lr": 0.7},
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
def test_each_method(tmp_path: Path, spec: Table) -> None:
    compare(tmp_path, spec, kind=Rivals)


@pytest.mark.parametrize("batch", ["full", 4])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize(
    "spec",
    {spec["name"]: spec for spec in reversed(SPECS)}.values(),
    ids=lambda spec: spec["name"],
)
def test_clients_of_unequal_size(
    tmp_path: Path,
    spec: Table,
    weights: Literal["uniform", "examples"],
    batch: int | Literal["full"],
) -> None:
    compare(tmp_path, spec, weights, batch, unequal=True, kind=Rivals)
