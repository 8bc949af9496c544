"""The theory applied to a run before it starts: conditions, safe step sizes, and the bound at these.

The corollary's step sizes are safe and slow, because its constants are those of the worst problem (docs/theory.md).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from fedspan.core import registry
from fedspan.core.config import Settings
from fedspan.core.errors import SpecError, shown
from fedspan.core.layout import Layout
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.projector import draw
from fedspan.methods.box import Box
from fedspan.theory import corollary, theorem
from fedspan.theory.estimates import Estimates, estimate
from fedspan.theory.setting import Setting, Steps
from fedspan.theory.theorem import Condition

# Projectors with E[PᵀP] = ρI, drawn without the data.
ISOTROPIC = ("identity", "gaussian", "coordinate", "hadamard")
PLAIN = "the proof is for plain SGD steps"
CONSTANT = "the theorem is for constant steps; the conditions are checked for `lr`"
# Settings of a method, of `Training` and of `Participation` → the value that the theorem covers, and why no other.
COVERED: dict[str, tuple[Any, str]] = {
    "local": ("sgd", PLAIN),
    "local.momentum": (0.0, PLAIN),
    "schedule": ("constant", CONSTANT),
    "warmup": (0, CONSTANT),
    "clip": (None, "clipped gradients are biased (A2)"),
    "drift.correction": ("always", "the proof bounds the drift of corrected steps only"),
    "uplink": (
        "plain",
        "the proof does not know the error that a coded upload leaves in the controls, or running means",
    ),
    "downlink.compressor": (None, "the proof does not know the error of a compressed download"),
    "space.refresh": (1, "the proof needs a new P in every round"),
    "aggregator": (None, "the proof is for the mean of the replies"),
    "server": ("mean", "the proof is for x ← x − η_g mean, with a constant η_g"),
}


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
    warnings: list[str]  # what lies outside the theory


def diagnose(
    method: Method, problem: Problem, clients_per_round: int, rounds: int, settings: Settings | None = None
) -> Diagnosis:  # fmt: skip
    """Check a method's step sizes against the theorem; the safe ones where its `lr` is not a number."""
    found = estimate(problem)
    setting = setting_of(found, method, problem, clients_per_round, rounds)
    steps = safe = safe_steps(setting)
    if not isinstance(method.lr, str):
        server_lr = _at(method, "server.lr", getattr(method, "server_lr", 1.0))
        steps = Steps.of(method.lr, server_lr, method.local_steps)
    return Diagnosis(
        found, setting, steps, theorem.conditions(setting, steps), theorem.conditions_proved(setting, steps),
        safe, corollary.bound(setting), theorem.bound_proved(setting, safe),
        outside_theory(method, problem, clients_per_round, settings),
    )  # fmt: skip


def corollary_lr(
    method: Method, problem: Problem, clients_per_round: int, rounds: int, settings: Settings | None = None
) -> tuple[float, float]:  # fmt: skip
    """`lr` and `server.lr` of the safe steps for a run; SpecError for methods and settings that they do not cover."""
    rule = "lr = 'auto' is the step size of the convergence theorem, which does not cover"
    if not isinstance(method, Box) or not _controlled(method):
        raise SpecError(f"{rule} {registry.name_of(method)}; use lr = 'search'")
    if found := uncovered(method, settings, sampled=clients_per_round < problem.clients):
        values = " and ".join(f"{name} {value}" for name, value, _, _ in found)
        remedy = " and ".join(f"{name} to {covered}" for name, _, covered, _ in found)
        raise SpecError(f"{rule} {values}; use lr = 'search', or set {remedy}")
    if method.server.lr != 1.0:
        raise SpecError(
            f"lr = 'auto' sets `server.lr` as well; leave it out, got {method.server.lr!r}"
        )
    for text in outside_theory(method, problem, clients_per_round, settings):
        warnings.warn(f"lr = 'auto': {text}", stacklevel=2)
    steps = safe_steps(setting_of(estimate(problem), method, problem, clients_per_round, rounds))
    return steps.local, steps.server(method.local_steps)


def safe_steps(setting: Setting) -> Steps:
    """The corollary's steps. With S of N clients they are no longer than `theorem.conditions_proved` allows."""
    steps, most = corollary.steps(setting), theorem.largest_steps(setting)
    return Steps(local=min(steps.local, most.local), effective=min(steps.effective, most.effective))


def setting_of(
    found: Estimates, method: Method, problem: Problem, clients_per_round: int, rounds: int
) -> Setting:
    """A run as the theorem sees it."""
    return Setting(
        L=found.L.value, sigma2=found.sigma2.value, gap=found.gap.value, control=found.control.value,
        rho=min(rhos_of(method, problem.layout)), clients=clients_per_round, share=clients_per_round / problem.clients,
        local_steps=method.local_steps, rounds=rounds,
    )  # fmt: skip


def _controlled(method: Method) -> bool:
    """Return whether clients keep controls that are gradients."""
    return isinstance(method, Box) and method.drift.in_gradients and bool(method.controls)


def rhos_of(method: Method, layout: Layout) -> set[float]:
    """ρ of every block. That of a run is the smallest: the proof needs E[PᵀP] ⪰ ρI, and wider blocks satisfy it."""
    space = getattr(method, "space", None)
    if space is None:
        return {1.0}
    sizes = draw(space, layout, (0,), 0).sizes
    return {size / block.size for size, block in zip(sizes, layout.blocks, strict=True)} or {1.0}


def _at(owner: Any, name: str, default: Any) -> Any:
    """Return a setting of a method or of a choice of it; the default if there is none."""
    for part in name.split("."):
        owner = getattr(owner, part, default)
    return owner


def uncovered(
    method: Method, settings: Settings | None, *, sampled: bool
) -> list[tuple[str, str, str, str]]:
    """(setting, its value, one that is covered, why it matters) of all with which a run is not the theorem's."""
    owners = [method] if settings is None else [method, settings.training, settings.participation]
    found = []
    for name, (covered, why) in COVERED.items():
        for owner in owners:
            value = _at(owner, name, covered)
            if registry.is_registered(value):
                value = registry.name_of(value)
            if value != covered:
                found.append((f"`{name}`", shown(value), shown(covered), why))
    if sampled and _at(method, "drift.rule", "exact") == "paper":
        why = "with sampled clients it breaks c = mean c_i, which every lemma uses"
        found.append(("`drift.rule`", "'paper'", "'exact'", why))
    if settings is not None and settings.dp is not None:
        why = "the proof knows no clipped replies and no noise on them"
        found.append(("`privacy`", "with a clip", "None", why))
    space = getattr(method, "space", None)
    if space is not None and (kind := registry.name_of(space)) not in ISOTROPIC:
        why = "it is not known to have E[PᵀP] = ρI independently of the data and of earlier rounds (A3)"
        found.append(("`space`", shown(kind), "'coordinate'", why))
    return found


def outside_theory(
    method: Method, problem: Problem, clients_per_round: int, settings: Settings | None = None
) -> list[str]:
    """In what a run differs from what the theorem covers, one sentence each."""
    sampled, name = clients_per_round < problem.clients, registry.name_of(method)
    departures = uncovered(method, settings, sampled=sampled)
    cases = [
        (not _controlled(method), f"`{name}` is not the method of the theorem, which needs client controls: "
         "ssf, or scaffold as ρ = 1"),
        *((True, f"{setting} {value}: {why}") for setting, value, _, why in departures),
        (sampled, f"partial participation, {clients_per_round} of {problem.clients}: the theorem is for all clients "
         "per round; the sufficient conditions are those of docs/theory.md for sampled clients, the bounds those of "
         "all clients"),
        (problem.weights is not None, "clients have different weights: the theorem is for a plain mean"),
        (problem.cohort_mode == "per_client", "mini-batches are shuffled passes, not independent draws (A2); L was "
         "estimated at x⁰ only (A1)"),
        (len(rhos_of(method, problem.layout)) > 1, "blocks have different shares of directions; ρ is the smallest "
         "of them"),
    ]  # fmt: skip
    return [text for applies, text in cases if applies]
