"""The methods with compressed messages once more in plain NumPy, in the manner of `test_reference`.

The compressors are written again too, number by number. What both sides must share is the key of each draw, and what
the stream of that key gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fedspan.core import seeds
from support.reference import LR, STEPS, Array, D, M, N, Reference, Rows, compare

Table = dict[str, Any]


def key_array(key: int) -> seeds.Keys:
    return np.array([key], np.uint64)


def code(table: Table, v: list[float], key: int) -> list[float]:
    """C(v) of a list of numbers."""
    n, name = len(v), table["name"]
    if name == "topk":
        largest = sorted(range(n), key=lambda j: -abs(v[j]))[: count(table, n)]
        return [v[j] if j in largest else 0.0 for j in range(n)]
    if name == "randk":
        k = count(table, n)
        drawn = set(seeds.choose(key_array(key), n, k)[0].tolist())
        factor = n / k if table.get("unbiased", True) else 1.0
        return [v[j] * factor if j in drawn else 0.0 for j in range(n)]
    if name == "sign":
        mean = sum(abs(a) for a in v) / n
        return [mean if a >= 0 else -mean for a in v]
    if name == "qsgd":
        return qsgd(
            v,
            table.get("levels", 7),
            table.get("bucket", n),
            seeds.uniform(key_array(key), n)[0].tolist(),
        )
    assert name == "compose"
    assert table["inner"]["name"] == "topk"
    kept = code(table["inner"], v, 0)
    places = [j for j in range(n) if kept[j] != 0]
    outer = int(seeds.children(key_array(key), np.array([1]))[0])
    found = dict(zip(places, code(table["outer"], [v[j] for j in places], outer), strict=True))
    return [found.get(j, 0.0) for j in range(n)]


def qsgd(v: list[float], s: int, bucket: int, u: list[float]) -> list[float]:
    found = []
    for j, a in enumerate(v):
        first = j - j % bucket
        norm = math.sqrt(sum(b * b for b in v[first : first + bucket]))
        exact = s * abs(a) / norm if norm else 0.0
        level = math.floor(exact) + (exact - math.floor(exact) > u[j])
        found.append(math.copysign(norm * level / s, a))
    return found


def count(table: Table, n: int) -> int:
    return max(1, round(table["k"] * n)) if isinstance(table["k"], float) else table["k"]


def omega(table: Table, n: int) -> float:
    """ω of an unbiased compressor."""
    if table["name"] == "randk":
        return n / count(table, n) - 1
    if table["name"] == "qsgd":
        b, s = min(n, table.get("bucket", n)), table.get("levels", 7)
        return min(b / s**2, math.sqrt(b) / s)
    return 0.0


def nothing() -> list[Array]:
    return [np.zeros((D, M)) for _ in range(N)]


@dataclass
class Coded(Reference):
    """Compressed methods; x and controls as in the others."""

    e: list[Array] = field(default_factory=nothing)
    E: Array = field(default_factory=lambda: np.zeros((D, M)))
    h: Array = field(default_factory=lambda: np.zeros((D, M)))
    hi: list[Array] = field(default_factory=nothing)
    v: list[Array] = field(default_factory=nothing)

    def C(self, v: Array, purpose: str, *client: int) -> Array:  # noqa: N802 (the letter of the box)
        """The code of a matrix in the flat order of the package, Xᵀ row by row."""
        key = seeds.key(self.seed, purpose, self.t, *client)
        return np.array(code(self.option["compressor"], v.T.ravel().tolist(), key)).reshape(M, D).T

    def server(self, method: str) -> dict[str, Array]:
        every: dict[str, dict[str, Array]] = {"ef21": {"h": self.h}, "doublesqueeze": {"e": self.E}}
        return every.get(method, {"c": self.c} if method in ("scallion", "scafcom") else {})

    def clients(self, method: str) -> dict[str, list[Array]]:
        ahead = [v - c for v, c in zip(self.v, self.ci, strict=True)]
        every = {
            "ef21": {"h": self.hi},
            "scallion": {"c": self.ci},
            "scafcom": {"c": self.ci, "u": ahead},
        }
        return every.get(method, {} if method == "compressed" else {"e": self.e})

    def local(self, i: int, rows: Rows, c: Array | float = 0.0) -> Array:
        """D_i = x − y."""
        y = self.x
        for batch in rows[i]:
            y = y - LR * (self.grad(i, y, batch) + c)
        return self.x - y

    def compressed(self, rows: Rows, P: Array) -> None:
        q = {i: self.C(self.local(i, rows), "compress", i) for i in rows}
        self.x = self.x - self.option["server_lr"] * self.mean(q)

    def feedback(self, rows: Rows) -> dict[int, Array]:
        q = {}
        for i in rows:
            u = self.e[i] + self.local(i, rows)
            q[i] = self.C(u, "compress", i)
            self.e[i] = u - q[i]
        return q

    def ef(self, rows: Rows, P: Array) -> None:
        self.x = self.x - self.option["server_lr"] * self.mean(self.feedback(rows))

    def qsparse(self, rows: Rows, P: Array) -> None:
        self.ef(rows, P)

    def doublesqueeze(self, rows: Rows, P: Array) -> None:
        w = self.option["server_lr"] * self.mean(self.feedback(rows)) + self.E
        Q = self.C(w, "broadcast")
        self.E = w - Q
        self.x = self.x - Q

    def ef21(self, rows: Rows, P: Array) -> None:
        for i in rows:
            q = self.C(self.local(i, rows) / (LR * STEPS) - self.hi[i], "compress", i)
            self.hi[i] = self.hi[i] + q
            self.h = self.h + self.w[i] * q  # w_i = 1/N
        self.x = self.x - self.option["server_lr"] * LR * STEPS * self.h

    def scallion(self, rows: Rows, P: Array) -> None:
        alpha = self.option.get("alpha", 1 / (1 + omega(self.option["compressor"], D * M)))
        q, c = {}, self.c
        for i in rows:
            delta = alpha * (self.local(i, rows, c - self.ci[i]) / (LR * STEPS) - c)
            q[i] = self.C(delta, "compress", i)
            self.ci[i] = self.ci[i] + q[i]
        self.controlled(q)

    def scafcom(self, rows: Rows, P: Array) -> None:
        q, c, beta = {}, self.c, self.option.get("beta", 0.2)
        for i in rows:
            total = self.local(i, rows, c - self.ci[i]) / (LR * STEPS)
            self.v[i] = (1 - beta) * self.v[i] + beta * (total + self.ci[i] - c)
            q[i] = self.C(self.v[i] - self.ci[i], "compress", i)
            self.ci[i] = self.ci[i] + q[i]
        self.controlled(q)

    def controlled(self, q: dict[int, Array]) -> None:
        self.x = self.x - self.option["server_lr"] * LR * STEPS * (self.c + self.mean(q))
        self.c = self.c + sum(self.w[i] * q[i] for i in q)


TOPK, SIGN = {"name": "topk", "k": 0.3}, {"name": "sign"}
RANDK, SHRUNK = {"name": "randk", "k": 5}, {"name": "randk", "k": 0.3, "unbiased": False}
QSGD = {"name": "qsgd", "levels": 7, "bucket": 10}
QSPARSE = {"name": "compose", "outer": {"name": "qsgd", "levels": 15, "bucket": 4}, "inner": TOPK}
SPECS: list[Table] = [
    *({"name": "compressed", "compressor": one} for one in (RANDK, QSGD, TOPK, SIGN)),
    *({"name": "ef", "compressor": one, "server_lr": 0.7} for one in (TOPK, SHRUNK, SIGN, QSGD)),
    {"name": "qsparse", "compressor": QSPARSE},
    *(
        {"name": "doublesqueeze", "compressor": one, "server_lr": 0.7}
        for one in (TOPK, SHRUNK, QSPARSE)
    ),
    *({"name": "ef21", "compressor": one, "server_lr": 0.7} for one in (TOPK, QSPARSE)),
    *({"name": "scallion", "compressor": one, "server_lr": 0.7} for one in (RANDK, QSGD)),
    {"name": "scallion", "compressor": RANDK, "alpha": 0.1},
    *(
        {"name": "scafcom", "compressor": one, "beta": 0.4, "server_lr": 0.7}
        for one in (TOPK, QSGD)
    ),
]


@pytest.mark.parametrize(
    "spec", SPECS, ids=lambda spec: f"{spec['name']}-{spec['compressor']['name']}"
)
def test_each_method(tmp_path: Path, spec: Table) -> None:
    compare(tmp_path, spec, kind=Coded)


@pytest.mark.parametrize("batch", ["full", 4])
@pytest.mark.parametrize(
    "spec", {spec["name"]: spec for spec in reversed(SPECS)}.values(), ids=lambda spec: spec["name"]
)
def test_clients_of_unequal_size(tmp_path: Path, spec: Table, batch: int | Literal["full"]) -> None:
    compare(tmp_path, spec, "examples", batch, unequal=True, kind=Coded)
