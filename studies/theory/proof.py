"""The Lyapunov argument behind Theorem 1 in numbers: E Φ⁺ − Φ ≤ −a_g‖∇F‖² − a_c C_t + 𝒩,  Φ = F − F* + M·C_t.

    python studies/theory/proof.py [--settings 200000] [--seed 0]

The theorem follows where a_g ≥ ρη̃/8, a_c ≥ 0 and M·C_0 ≤ C_0. `printed` computes the coefficients from the paper's
lemmas and its M: at its own step sizes they are negative, and 𝒩 is larger than claimed. `repaired` uses the lemmas as
proved in docs/theory.md, `sampled` those for S of N clients per round. The command counts in how many random settings
at or below the limits the sampled argument fails, by the ρ used in the conditions.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

import numpy as np

from fedspan.theory.setting import Setting, Steps
from fedspan.theory.theorem import largest_steps, lyapunov_weight

ROUNDING = 1e-12


@dataclass(frozen=True)
class Descent:
    """The coefficients of one round."""

    gradient: float  # a_g
    control: float  # a_c
    noise: float  # 𝒩
    weight: float  # M
    needed: float  # ρη̃/8

    @property
    def gradient_falls(self) -> bool:
        """a_g ≥ ρη̃/8."""
        return self.gradient >= self.needed * (1 - ROUNDING)

    @property
    def control_falls(self) -> bool:
        """a_c ≥ 0."""
        return self.control >= 0

    @property
    def follows(self) -> bool:
        """Whether the theorem follows."""
        return self.gradient_falls and self.control_falls


def printed(s: Setting, steps: Steps) -> Descent:
    """a_g, a_c and 𝒩 as the paper defines them (eq:a_g_def_tightened to eq:Nt_def_tightened), M = 72L²η̃K³η_l²/ρ."""
    K, L, rho, eta, local = s.local_steps, s.L, s.rho, steps.effective, steps.local
    M = 72 * L**2 * eta * K**3 * local**2 / rho
    B = 1.5 * L**2 * eta + M * (3 * L**2 + 12 * L**4 * eta**2 / rho)
    drifts = 24 * B * K**2 * local**2
    share = eta**2 * s.sigma2 / (s.clients * K)
    noise = (
        L * share / 2
        + M * (3 * s.sigma2 / K + 6 * L**2 * share / rho)
        + 6 * B * K * local**2 * s.sigma2
    )
    return Descent(
        rho * eta / 4 - 12 * M * L**2 * eta**2 / rho - drifts,
        M * rho / 2 - drifts,
        noise,
        M,
        rho * eta / 8,
    )


def noise_claimed(s: Setting, steps: Steps) -> float:
    """𝒩 ≤ Lη̃²σ²/(2NK) + 1000L²η̃Kη_l²σ² (eq:Nt_bound_tightened)."""
    direct = s.L * steps.effective**2 * s.sigma2 / (2 * s.clients * s.local_steps)
    return direct + 1000 * s.L**2 * steps.effective * s.local_steps * steps.local**2 * s.sigma2


def repaired(
    s: Setting, steps: Steps, *, nu: float = 1.0, low: float = 1.0, high: float = 1.0
) -> Descent:
    """The same from our lemmas, with M = 36L²η̃K²η_l²b³/ρ; E‖𝒫ξ‖² ≤ νσ² is assumed.

    a = `low` and b = `high` are the bounds of a shared preconditioner, a ≤ D ≤ b.
    """
    K, L, rho, eta, local = s.local_steps, s.L, s.rho, steps.effective, high * steps.local
    M = lyapunov_weight(s, steps) * high**3
    moved = (high * eta) ** 2  # over what ‖x⁺ − x‖² is without a preconditioner, times η̃²
    B = 0.75 * L**2 * eta * high + M * (3 * L**2 + 6 * L**4 * moved / rho)
    drifts = 12 * B * K**2 * local**2
    share = moved * s.sigma2 / (s.clients * K)
    noise = (
        L * share
        + M * (3 * nu * s.sigma2 / K + 6 * L**2 * share / rho)
        + 6 * B * K * local**2 * s.sigma2
    )
    gradient = low * rho * eta / 4 - 6 * M * L**2 * moved - drifts
    return Descent(gradient, M * rho / 2 - drifts, noise, M, low * rho * eta / 8)


def limits_without_share(s: Setting) -> Steps:
    """The largest steps for S of N clients if the first two conditions had ρ in place of ρS/N."""
    cubed = s.rho * s.clients * s.share**2  # ρS³/N²
    full = largest_steps(replace(s, share=1.0))
    others = min(math.sqrt(cubed / 72), math.cbrt(cubed / 2304)) / s.L
    return Steps(local=full.local, effective=min(full.effective, others))


def sampled(s: Setting, steps: Steps) -> Descent:
    """The same for S of N clients per round, with M = max(36L²η̃K²η_l²/ρ', 12Lη̃²N/S²) and ρ' = ρS/N."""
    N, S, K, L, eta, local = (
        round(s.clients / s.share),
        s.clients,
        s.local_steps,
        s.L,
        steps.effective,
        steps.local,
    )
    rho, reached = s.rho, s.rho * S / N
    theta = (N - S) / (S * max(1, N - 1))
    M = max(
        36 * L**2 * eta * K**2 * local**2 / reached, 12 * L * eta**2 * N / S**2 if S < N else 0.0
    )
    moving = 3 * M * L**2 / reached * eta**2  # what E‖x⁺ − x‖² costs, over η̃²
    B = (
        0.75 * L**2 * eta
        + 1.5 * theta * L**3 * eta**2
        + 3 * M * L**2 * S / N
        + moving * L**2 * (2 + 3 * theta)
    )
    drifts = 12 * B * K**2 * local**2
    noise = L * eta**2 / N + 1.5 * theta * L * eta**2 + 3 * M * S / N + moving * (2 / N + 3 * theta)
    noise = noise * s.sigma2 / K + 6 * B * K * local**2 * s.sigma2
    control = M * reached / 2 - drifts - 1.5 * theta * L * eta**2 * rho - 3 * theta * moving * rho
    return Descent(rho * eta / 4 - drifts - 2 * moving * rho, control, noise, M, rho * eta / 8)


def failures(settings: int, seed: int) -> dict[str, tuple[int, int]]:
    """In how many random settings a_c < 0 and a_g < ρη̃/8, for ρ and for ρS/N in the main conditions."""
    rng = np.random.default_rng(seed)
    found = {"ρ": [0, 0], "ρS/N": [0, 0]}
    for _ in range(settings):
        clients = int(np.exp(rng.uniform(math.log(2), math.log(1001))))
        cohort = max(1, int(clients ** rng.uniform(0, 1)))
        rho, K = float(np.exp(rng.uniform(math.log(0.001), 0))), int(rng.integers(1, 21))
        s = Setting(
            L=1.0, sigma2=1.0, gap=1.0, control=1.0, rho=rho, clients=cohort, share=cohort / clients, local_steps=K,
            rounds=1,
        )  # fmt: skip
        within = np.where(
            rng.random(2) < 0.5, 1.0, rng.uniform(1e-3, 1, 2)
        )  # at a limit, or below it
        for name, most in (("ρ", limits_without_share(s)), ("ρS/N", largest_steps(s))):
            descent = sampled(
                s, Steps(local=most.local * within[0], effective=most.effective * within[1])
            )
            found[name][0] += not descent.control_falls
            found[name][1] += not descent.gradient_falls
    return {name: (a, b) for name, (a, b) in found.items()}


def main() -> None:
    """Print how often the argument for sampled clients fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--settings", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{args.settings:,} random settings with S of N clients per round; the argument fails in")
    for name, (control, gradient) in failures(args.settings, args.seed).items():
        print(f"  {name:5} in the conditions: a_c < 0 in {control:,}, a_g < ρη̃/8 in {gradient:,}")


if __name__ == "__main__":
    main()
