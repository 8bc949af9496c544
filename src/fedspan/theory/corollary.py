"""The corollary of Theorem 1: step sizes in closed form, and the bound they give.

η_l = min{1/(2KL), √(ρ/864L²K³), √((Δ_F + C_0)/(100 L K σ² T ρ))}
η̃   = (1/η̃_0 + 1/η̃_1)⁻¹,   η̃_0 = min{1/4L, ρ/2L},   η̃_1 = √(2NK(Δ_F + C_0)/(Lσ²T)),   η_g = η̃/(η_l K)
"""

from __future__ import annotations

import math

from fedspan.theory.setting import Setting, Steps

C_STAR = 100  # the corollary's absolute constant


def stability_step(s: Setting) -> float:
    """η̃_0 = min{1/(4L), ρ/(2L)} (eq:eta0_eta1_explicit_defs)."""
    return min(1 / (4 * s.L), s.rho / (2 * s.L))


def steps(s: Setting) -> Steps:
    """η_l (eq:eta_l_refined_choice), and the harmonic 1/η̃ = 1/η̃_0 + 1/η̃_1 (eq:def_harmonic_tilde_eta_refined).

    Without noise its terms fall away: η̃_1 is infinite (eq:eta0_eta1_explicit_defs).
    """
    K, L, variance_step = s.local_steps, s.L, math.inf
    limits = [1 / (2 * K * L), math.sqrt(s.rho / (864 * L**2 * K**3))]
    if s.sigma2 > 0:
        limits.append(math.sqrt(s.start / (C_STAR * L * K * s.sigma2 * s.rounds * s.rho)))
        variance_step = math.sqrt(2 * s.clients * K * s.start / (L * s.sigma2 * s.rounds))
    return Steps(local=min(limits), effective=1 / (1 / stability_step(s) + 1 / variance_step))


def bound(s: Setting) -> float:
    """112L(Δ_F + C_0)/(ρ²T) + 8√2σ√(L(Δ_F + C_0))/(ρ√(NKT)) (eq:corollary_harmonic_refined_main_bound)."""
    noise = 8 * math.sqrt(2 * s.sigma2 * s.L * s.start / (s.clients * s.local_steps)) / s.rho
    return 112 * s.L * s.start / s.rho**2 / s.rounds + noise / math.sqrt(s.rounds)
