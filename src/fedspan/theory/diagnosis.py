"""What the theory says about a run before it starts: conditions checked, safe steps, rounds and bytes to a target.

The corollary's steps are safe and slow: its constants are those of the worst problem (docs/theory.md says how slow).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fedspan.core import registry
from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.projector import draw
from fedspan.costs.traffic import cost
from fedspan.methods.base import InSubspace, LocalSteps
from fedspan.methods.scaffold import Scaffold
from fedspan.methods.ssf import SSF
from fedspan.theory import corollary, theorem
from fedspan.theory.estimates import Effort, Estimates, estimate
from fedspan.theory.setting import Setting, Steps
from fedspan.theory.theorem import Condition

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)  # ρ of a forecast
ISOTROPIC = ("identity", "gaussian", "coordinate", "hadamard")  # projectors with E[PᵀP] = ρI, drawn without the data
AnyMethod = Method[Any, Any, Any, Any]


@dataclass(frozen=True)
class Forecast:
    """Rounds after which a gradient norm is promised, and what travels until then."""

    rho: float
    printed: float  # rounds by the corollary
    rounds: float  # rounds by what we prove
    up: float  # bytes until `rounds`, all clients
    down: float


@dataclass(frozen=True)
class Diagnosis:
    """All that `fedspan diagnose` shows."""

    estimates: Estimates
    setting: Setting
    steps: Steps  # of the spec
    conditions: list[Condition]  # of the spec's steps, as printed
    proved: list[Condition]  # and those that we prove to suffice
    safe: Steps  # of the corollary
    bound: float  # what the safe steps promise for min ‖∇F‖²
    bound_proved: float
    target: float  # ‖∇F‖
    forecast: list[Forecast]
    warnings: list[str]


def diagnose(
    method: AnyMethod, problem: Problem, clients_per_round: int, rounds: int,
    target: float | None = None, effort: Effort | None = None,
) -> Diagnosis:  # fmt: skip
    """Estimate the problem's constants and hold a method's step sizes against the theorem."""
    found = estimate(problem, effort)
    setting = setting_of(found, method, problem, clients_per_round, rounds)
    own, safe = _steps(method, problem.layout), corollary.steps(setting)
    wanted = target if target is not None else 0.1 * found.grad_sq.value**0.5
    return Diagnosis(
        estimates=found,
        setting=setting,
        steps=own,
        conditions=theorem.conditions(setting, own),
        proved=theorem.conditions_proved(setting, own),
        safe=safe,
        bound=corollary.bound(setting),
        bound_proved=theorem.bound_proved(setting, safe),
        target=wanted,
        forecast=[
            _forecast(rho, method, problem, clients_per_round, setting, wanted) for rho in _shares(method, setting.rho)
        ],
        warnings=doubts(method, problem, clients_per_round),
    )


def auto(
    method: AnyMethod, problem: Problem, clients_per_round: int, rounds: int, effort: Effort | None = None
) -> tuple[float, float]:
    """(η_l, η_g) of the corollary for a run; refused for methods that it does not cover."""
    if not isinstance(method, SSF | Scaffold) or not method.solver.plain:
        name = registry.name_of(method) + _beyond_plain(method)
        raise SpecError(f"lr = 'auto' is the corollary's step, which does not cover {name}; use lr = 'search'")
    if method.server_lr != 1.0:
        raise SpecError(f"lr = 'auto' sets `server_lr` as well; leave it out, got {method.server_lr!r}")
    steps = corollary.steps(setting_of(estimate(problem, effort), method, problem, clients_per_round, rounds))
    boost = _steps(method, problem.layout).local / method.rate(0)
    return steps.local / boost, steps.server(method.local_steps)


def setting_of(found: Estimates, method: AnyMethod, problem: Problem, clients_per_round: int, rounds: int) -> Setting:
    """The theorem's view of a run. Of N clients it sees the S that take part: noise is averaged over those only."""
    return found.setting(share(method, problem.layout), clients_per_round, method.local_steps, rounds)


def share(method: AnyMethod, layout: Layout) -> float:
    """ρ: of the narrowest block. E[PᵀP] ⪰ ρI is all that the proof needs, and blocks that go whole only help."""
    if not isinstance(method, InSubspace):
        return 1.0
    sizes = draw(method.projector, layout, (0,), 0).sizes
    return min(size / block.size for size, block in zip(sizes, layout.blocks, strict=True))


def doubts(method: AnyMethod, problem: Problem, clients_per_round: int) -> list[str]:
    """Where a run is outside what the theorem covers."""
    name, found = registry.name_of(method), []
    if not isinstance(method, SSF | Scaffold):
        found.append(
            f"`{name}` is not the method of the theorem, which needs client controls: ssf, or scaffold as ρ = 1"
        )
    if clients_per_round < problem.clients:
        found.append(
            f"partial participation, {clients_per_round} of {problem.clients}: the theorem is for all clients a round"
        )
    if isinstance(method, InSubspace):
        kind = registry.name_of(method.projector)
        if method.refresh > 1:
            found.append(f"P is kept for {method.refresh} rounds; the proof draws it anew in each")
        if kind not in ISOTROPIC:
            found.append(f"projector `{kind}` is not known to have E[PᵀP] = ρI independently of the data (A3)")
        if method.rank_boost > 1:
            found.append("`rank_boost` makes the step larger than lr; the conditions below are of the larger one")
        if len(set(draw(method.projector, problem.layout, (0,), 0).sizes)) > 1 and len(problem.layout.blocks) > 1:
            found.append("blocks have different shares of directions; ρ is that of the narrowest")
    if _beyond_plain(method):
        found.append(f"local steps{_beyond_plain(method)}: the proof is for plain ones")
    if getattr(method, "schedule", "constant") != "constant":
        found.append("a step schedule: the theorem is for constant steps; its conditions are checked at the first")
    if getattr(method, "compressor", None) is not None:
        found.append("a compressed uplink: the controls keep an error that the proof does not know")
    if getattr(method, "control", "exact") == "paper" and clients_per_round < problem.clients:
        found.append("control = 'paper' under sampling breaks c = mean c_i, which every lemma uses")
    if problem.weights is not None:
        found.append("clients have weights; the theorem is for a plain mean")
    if problem.cohort_mode == "per_client":
        found.append("mini-batches are shuffled passes, not independent draws (A2); L was estimated at x⁰ only (A1)")
    return found


def _beyond_plain(method: AnyMethod) -> str:
    """What local steps have beside a step size, as words to put behind them."""
    if not isinstance(method, LocalSteps) or method.solver.plain:
        return ""
    return " with momentum" if method.optimizer is None else f" with {registry.name_of(method.optimizer)}"


def _steps(method: AnyMethod, layout: Layout) -> Steps:
    lr = float(method.lr)
    if isinstance(method, InSubspace):
        lr = method.step(draw(method.projector, layout, (0,), 0), 0)
    return Steps.of(lr, getattr(method, "server_lr", 1.0), method.local_steps)


def _shares(method: AnyMethod, own: float) -> list[float]:
    return sorted({*SHARES, own}) if isinstance(method, InSubspace) else [own]


def _forecast(
    rho: float, method: AnyMethod, problem: Problem, clients_per_round: int, setting: Setting, target: float
) -> Forecast:
    there = dataclasses.replace(setting, rho=rho)
    printed, rounds = corollary.rounds_to(there, target**2), theorem.rounds_to_proved(there, target**2)
    if isinstance(method, InSubspace) and registry.name_of(method.projector) != "identity" and rho != setting.rho:
        method = dataclasses.replace(method, projector=dataclasses.replace(method.projector, rank=rho))
    rates = cost(method, problem, clients_per_round, 4 * problem.clients // clients_per_round, problem.seeds[0])
    return Forecast(
        rho, printed, rounds, *(rate * clients_per_round * rounds for rate in (rates.up_round, rates.down_round))
    )
