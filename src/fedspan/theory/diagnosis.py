"""The theory applied to a run before it starts: conditions, safe step sizes, rounds and bytes to a target.

The corollary's step sizes are safe and slow, because its constants are those of the worst problem (docs/theory.md).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, cast

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

FORECAST_RHO = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
ISOTROPIC = ("identity", "gaussian", "coordinate", "hadamard")  # projectors with E[PᵀP] = ρI, drawn without the data
AnyMethod = Method[Any, Any, Any, Any]


@dataclass(frozen=True)
class Forecast:
    """Rounds after which the theory guarantees a gradient norm, and the bytes sent until then."""

    rho: float
    printed: float  # rounds by the corollary as printed
    rounds: float  # rounds by the bound proved in docs/theory.md
    up: float  # bytes sent by all clients until `rounds`
    down: float  # bytes received by all clients until `rounds`


@dataclass(frozen=True)
class Diagnosis:
    """What `fedspan diagnose` shows."""

    estimates: Estimates
    setting: Setting
    steps: Steps  # of the method, or the safe ones where its `lr` is not a number
    conditions: list[Condition]  # of Theorem 1 as printed, at `steps`
    proved: list[Condition]  # those proved to suffice, at `steps`
    safe: Steps  # of the corollary
    bound: float  # on min ‖∇F‖² at the safe steps, as printed
    bound_proved: float  # the same, as proved
    target: float  # ‖∇F‖ of the forecasts
    forecast: list[Forecast]
    warnings: list[str]  # what lies outside the theory


def diagnose(
    method: AnyMethod, problem: Problem, clients_per_round: int, rounds: int,
    target: float | None = None, effort: Effort | None = None,
) -> Diagnosis:  # fmt: skip
    """Check a method's step sizes against the theorem; those of the corollary where its `lr` is not a number.

    `target` is the ‖∇F‖ of the forecasts, a tenth of ‖∇F(x⁰)‖ by default.
    """
    found = estimate(problem, effort)
    setting = setting_of(found, method, problem, clients_per_round, rounds)
    safe = corollary.steps(setting)
    steps = safe if isinstance(method.lr, str) else _steps(method, problem.layout)
    priced = _with_lr(method, safe.local) if isinstance(method.lr, str) else method
    wanted = target if target is not None else 0.1 * found.grad_sq.value**0.5
    rhos = sorted({*FORECAST_RHO, setting.rho}) if isinstance(method, InSubspace) else [setting.rho]
    return Diagnosis(
        estimates=found, setting=setting, steps=steps, conditions=theorem.conditions(setting, steps),
        proved=theorem.conditions_proved(setting, steps), safe=safe, bound=corollary.bound(setting),
        bound_proved=theorem.bound_proved(setting, safe), target=wanted,
        forecast=[_forecast(rho, priced, problem, clients_per_round, setting, wanted) for rho in rhos],
        warnings=outside_theory(method, problem, clients_per_round),
    )  # fmt: skip


def corollary_lr(method: AnyMethod, problem: Problem, clients_per_round: int, rounds: int) -> tuple[float, float]:
    """`lr` and `server_lr` of the corollary for a run; SpecError for methods that it does not cover."""
    if not isinstance(method, SSF | Scaffold) or _local_optimizer(method):
        name = registry.name_of(method) + _local_optimizer(method)
        raise SpecError(f"lr = 'auto' is the corollary's step, which does not cover {name}; use lr = 'search'")
    if method.server_lr != 1.0:
        raise SpecError(f"lr = 'auto' sets `server_lr` as well; leave it out, got {method.server_lr!r}")
    steps = corollary.steps(setting_of(estimate(problem), method, problem, clients_per_round, rounds))
    boost = _steps(_with_lr(method, 1.0), problem.layout).local
    return steps.local / boost, steps.server(method.local_steps)


def setting_of(found: Estimates, method: AnyMethod, problem: Problem, clients_per_round: int, rounds: int) -> Setting:
    """A run as the theorem sees it. Its N is S here, because noise is averaged over the clients that take part."""
    return Setting(
        L=found.L.value, sigma2=found.sigma2.value, gap=found.gap.value, control=found.control.value,
        rho=rho_of(method, problem.layout), clients=clients_per_round, local_steps=method.local_steps, rounds=rounds,
    )  # fmt: skip


def rho_of(method: AnyMethod, layout: Layout) -> float:
    """ρ of the narrowest block: the proof needs E[PᵀP] ⪰ ρI only, and wider blocks satisfy it."""
    return min(_block_rhos(method, layout)) if isinstance(method, InSubspace) else 1.0


def _block_rhos(method: InSubspace[Any, Any, Any, Any], layout: Layout) -> list[float]:
    sizes = draw(method.projector, layout, (0,), 0).sizes
    return [size / block.size for size, block in zip(sizes, layout.blocks, strict=True)]


def outside_theory(method: AnyMethod, problem: Problem, clients_per_round: int) -> list[str]:
    """In what a run differs from what the theorem covers, one sentence each."""
    name, sampled = registry.name_of(method), clients_per_round < problem.clients
    cases = {
        f"`{name}` is not the method of the theorem, which needs client controls: ssf, or scaffold as ρ = 1":
            not isinstance(method, SSF | Scaffold),
        f"partial participation, {clients_per_round} of {problem.clients}: the theorem is for all clients per round":
            sampled,
    }  # fmt: skip
    if isinstance(method, InSubspace):
        kind = registry.name_of(method.projector)
        cases |= {
            f"P is kept for {method.refresh} rounds; the proof needs a new one in every round": method.refresh > 1,
            f"projector `{kind}` is not known to have E[PᵀP] = ρI independently of the data (A3)":
                kind not in ISOTROPIC,
            "`rank_boost` makes the step larger than lr; the conditions are checked for the larger one":
                method.rank_boost > 1,
            "blocks have different shares of directions; ρ is the smallest of them":
                len(set(_block_rhos(method, problem.layout))) > 1,
        }  # fmt: skip
    cases |= {
        f"local steps{_local_optimizer(method)}: the proof is for plain SGD steps": bool(_local_optimizer(method)),
        "a step schedule: the theorem is for constant steps; the conditions are checked for `lr`":
            getattr(method, "schedule", "constant") != "constant",
        "a compressed uplink: the proof does not know the error it leaves in the controls":
            getattr(method, "compressor", None) is not None,
        "control = 'paper' with sampled clients breaks c = mean c_i, which every lemma uses":
            sampled and getattr(method, "control", "exact") == "paper",
        "clients have weights; the theorem is for a plain mean": problem.weights is not None,
        "mini-batches are shuffled passes, not independent draws (A2); L was estimated at x⁰ only (A1)":
            problem.cohort_mode == "per_client",
    }  # fmt: skip
    return [text for text, applies in cases.items() if applies]


def _local_optimizer(method: AnyMethod) -> str:
    """What the local steps have besides a step size, such as " with momentum"; empty for plain steps."""
    if getattr(method, "scaled", False):
        return " with a preconditioner"
    if not isinstance(method, LocalSteps) or method.solver.plain:
        return ""
    return " with momentum" if method.optimizer is None else f" with {registry.name_of(method.optimizer)}"


def _with_lr(method: AnyMethod, lr: float) -> Any:
    return dataclasses.replace(method, lr=lr)  # type: ignore[type-var]


def _steps(method: AnyMethod, layout: Layout) -> Steps:
    lr = cast(float, method.lr)
    if isinstance(method, InSubspace):
        lr *= method.boost(draw(method.projector, layout, (0,), 0))
    return Steps.of(lr, getattr(method, "server_lr", 1.0), method.local_steps)


def _forecast(
    rho: float, method: AnyMethod, problem: Problem, clients_per_round: int, setting: Setting, target: float
) -> Forecast:
    there = dataclasses.replace(setting, rho=rho)
    printed, rounds = corollary.rounds_to(there, target**2), theorem.rounds_to_proved(there, target**2)
    if isinstance(method, InSubspace) and registry.name_of(method.projector) != "identity" and rho != setting.rho:
        method = dataclasses.replace(method, projector=dataclasses.replace(method.projector, rank=rho))
    rates = cost(method, problem, clients_per_round, 4 * problem.clients // clients_per_round, problem.seeds[0])
    sent = clients_per_round * rounds
    return Forecast(rho, printed, rounds, rates.up_round * sent, rates.down_round * sent)
