"""How fast the error of a quadratic decays when each round works in a share ρ of the directions (ours).

With the Hessian H of F and e = x − x*, a round of K full local steps inside a random subspace gives, on average over P,

    e_j ← (1 − ρ(1 − (1 − ηλ_j)^K)) e_j        in the direction of H's eigenvalue λ_j        ("mean field")

Here each direction has its own curvature. In a narrow subspace the steps see the curvature of P H Pᵀ instead, whose
eigenvalues are close to λ̄ = mean λ: e_j ← (1 − ρ λ_j (1 − (1 − ηλ̄)^K)/λ̄) e_j ("narrow").
For ηKλ ≪ 1 both are 1 − ρηKλ_j. Rounds to a given error grow as 1/(ρηKλ_min): a run that ends before that looks like
a plateau but is an unfinished transient.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.config import Settings
from fedspan.tasks.regression import Regression

Floats = npt.NDArray[np.float64]
Model = Literal["mean field", "narrow"]


def factors(
    eigenvalues: Floats, lr: float, local_steps: int, rho: float, model: Model = "mean field"
) -> Floats:
    """The factor by which a round shrinks the error, per eigendirection."""
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
    left = np.abs(factors(eigenvalues, lr, local_steps, rho, model))[:, None] ** (
        2 * rounds[None, :]
    )
    found: Floats = np.sqrt(weight @ left / weight.sum())
    return found


def main() -> None:
    """Print the predicted transient of the toy problem at het = 2 and r = 1, one line per seed."""
    lr, local_steps, rho, rounds = 1e-3, 5, 0.01, np.arange(22_500.0, 25_001, 100)
    for seed in range(3):
        problem = Regression(het=2.0).build((seed,), Settings(batch_size=20, dtype="float64"))
        ((hessian, *_),) = problem.terms
        start = problem.optimum().numpy().reshape(problem.layout.blocks[0].shape).T
        values: Floats = np.asarray(np.linalg.eigvalsh(hessian), np.float64)
        lost = 1 - factors(values[:80], lr, local_steps, rho).mean()
        error = relative_error(hessian, start, rounds, lr=lr, local_steps=local_steps, rho=rho)
        print(
            f"seed {seed}: 20 eigenvalues from {values[80]:.1f} to {values[-1]:.1f}, 80 near {values[:80].mean():.2f}"
        )
        print(
            f"  the 80 lose {lost:.1e} of their error per round; mean error from round 22,500 on {error.mean():.3f}"
        )


if __name__ == "__main__":
    main()
