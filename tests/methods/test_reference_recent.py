"""Methods of recent papers once more in plain NumPy, in the manner of `test_reference`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from support.reference import LR, Array, D, M, N, Reference, Rows, compare

Table = dict[str, Any]


def nothing() -> list[Array]:
    return [np.zeros((D, M)) for _ in range(N)]


def flat(X: Array) -> list[float]:
    """The flat order of the package: Xᵀ row by row."""
    return X.T.ravel().tolist()


def matrix(values: list[float]) -> Array:
    return np.array(values).reshape(M, D).T


def largest(values: list[float], k: int, chunk: int) -> list[int]:
    """Places of the k largest values of each chunk."""
    found = []
    for start in range(0, len(values), chunk):
        own = range(start, min(start + chunk, len(values)))
        found += sorted(sorted(own, key=lambda j: -abs(values[j]))[:k])
    return found


def in_two_bits(values: list[float]) -> list[float]:
    """Each value as the mean size of those on its side of the mean size, with its sign."""
    mean = sum(map(abs, values)) / len(values)
    sides = [[abs(a) for a in values if (abs(a) > mean) == above] for above in (False, True)]
    sizes = [sum(side) / len(side) if side else 0.0 for side in sides]
    return [math.copysign(sizes[abs(a) > mean], a) for a in values]


@dataclass
class Rivals(Reference):
    """The state of one run, and a round of each method."""

    kept: list[Array] = field(default_factory=nothing)  # m_i of FedSMU, e_i of SparseLoCo
    moments: list[Any] = field(default_factory=lambda: [(0.0, 0.0, 0)] * N)  # AdamW's

    def clients(self, method: str) -> dict[str, list[Array]]:
        return {{"fedsmu": "m", "sparseloco": "e"}[method]: self.kept}

    def fedsmu(self, rows: Rows, P: Array) -> None:
        one, two = self.option["uplink"]["beta1"], self.option["uplink"]["beta2"]
        u = {}
        for i, moved in self.plain(rows).items():
            u[i] = np.sign(-one * self.kept[i] + (1 - one) * moved)
            self.kept[i] = two * self.kept[i] - (1 - two) * moved  # the package's m_i is downhill
        own = self.option["server"]
        self.x = self.x + own["lr"] * (self.mean(u) - own["decay"] * self.x)

    def sparseloco(self, rows: Rows, P: Array) -> None:
        uplink, adam = self.option["uplink"], self.option["local"]
        inner, q = uplink["compressor"]["inner"], {}
        for i in rows:
            y, (m, v, t) = self.x, self.moments[i]
            for batch in rows[i]:
                g, t = self.grad(i, y, batch), t + 1
                m = adam["beta1"] * m + (1 - adam["beta1"]) * g
                v = adam["beta2"] * v + (1 - adam["beta2"]) * g * g
                up, low = m / (1 - adam["beta1"] ** t), np.sqrt(v / (1 - adam["beta2"] ** t))
                y = y - LR * up / (low + adam["eps"])
            self.moments[i] = m, v, t
            e = flat(uplink["decay"] * self.kept[i] + self.x - y)
            places = largest(e, inner["k"], inner["chunk"])
            sent = dict(zip(places, in_two_bits([e[j] for j in places]), strict=True))
            q[i] = matrix([sent.get(j, 0.0) for j in range(D * M)])
            self.kept[i] = matrix(e) - q[i]
        self.x = self.x - self.option["server_lr"] * self.mean(q)


SMU = {
    "name": "fedsmu",
    "uplink": {"name": "sign_momentum", "beta1": 0.7, "beta2": 0.8},
    "server": {"name": "decay", "lr": 0.05, "decay": 0.1},
}
TWO_BITS = {
    "name": "compose",
    "outer": {"name": "sign", "sizes": 2},
    "inner": {"name": "topk", "k": 3, "chunk": 10},
}
LOCO = {
    "name": "sparseloco",
    "local": {"name": "adamw", "beta1": 0.8, "beta2": 0.9, "eps": 1e-2, "moments": "project"},
    "uplink": {"name": "feedback", "decay": 0.7, "compressor": TWO_BITS},
    "server_lr": 0.7,
}
SPECS: list[Table] = [SMU, LOCO]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_each_method(tmp_path: Path, spec: Table) -> None:
    compare(tmp_path, spec, kind=Rivals)


@pytest.mark.parametrize("batch", ["full", 4])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
def test_clients_of_unequal_size(tmp_path: Path, spec: Table, batch: int | Literal["full"]) -> None:
    compare(tmp_path, spec, "examples", batch, unequal=True, kind=Rivals)
