"""How fast the error of a quadratic dies out when only a share ρ of the directions is worked in (ours).

With Hessian H of F and e = x − x*, a round of K full local steps inside a random subspace takes, on average over P,

    e_j ← (1 − ρ(1 − (1 − ηλ_j)^K)) e_j        in the direction of H's eigenvalue λ_j        (mean field)

This takes each direction to meet its own curvature. In a narrow subspace the steps meet that of the subspace instead,
P H Pᵀ, whose eigenvalues crowd around mean λ: there e_j ← (1 − ρ λ_j (1 − (1 − ηλ̄)^K)/λ̄) e_j, with λ̄ = mean λ (narrow).
For ηKλ ≪ 1 the two agree on 1 − ρηKλ_j. Rounds to a given error grow as 1/(ρηKλ_min): a run that is cut short
before that looks like a plateau, and is none.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Model = Literal["mean field", "narrow"]


def factors(eigenvalues: Floats, lr: float, local_steps: int, rho: float, model: Model = "mean field") -> Floats:
    """What a round leaves of the error in each eigendirection."""
    if model == "mean field":
        return 1 - rho * (1 - (1 - lr * eigenvalues) ** local_steps)
    mean = float(eigenvalues.mean())
    return 1 - rho * eigenvalues * (1 - (1 - lr * mean) ** local_steps) / mean


def relative_error(
    hessian: Floats, start: Floats, rounds: Floats, *, lr: float, local_steps: int, rho: float,
    model: Model = "mean field",
) -> Floats:  # fmt: skip
    """‖e_T‖/‖e_0‖ at each T of `rounds`, for e_0 = `start`, (d, m)."""
    eigenvalues, vectors = np.linalg.eigh(hessian)
    weight = ((vectors.T @ start) ** 2).sum(1)
    left = np.abs(factors(eigenvalues, lr, local_steps, rho, model))[:, None] ** (2 * rounds[None, :])
    found: Floats = np.sqrt(weight @ left / weight.sum())
    return found
