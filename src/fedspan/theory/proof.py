"""The Lyapunov argument behind Theorem 1 in numbers: E Φ⁺ − Φ ≤ −a_g‖∇F‖² − a_c C_t + 𝒩,  Φ = F − F* + M·C_t.

The theorem follows where a_g ≥ ρη̃/8, a_c ≥ 0 and M·C_0 ≤ C_0. `printed` computes the coefficients from the paper's
lemmas and its M; at its own step sizes they come out negative, and 𝒩 above what it is said to be. `repaired` uses the
lemmas as we prove them (docs/theory.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedspan.theory.setting import Setting, Steps
from fedspan.theory.theorem import lyapunov_weight


@dataclass(frozen=True)
class Descent:
    """Coefficients of one round, and whether the theorem follows from them."""

    gradient: float  # a_g
    control: float  # a_c
    noise: float  # 𝒩
    weight: float  # M
    needed: float  # ρη̃/8

    @property
    def follows(self) -> bool:
        """a_g ≥ ρη̃/8 and a_c ≥ 0."""
        return self.gradient >= self.needed and self.control >= 0


def printed(s: Setting, steps: Steps) -> Descent:
    """a_g, a_c and 𝒩 as the paper defines them (eq:a_g_def_tightened to eq:Nt_def_tightened), M = 72L²η̃K³η_l²/ρ."""
    K, L, rho, eta, local = s.local_steps, s.L, s.rho, steps.effective, steps.local
    M = 72 * L**2 * eta * K**3 * local**2 / rho
    B = 1.5 * L**2 * eta + M * (3 * L**2 + 12 * L**4 * eta**2 / rho)
    drifts = 24 * B * K**2 * local**2
    share = eta**2 * s.sigma2 / (s.clients * K)
    noise = L * share / 2 + M * (3 * s.sigma2 / K + 6 * L**2 * share / rho) + 6 * B * K * local**2 * s.sigma2
    return Descent(rho * eta / 4 - 12 * M * L**2 * eta**2 / rho - drifts, M * rho / 2 - drifts, noise, M, rho * eta / 8)


def noise_claimed(s: Setting, steps: Steps) -> float:
    """𝒩 ≤ Lη̃²σ²/(2NK) + 1000L²η̃Kη_l²σ² (eq:Nt_bound_tightened)."""
    direct = s.L * steps.effective**2 * s.sigma2 / (2 * s.clients * s.local_steps)
    return direct + 1000 * s.L**2 * steps.effective * s.local_steps * steps.local**2 * s.sigma2


def repaired(s: Setting, steps: Steps, *, noise_knows_subspace: bool = True) -> Descent:
    """The same from our lemmas, with M = 36L²η̃K²η_l²/ρ."""
    K, L, rho, eta, local = s.local_steps, s.L, s.rho, steps.effective, steps.local
    M = lyapunov_weight(s, steps)
    B = 0.75 * L**2 * eta + M * (3 * L**2 + 6 * L**4 * eta**2 / rho)
    drifts = 12 * B * K**2 * local**2
    share, nu = eta**2 * s.sigma2 / (s.clients * K), 1.0 if noise_knows_subspace else rho
    noise = L * share + M * (3 * nu * s.sigma2 / K + 6 * L**2 * share / rho) + 6 * B * K * local**2 * s.sigma2
    return Descent(rho * eta / 4 - 6 * M * L**2 * eta**2 - drifts, M * rho / 2 - drifts, noise, M, rho * eta / 8)
