"""Every method against a second, independent program: the algorithm boxes once more in plain NumPy.

Here P is an explicit r × d array, clients are a Python loop, their states a list of N arrays, and everything that
changes is changed in the round in which the box changes it. From the package comes only what both sides must share: who
takes part, P, and the row numbers of mini-batches. The server's model and control and all N client controls must agree
after every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import tables
from fedspan.core.projector import draw
from fedspan.core.round import Schedule
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.projectors.gaussian import Gaussian
from support.axes import by_axis
from support.loops import settings

Array = npt.NDArray[np.float64]
Rows = dict[int, Sequence[npt.NDArray[np.int64]]]  # client → rows of its K local steps
N, PER_ROUND, D, M, R, MOST, ROUNDS = 7, 3, 12, 2, 4, 9, 25
LR, STEPS, REG, TOLERANCE = 0.02, 3, 0.1, 1e-10
LONGEST = 60  # steps of a round whose number is drawn
SEEDS = (5, 11)  # two runs side by side
COUNTS = np.array([9, 3, 5, 8, 2, 6, 4])


@dataclass
class Reference:
    """One run: its state and, by name, one round of each method on the clients S."""

    A: list[Array]
    B: list[Array]
    w: Array  # weights of the clients, Σ w = 1
    option: dict[str, Any]
    seed: int = 0
    t: int = 0
    x: Array = field(default_factory=lambda: np.zeros((D, M)))
    c: Array = field(default_factory=lambda: np.zeros((D, M)))
    ci: list[Array] = field(default_factory=lambda: [np.zeros((D, M)) for _ in range(N)])
    dual: list[Array] = field(default_factory=lambda: [np.zeros((R, M)) for _ in range(N)])  # Λ_i
    end: list[Array] = field(default_factory=lambda: [np.zeros((R, M)) for _ in range(N)])  # E_i
    before: Array | None = None  # P of the last round
    lora: tuple[Array, Array] | None = None  # B (M × R) and A (R × D)
    error: list[Array] = field(
        default_factory=lambda: [np.zeros((D, M)) for _ in range(N)]
    )  # PowerSGD's e_i
    turn: Array | None = None  # and its P of the coming round, r = 1
    m: Array = field(default_factory=lambda: np.zeros((D, M)))  # moments of the server's optimizer
    v: Array | None = None

    def grad(self, i: int, y: Array, rows: npt.NDArray[np.int64] | slice = slice(None)) -> Array:
        """∇f_i(y; rows), f_i(X) = ‖A_i X − B_i‖² / (2 n_i) + (λ/2) ‖X‖²."""
        a, b = self.A[i][rows], self.B[i][rows]
        return a.T @ (a @ y - b) / len(a) + REG * y

    def mean(self, v: dict[int, Array]) -> Array:
        """mean_S v_i = Σ_S w_i v_i / Σ_S w_i."""
        total = np.zeros_like(next(iter(v.values())))
        for i, value in v.items():
            total = total + self.w[i] * value
        return total / sum(self.w[i] for i in v)

    def server(self, method: str) -> dict[str, Array]:
        """What the server keeps besides x, by the package's names."""
        return {"c": self.c} if method in ("scaffold", "ssf") else {}

    def clients(self, method: str) -> dict[str, list[Array]]:
        """The same of all clients."""
        return (
            {"c": self.ci}
            if method in ("scaffold", "ssf")
            else {"e": self.error}
            if method == "powersgd"
            else {}
        )

    def pace(self, rows: Rows) -> float:
        """K̄: the mean number of steps of the clients of a round, by their weights."""
        return sum(self.w[i] * len(rows[i]) for i in rows) / sum(self.w[i] for i in rows)

    def plain(self, rows: Rows, mu: float = 0.0) -> dict[int, Array]:
        """y_i − x after K_i gradient steps on f_i(y) + (μ/2) ‖y − x‖², times K̄ / K_i if normalized."""
        delta, pace = {}, self.pace(rows)
        for i in rows:
            y = self.x
            for batch in rows[i]:
                y = y - LR * (self.grad(i, y, batch) + mu * (y - self.x))
            delta[i] = y - self.x
            if self.option["normalize"]:
                delta[i] = delta[i] / len(rows[i]) * pace
        return delta

    def fedavg(self, rows: Rows, P: Array) -> None:
        self.x = self.x + self.option["server_lr"] * self.mean(self.plain(rows))

    fednova = fedavg

    def fedprox(self, rows: Rows, P: Array) -> None:
        self.x = self.x + self.option["server_lr"] * self.mean(self.plain(rows, self.option["mu"]))

    def fedavgm(self, rows: Rows, P: Array) -> None:
        self.m = self.option["server_momentum"] * self.m + self.mean(self.plain(rows))
        self.x = self.x + self.option["server_lr"] * self.m

    def adaptive(self, rows: Rows, P: Array) -> None:
        """One number after the other, with Algorithm 2's three rules for v written out."""
        delta, tau, beta1 = self.mean(self.plain(rows)), self.option["tau"], self.option["beta1"]
        self.v = np.full((D, M), tau**2) if self.v is None else self.v
        x = self.x.copy()
        for at in np.ndindex(D, M):
            square, v = delta[at] ** 2, self.v[at]
            self.m[at] = beta1 * self.m[at] + (1 - beta1) * delta[at]
            if self.option["name"] == "fedadagrad":
                v = v + square
            elif self.option["name"] == "fedadam":
                v = self.option["beta2"] * v + (1 - self.option["beta2"]) * square
            else:
                v = v - (1 - self.option["beta2"]) * square * (
                    1 if v > square else -1 if v < square else 0
                )
            self.v[at] = v
            x[at] += self.option["server_lr"] * self.m[at] / (v**0.5 + tau)
        self.x = x

    fedadam = fedyogi = fedadagrad = adaptive

    def scaffold(self, rows: Rows, P: Array) -> None:
        delta, change, pace = {}, np.zeros((D, M)), self.pace(rows)
        for i in rows:
            y = self.x
            for batch in rows[i]:
                y = y - LR * (self.grad(i, y, batch) - self.ci[i] + self.c)
            two = self.ci[i] - self.c + (self.x - y) / (LR * len(rows[i]))
            new = two if self.option["option"] == "II" else self.grad(i, self.x)
            delta[i], change = (
                (y - self.x) / len(rows[i]) * pace,
                change + self.w[i] * (new - self.ci[i]),
            )  # w_i = 1/N, not 1/S
            self.ci[i] = new
        self.x = self.x + self.option["server_lr"] * self.mean(delta)
        self.c = self.c + change

    def ssf(self, rows: Rows, P: Array) -> None:
        a, inside = {}, {}
        for i in rows:
            z, total = np.zeros((R, M)), np.zeros((D, M))
            u = P @ self.c - P @ self.ci[i]
            for batch in rows[i]:
                g = self.grad(i, self.x + P.T @ z, batch)
                z, total = z - LR * (P @ g + u), total + g
            a[i] = -z / (LR * len(rows[i])) - P @ self.c
            inside[i] = P @ total / len(rows[i])  # P ḡ_i
            self.ci[i] = self.ci[i] + P.T @ a[i]
        length = self.option["server_lr"] * LR * self.pace(rows)
        self.x = self.x - length * P.T @ (P @ self.c + self.mean(a))
        if self.option["control"] == "exact":
            self.c = self.c + sum(self.w[i] for i in rows) * P.T @ self.mean(a)
        else:
            self.c = (np.eye(D) - P.T @ P) @ self.c + P.T @ self.mean(inside)

    def subavg(self, rows: Rows, P: Array) -> None:
        end, pace = {}, self.pace(rows)
        for i in rows:
            z = np.zeros((R, M))
            for batch in rows[i]:
                z = z - LR * P @ self.grad(i, self.x + P.T @ z, batch)
            end[i] = z / len(rows[i]) * pace
        self.x = self.x + self.option["server_lr"] * P.T @ self.mean(end)

    def adapted(self, rows: Rows, P: Array) -> None:
        """LoRA on Xᵀ from 0: FedIT trains both factors, FFA-LoRA leaves A at P; each factor is averaged by itself."""
        B, A = self.lora or (np.zeros((M, R)), P)
        ends_b, ends_a = {}, {}
        for i in rows:
            b, a = B, A
            for batch in rows[i]:
                G = self.grad(i, (b @ a).T, batch).T
                step_b, step_a = G @ a.T, b.T @ G
                b = b - LR * step_b
                a = a if self.option["name"] == "ffalora" else a - LR * step_a
            ends_b[i], ends_a[i] = b, a
        rate = self.option["server_lr"]
        self.lora = (
            (1 - rate) * B + rate * self.mean(ends_b),
            (1 - rate) * A + rate * self.mean(ends_a),
        )
        self.x = (self.lora[0] @ self.lora[1]).T

    fedit = ffalora = adapted

    def powersgd(self, rows: Rows, P: Array) -> None:
        """Rank one: a unit vector on the left (D) or the right (M) of X, made of what came in the round before."""
        unit = P[0] if self.turn is None else self.turn
        sent, plain = {}, self.plain(rows)
        for i in rows:
            whole = plain[i] + self.error[i]
            sent[i] = unit @ whole if len(unit) == D else whole @ unit
            kept = np.outer(unit, sent[i]) if len(unit) == D else np.outer(sent[i], unit)
            self.error[i] = whole - kept
        mean = self.mean(sent)
        self.x = self.x + self.option["server_lr"] * (
            np.outer(unit, mean) if len(unit) == D else np.outer(mean, unit)
        )
        self.turn = mean / np.linalg.norm(mean)

    def fedsub(self, rows: Rows, P: Array) -> None:
        if self.before is not None and self.before is not P:
            turn = P @ self.before.T
            self.dual = [turn @ v for v in self.dual]
            self.end = [turn @ v for v in self.end]
        self.before, last = P, {}
        for i in rows:
            b, v = np.zeros((R, M)), np.zeros((R, M))
            for batch in rows[i]:
                v = self.option["momentum"] * v + P @ self.grad(i, self.x + P.T @ b, batch)
                b = b - LR * v - self.dual[i] / STEPS
            last[i] = b
        mean = self.mean(last)
        self.x = self.x + self.option["server_lr"] * P.T @ mean
        for i in range(N):
            self.end[i] = last.get(i, self.end[i])
            if i in last or self.option["variant"] == "stale":
                self.dual[i] = self.dual[i] + self.end[i] - mean


def compare(
    path: Path,
    spec: dict[str, Any],
    weights: Literal["uniform", "examples"] = "uniform",
    batch: int | Literal["full"] = "full",
    unequal: bool = False,
    kind: type[Reference] = Reference,
    steps: Sequence[int] = (STEPS,) * N,
) -> None:
    """Run the package and the reference side by side; `steps` has K_i of each client."""
    rng = np.random.default_rng(3)
    counts = COUNTS if unequal else np.full(N, MOST)
    A = rng.normal(size=(N, MOST, D)) + rng.normal(size=(N, 1, D))
    B = A @ (rng.normal(size=(D, M)) + rng.normal(size=(N, D, M)))
    for i in range(N):
        A[i, counts[i] :] = B[i, counts[i] :] = np.nan  # rows that do not exist
    np.savez(path / "data.npz", A=A, B=B, **({"n": counts} if unequal else {}))

    method = tables.build("method", by_axis({"lr": LR, "local_steps": STEPS, **spec}))
    task = tables.build("task", {"name": "regression", "data": str(path / "data.npz"), "reg": REG})
    problem = task.build(SEEDS, settings(batch, weights=weights))
    if set(steps) != {STEPS}:
        problem.steps = np.array(steps)
    # rows for as many steps as a method takes that draws their number
    taken = (LONGEST,) * N if spec["name"] in ("tamuna", "scaffnew") else steps
    simulator = Simulator(method, problem)
    loop = Loop(method, problem, simulator, SEEDS, PER_ROUND)

    w = counts / counts.sum() if weights == "examples" else np.full(N, 1 / N)
    option = {
        "server_lr": 1.0,
        "option": "II",
        "control": "exact",
        "variant": "zero_sum",
        "momentum": 0.0,
        "normalize": True,
        **spec,
    }
    own = [[v[i, : counts[i]] for i in range(N)] for v in (A, B)]
    references = [kind(*own, w, option, seed) for seed in SEEDS]
    Ps = [np.eye(D)] * len(SEEDS)
    seen: set[int] = set()
    for t in range(ROUNDS):
        ids = loop._round().ids
        if ("projector" in spec and t % method.space.refresh == 0) or (
            spec["name"] in LORA and t == 0
        ):
            projector = method.space if "projector" in spec else Gaussian(rank=spec["rank"])
            epoch = t // method.space.refresh if "projector" in spec else 0
            columns = draw(projector, problem.layout, SEEDS, epoch).factors[0].columns()
            Ps = [v.T.numpy().copy() for v in columns]
            for P in Ps:
                close(P @ P.T, np.eye(R), "P Pᵀ", t)
        if spec["name"] == "powersgd" and t == 0:
            Ps = [v.numpy().copy() for v in method.basis(loop.server, loop._round())]
        if batch != "full":
            parts = [
                problem.picks(Schedule(t, ids[None], ids), part, STEPS)[0].numpy()
                for part in range(-(-max(taken) // STEPS))
            ]
            picks = np.concatenate(parts).reshape(-1, *ids.shape, batch)
        with torch.inference_mode():
            loop.step()
        for run, reference in enumerate(references):
            rows: Rows = {}
            for place, i in enumerate(ids[run].tolist()):
                full = [np.arange(counts[i])] * taken[i]
                rows[i] = full if batch == "full" else list(picks[: taken[i], run, place])
            reference.t = t
            getattr(reference, spec["name"])(rows, Ps[run])
            close(matrix(loop.server.x[run, 0]), reference.x, "x", t)
            for name, theirs in reference.server(spec["name"]).items():
                close(matrix(getattr(loop.server, name)[run, 0]), theirs, name, t)
            for name, of_clients in reference.clients(spec["name"]).items():
                for i in range(N):
                    close(
                        matrix(getattr(simulator.clients(), name)[run, i]),
                        of_clients[i],
                        f"{name}_{i}",
                        t,
                    )
        seen |= set(ids[0].tolist())
    assert len(seen) == N  # every client came, so every kind of absence was met
    assert 0.1 < np.linalg.norm(references[0].x) < 100


def matrix(flat: torch.Tensor) -> Array:
    return flat.numpy().reshape(M, D).T


def close(ours: Array, theirs: Array, name: str, t: int) -> None:
    off, scale = np.linalg.norm(ours - theirs), np.linalg.norm(theirs)
    assert off <= TOLERANCE * scale, f"{name} differs by {off:.1e} (norm {scale:.1e}) in round {t}"


def projected(name: str, projector: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "projector": {"name": projector, "rank": R}, **more}


LORA = ("fedit", "ffalora")
