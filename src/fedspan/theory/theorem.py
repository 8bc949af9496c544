"""Theorem 1 of arXiv:2604.25467: four conditions on the step sizes, and the bound that they give.

    min_t E‖∇F(x^t)‖² ≤ 8(Δ_F + C_0)/(ρη̃T) + 4Lσ²η̃/(ρNK) + 8000 L²Kη_l²σ²/ρ

`conditions` and `bound` are as printed, but the printed proof has gaps (docs/theory.md). `conditions_proved` and
`bound_proved` are what its idea does prove: fewer conditions, K² instead of K³, and C_0 in consistent units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedspan.theory.setting import Setting, Steps

ROUNDING = 1e-12  # a step computed to be at its limit may exceed it by this much


@dataclass(frozen=True)
class Condition:
    """One inequality on the step sizes: value ≤ limit."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether value ≤ limit, up to rounding."""
        return self.value <= self.limit * (1 + ROUNDING)

    @property
    def excess(self) -> float:
        """value / limit."""
        return self.value / self.limit


def conditions(s: Setting, steps: Steps) -> list[Condition]:
    """Conditions (1) to (4) of Theorem 1; (1) is two inequalities."""
    K, L, local, eta = s.local_steps, s.L, steps.local, steps.effective
    return [
        Condition("(1) η_l ≤ 1/(2KL)", local, 1 / (2 * K * L)),
        Condition("(1) η̃ ≤ 1/(4L)", eta, 1 / (4 * L)),
        Condition("(2) 72K³L²η_l² ≤ ρ/8", 72 * K**3 * L**2 * local**2, s.rho / 8),
        Condition(
            "(3) 3456L⁴η̃²K³η_l²/ρ³ ≤ 1", 3456 * L**4 * eta**2 * K**3 * local**2 / s.rho**3, 1.0
        ),
        Condition("(4) 4L²η̃²/ρ² ≤ 1", 4 * L**2 * eta**2 / s.rho**2, 1.0),
    ]


def bound(s: Setting, steps: Steps) -> float:
    """8(Δ_F + C_0)/(ρη̃T) + 4Lσ²η̃/(ρNK) + 8000L²Kη_l²σ²/ρ (eq:thm_convergence_statement)."""
    return _bound(s, steps, s.start, 4, 8000 / s.rho)


def _bound(s: Setting, steps: Steps, start: float, noise: float, drift: float) -> float:
    """8·start/(ρη̃T) + noise·Lσ²η̃/(ρNK) + drift·L²Kη_l²σ²."""
    transient = 8 * start / (s.rho * steps.effective * s.rounds)
    noise *= s.L * steps.effective / (s.rho * s.clients * s.local_steps)
    return transient + (noise + drift * s.L**2 * s.local_steps * steps.local**2) * s.sigma2


def conditions_proved(s: Setting, steps: Steps) -> list[Condition]:
    """Conditions that suffice: 576K²L²η_l² ≤ ρ and η̃ ≤ min(1/4, ρ/2)/L if all clients take part (ours).

    With S of N clients ρS/N takes the place of ρ, and two conditions are added. That these four suffice is checked in
    numbers and not proved (docs/theory.md).
    """
    rho, cubed = _shares(s)
    name = "ρ" if s.share == 1 else "ρS/N"
    local, eta = s.L * steps.local, s.L * steps.effective
    found = [
        Condition(f"576K²L²η_l² ≤ {name}", 576 * s.local_steps**2 * local**2, rho),
        Condition(f"η̃ ≤ min(1/4, {name}/2)/L", steps.effective, min(0.25, rho / 2) / s.L),
    ]
    if s.share < 1:
        found.append(Condition("L²η̃² ≤ ρS³/(72N²)", eta**2, cubed / 72))
        found.append(Condition("L³η̃³ ≤ ρS³/(2304N²)", eta**3, cubed / 2304))
    return found


def largest_steps(s: Setting) -> Steps:
    """The largest steps that meet `conditions_proved`."""
    rho, cubed = _shares(s)
    limits = [0.25, rho / 2]
    if s.share < 1:
        limits += [math.sqrt(cubed / 72), math.cbrt(cubed / 2304)]
    return Steps(local=math.sqrt(rho) / (24 * s.local_steps * s.L), effective=min(limits) / s.L)


def _shares(s: Setting) -> tuple[float, float]:
    """ρS/N and ρS³/N²."""
    return s.rho * s.share, s.rho * s.clients * s.share**2


def lyapunov_weight(s: Setting, steps: Steps) -> float:
    """M of Φ = F − F* + M·C_t: 36L²η̃K²η_l²/ρ, at most η̃/16 (ours; the paper's has K³ and fails for K = 1)."""
    return 36 * s.L**2 * steps.effective * s.local_steps**2 * steps.local**2 / s.rho


def bound_proved(s: Setting, steps: Steps, *, nu: float = 1.0) -> float:
    """8(Δ_F + M·C_0)/(ρη̃T) + 9.5Lσ²η̃/(ρNK) + (864ν/ρ + 50)L²Kη_l²σ²/ρ (ours).

    ν = `nu` is a number with E‖𝒫ξ‖² ≤ νσ² for the noise ξ of every local step. ν = 1 always holds. ν = ρ is an
    assumption of its own: it holds where E[𝒫] = ρI and ξ is independent of P, and not where blocks are trained in full.
    """
    start = s.gap + lyapunov_weight(s, steps) * s.control
    return _bound(s, steps, start, 9.5, (864 * nu / s.rho + 50) / s.rho)
