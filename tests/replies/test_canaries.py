"""An audit that tries to break the guarantee: it must not succeed, and must succeed where noise or clip is left out.

A canary client whose targets are enormous is planted. Many short trainings are run with it and without it, each with
noise of its own. The attacker knows everybody's data and sees the final model. Its score is the part of the model along
the direction in which the canary moves it. From the rates at which a threshold on the score is right and wrong follows
a lower bound on ε (Jagielski et al. 2020; Nasr et al. 2023): ε ≥ ln((TPR − δ) / FPR), with the ends of Clopper and
Pearson's confidence intervals. The threshold is chosen on one half of the trainings and judged on the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.bundle import payload
from fedspan.core.layout import Block, Layout
from fedspan.core.objective import Objective, Problem
from fedspan.core.privacy import Privacy
from fedspan.core.round import Round
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.replies import clip as clipping
from fedspan.replies.chain import Chain
from fedspan.replies.noise import Mechanism
from support.loops import Scripted, advance, model
from support.methods import build

DELTA, CANARY, KEY = 1e-3, 6, bytes(32)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "ssf": {"projector": {"name": "coordinate", "rank": 6}, "correction": "always"},
    "subavg": {"projector": {"name": "coordinate", "rank": 6}, "server_momentum": 0.5},
}


class Pulls(Objective):
    """f_i(y) = ½ ‖y − b_i‖²."""

    def __init__(self, b: torch.Tensor) -> None:
        self.b = b

    def grad(self, y: torch.Tensor) -> torch.Tensor:
        return y - self.b

    full_grad = grad


class Planted(Problem):
    """Clients with targets b_i, one of which is far from all others; the same in every run."""

    def __init__(self, runs: int, clients: int = 7, size: int = 16) -> None:
        self.seeds, self.clients, self.weights = (0,) * runs, clients, None
        self.layout = Layout((Block("w", (2, size // 2), 1),), torch.float64)
        self.x0 = torch.zeros(runs, 1, size, dtype=torch.float64)
        self.b = torch.randn(
            clients, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        self.b[CANARY] += 1e4

    def cohort(self, rnd: Round) -> Objective:
        return Pulls(self.b[rnd.ids])

    def evaluate(self, x: torch.Tensor, buffers: Any = None) -> dict[str, Any]:
        return {}

    def diverged(self, metrics: Any) -> Any:
        return np.zeros(len(self.seeds), bool)


def models(
    name: str, problem: Problem, privacy: Privacy, cohort: int, there: bool, key: bytes, rounds: int
) -> torch.Tensor:
    """The final models of all runs of a problem, (runs, size)."""
    method = build(name, lr=0.002, local_steps=1, **METHODS[name])
    missing = set() if there else {(t, CANARY) for t in range(rounds)}
    end = Scripted(Simulator(method, problem), missing)
    made = Mechanism(privacy, problem.clients, cohort, rounds, key)
    chain = Chain(method, runs=len(problem.seeds), noise=made)
    loop = Loop(method, problem, end, problem.seeds, cohort, rounds=rounds, chain=chain)
    return model(advance(loop, rounds))[:, 0].clone()


def scores(
    name: str, privacy: Privacy, runs: int, cohort: int, rounds: int, of: tuple[int, int]
) -> list[np.ndarray[Any, Any]]:
    """How far each model lies in the canary's direction, (with it, without it)."""
    silent = Privacy(clip=privacy.clip, noise=0.0, delta=DELTA)
    with intact():
        with_it, without = (
            models(name, Planted(1, *of), silent, of[0], there, KEY, rounds)
            for there in (True, False)
        )
    direction = (with_it - without) / (with_it - without).norm()
    problems = (
        [Planted(runs, *of)] if cohort == of[0] else [Planted(1, *of)] * runs
    )  # cohorts differ in size: one run at a time
    found = []
    for there in (True, False):
        keys = (
            bytes([there]) + number.to_bytes(31) for number in range(runs)
        )  # a test that is the same every time
        parts = [
            models(name, one, privacy, cohort, there, key, rounds)
            for one, key in zip(problems, keys, strict=False)
        ]
        x = torch.cat(parts)
        found.append(((x - without) * direction).sum(-1).numpy())
    return found


def lower_bound(
    inside: np.ndarray[Any, Any], outside: np.ndarray[Any, Any], level: float = 0.95
) -> float:
    """The largest ε that the trainings refute, at this confidence."""
    half = len(inside) // 2
    candidates = np.unique(np.concatenate([inside[:half], outside[:half]]))
    best = max(candidates, key=lambda at: _bound(inside[:half], outside[:half], at, level))
    return _bound(inside[half:], outside[half:], best, level)


def _bound(
    inside: np.ndarray[Any, Any], outside: np.ndarray[Any, Any], at: float, level: float
) -> float:
    from scipy.stats import beta

    n, hits, false, tail = (
        len(inside),
        int((inside >= at).sum()),
        int((outside >= at).sum()),
        (1 - level) / 2,
    )
    tpr = beta.ppf(tail, hits, n - hits + 1) if hits else 0.0
    fpr = beta.ppf(1 - tail, false + 1, n - false) if false < n else 1.0
    return math.log(max(tpr - DELTA, 1e-9) / fpr)


_clipped, _noise = clipping.clipped, Mechanism.vector_noise


@contextmanager
def intact() -> Iterator[None]:
    """Code without the faults that a test has planted."""
    broken = clipping.clipped, Mechanism.vector_noise
    clipping.clipped, Mechanism.vector_noise = _clipped, _noise  # type: ignore[method-assign]
    yield
    clipping.clipped, Mechanism.vector_noise = broken  # type: ignore[method-assign]


def audited(
    name: str, noise: float, cohort: int, runs: int, rounds: int = 2, size: int = 16, **own: Any
) -> tuple[float, float]:
    """(ε that is claimed, ε that is refuted)."""
    privacy = Privacy(clip=0.5, noise=noise, delta=DELTA, **own)
    clients = max(cohort, 7)
    claimed = Mechanism(privacy, clients, cohort, rounds).epsilon(rounds)
    return claimed, lower_bound(*scores(name, privacy, runs, cohort, rounds, (clients, size)))


@pytest.mark.parametrize("own", [{}, {"leak": 0.2}], ids=["plain", "leak"])
@pytest.mark.parametrize("name", METHODS)
def test_the_audit_does_not_refute_what_is_claimed(name: str, own: dict[str, Any]) -> None:
    claimed, refuted = audited(name, 1.2, 7, 3000, **own)
    assert 3 < claimed < 6
    assert 0.3 < refuted < 0.9 * claimed  # a bound of nothing would audit nothing


def test_nor_with_secret_cohorts() -> None:
    claimed, refuted = audited("ssf", 1.5, 4, 150)
    assert claimed < 3
    assert -0.5 < refuted < 0.9 * claimed


@pytest.mark.parametrize("name", METHODS)
def test_it_refutes_a_run_whose_noise_was_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mechanism, "vector_noise", 0.01)
    claimed, refuted = audited(name, 1.2, 7, 2000)
    assert refuted > claimed


def test_and_one_with_secret_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mechanism, "vector_noise", 0.01)
    claimed, refuted = audited("ssf", 2.5, 4, 150)
    assert refuted > claimed


@pytest.mark.parametrize("name", METHODS)
def test_it_refutes_a_run_whose_clip_was_not_applied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        clipping,
        "clipped",
        lambda up, clip: (up, clipping.norms_of(payload(up).values()).unsqueeze(-1)),
    )
    claimed, refuted = audited(name, 1.2, 7, 2000)
    assert refuted > claimed


def test_it_refutes_noise_inside_the_clients_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """a_i = P ḡ_i − P c_i would take the noise of the round before away again. With noise in the sum it stands."""

    def inside(up: Any, clip: float) -> Any:
        up, norm = _clipped(up, clip)
        scale = clip * 3.0 / math.sqrt(40)
        parts = {
            name: part + scale * torch.randn(part.shape, dtype=part.dtype)
            for name, part in payload(up).items()
        }
        return up.replace(**parts), norm

    few: dict[str, Any] = {
        "rounds": 8,
        "size": 2,
    }  # noise that clients subtract again must be within the clip
    honest = audited("scaffold", 3.0, 40, 1000, **few)
    assert honest[1] < 0.9 * honest[0]
    monkeypatch.setattr(clipping, "clipped", inside)
    monkeypatch.setattr(Mechanism, "vector_noise", 0.0)
    claimed, refuted = audited("scaffold", 3.0, 40, 1000, **few)
    print(f"claimed ε {claimed:.1f}, refuted below {refuted:.1f}")  # noqa: T201
    assert refuted > claimed


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("noise", "cohort", "runs"), [(1.2, 7, 40_000), (2.5, 7, 40_000), (1.5, 4, 5_000)]
)
def test_many_trainings(name: str, noise: float, cohort: int, runs: int) -> None:
    """`-rP` shows the figures, which docs/privacy.md has."""
    claimed, refuted = audited(name, noise, cohort, runs)
    print(  # noqa: T201
        f"{name}: q = {cohort}/7, σ = {noise}: claimed ε {claimed:.2f}, refuted below {refuted:.2f}"
    )
    assert refuted < claimed
