"""Lemmas 1 to 4 of arXiv:2604.25467: the effect of one round on noise, drift, the loss and the controls.

Each function is the right-hand side of an inequality. The lemmas need c = mean_i c_i and all clients in every round.
Functions marked "ours" have the smaller constants of docs/theory.md, which also lists the gaps of the printed proofs.
"""

from __future__ import annotations

from fedspan.theory.setting import Setting, Steps


def second_moment(grad_sq: float, sigma2: float) -> float:
    """E‖g_i‖² ≤ ‖∇F_i‖² + σ² (Lemma 1, property 3)."""
    return grad_sq + sigma2


def projected_variance(sigma2: float) -> float:
    """E‖P(g_i − ∇F_i)‖² ≤ σ² for any ‖P‖ ≤ 1 (Lemma 1, property 4)."""
    return sigma2


def projected_variance_tight(sigma2: float, rho: float) -> float:
    """E‖P(g_i − ∇F_i)‖² ≤ ρσ² where E[PᵀP] = ρI and the noise is independent of P (ours)."""
    return rho * sigma2


def correction_gap(control: float, grad_sq: float) -> float:
    """G_t = mean_i ‖∇F_i − c_i + c‖² ≤ 2C_t + 2‖∇F‖² (eq:Gt_to_Ct_tightened)."""
    return 2 * control + 2 * grad_sq


def correction_gap_tight(control: float, grad_sq: float) -> float:
    """G_t ≤ C_t + ‖∇F‖²: the cross term is mean_i ⟨e_i − ē, ∇F⟩ = 0 (ours)."""
    return control + grad_sq


def drift(s: Setting, local: float, gap: float) -> float:
    """E_t = (1/NK) Σ_i Σ_k E‖y_i^k − x‖² ≤ 6Kη_l²σ² + 12K²η_l² G_t, for η_l ≤ 1/(2KL) (Lemma 2, over N and K)."""
    return 6 * s.local_steps * local**2 * s.sigma2 + 12 * s.local_steps**2 * local**2 * gap


def progress(s: Setting, steps: Steps, grad_sq: float, drifted: float) -> float:
    """E F(x⁺) − F(x) ≤ −(ρη̃/4)‖∇F‖² + (Lη̃²/2NK)σ² + (3L²η̃/2)E_t, for η̃ ≤ 1/(4L) (Lemma 3)."""
    eta = steps.effective
    noise = s.L * eta**2 * s.sigma2 / (2 * s.clients * s.local_steps)
    return -s.rho * eta / 4 * grad_sq + noise + 1.5 * s.L**2 * eta * drifted


def progress_proved(s: Setting, steps: Steps, grad_sq: float, drifted: float) -> float:
    """The same with (Lη̃²/NK)σ² + (3L²η̃/4)E_t: later gradients of a round depend on its earlier noise (ours)."""
    eta = steps.effective
    noise = s.L * eta**2 * s.sigma2 / (s.clients * s.local_steps)
    return -s.rho * eta / 4 * grad_sq + noise + 0.75 * s.L**2 * eta * drifted


def contraction(rho: float) -> float:
    """1 − ρ/2: an upper bound on the factor by which a round shrinks C_t (Lemma 4)."""
    return 1 - rho / 2


def contraction_sampled(rho: float, share: float) -> float:
    """1 − ρS/N: the mean factor by which a round of S of N clients shrinks C_t, x at rest (ours)."""
    return 1 - rho * share


def control_error(
    s: Setting, steps: Steps, control: float, grad_sq: float, drifted: float
) -> float:
    """C_{t+1} ≤ (1 − ρ/2)C_t + 3σ²/K + 3L²E_t + (12L²/ρ)η̃²‖∇F‖² + (6L²/ρ)η̃²σ²/NK + (12L⁴/ρ)η̃²E_t (Lemma 4)."""
    moved = (steps.effective * s.L) ** 2 / s.rho
    noise = 3 * s.sigma2 / s.local_steps + 6 * moved * s.sigma2 / (s.clients * s.local_steps)
    moving = 12 * moved * grad_sq + (3 * s.L**2 + 12 * moved * s.L**2) * drifted
    return contraction(s.rho) * control + noise + moving


def control_floor(s: Setting) -> float:
    """6σ²/(ρK): where Lemma 4's contraction and its noise term 3σ²/K balance, x at rest."""
    return 6 * s.sigma2 / (s.rho * s.local_steps)


def control_floor_tight(s: Setting) -> float:
    """σ²/K: the same with noise refreshed in the subspace only, C ← (1 − ρ)C + ρσ²/K (ours)."""
    return s.sigma2 / s.local_steps
