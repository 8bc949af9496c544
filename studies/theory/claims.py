"""Claims of the theory against measured runs: predicted, observed, and whether the claim holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

import lemmas
import transient
from fedspan.core.spec import Spec
from fedspan.tasks.regression import RegressionProblem
from fedspan.theory import corollary, theorem
from fedspan.theory.diagnosis import setting_of
from fedspan.theory.estimates import estimate, variance
from fedspan.theory.gradient_probe import batch_grads
from fedspan.theory.setting import Setting, Steps
from runs import Run

Floats = npt.NDArray[np.float64]
TAIL = 0.5  # share of a run's rows that stand for its floor


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    text: str
    predicted: str
    observed: str
    holds: bool

    def cells(self) -> list[str]:
        """For tables."""
        return [self.text, self.predicted, self.observed, "yes" if self.holds else "**no**"]


def rank(run: Run) -> int:
    """r."""
    return int(run.point["method.space.rank"])


@functools.lru_cache(maxsize=64)
def problem_of(spec: Spec) -> RegressionProblem:
    """The data of a run."""
    return cast(RegressionProblem, spec.task.build((spec.seed,), spec))


def setting(run: Run) -> Setting:
    """L, σ², Δ_F, C_0 and the rest of a run."""
    problem = problem_of(run.spec)
    return setting_of(estimate(problem), run.spec.method, problem, problem.clients, run.spec.rounds)


def noise(run: Run) -> float:
    """mean_i σ_i² at x⁰."""
    problem = problem_of(run.spec)
    return float(variance(batch_grads(problem, problem.x0, 400))[0].mean())


def factor(run: Run) -> float:
    """What a round leaves of C_t, from the slope of its logarithm."""
    error = run.mean("control_error")
    seen = error > 1e-6 * error[0]
    return float(np.exp(np.polyfit(run.rounds[seen], np.log(error[seen]), 1)[0]))


def floors(run: Run, name: str = "grad_sq") -> Floats:
    """The mean of a metric over the end of the run, for each seed."""
    values = run.metrics[name]
    found: Floats = values[:, int(values.shape[1] * (1 - TAIL)) :].mean(1)
    return found


def slope(x: Sequence[float], y: Floats) -> tuple[float, float]:
    """Slope of log y (points, seeds) against log x, and half the width of its 95 % interval over seeds."""
    each = np.polyfit(np.log(np.array(x)), np.log(y), 1)[0]
    half = 1.96 * each.std(ddof=1) / np.sqrt(len(each)) if len(each) > 1 else np.nan
    return float(each.mean()), float(half)


def rounds_to(run: Run, share: float) -> Floats:
    """The first round at which ‖∇F‖² is `share` of the start, for each seed; the last one where it never is."""
    values = run.metrics["grad_sq"]
    below = values <= share * values[:, :1]
    found: Floats = run.rounds[np.where(below.any(1), below.argmax(1), values.shape[1] - 1)]
    return found


def drift_ratio(run: Run) -> Floats:
    """Measured drift over Lemma 2's bound, in every row."""
    s = setting(run)
    gap = lemmas.correction_gap(1, 0) * run.mean("control_error") + 2 * run.mean("grad_sq")
    bounds = np.array([lemmas.drift(s, float(run.spec.method.lr), float(g)) for g in gap])
    found: Floats = run.mean("drift") / bounds
    return found


def drift(runs: list[Run]) -> list[Claim]:
    """Lemma 2."""
    out = []
    for run in runs:
        s, ratio = setting(run), drift_ratio(run)
        assert float(run.spec.method.lr) <= 1 / (2 * s.local_steps * s.L)
        out.append(
            Claim(
                f"Lemma 2, ρ = {s.rho:g}: drift within its bound",
                "ratio ≤ 1",
                f"{ratio.max():.2g}",
                ratio.max() <= 1,
            )
        )
    return out


def contraction(runs: list[Run]) -> list[Claim]:
    """Lemma 4: the factor."""
    out = []
    for run in runs:
        rho, share = rank(run) / 40, run.point["clients_per_round"] / 20
        seen, ours = factor(run), lemmas.contraction_sampled(rho, share)
        if share == 1:
            limit = lemmas.contraction(rho)
            text = f"Lemma 4, ρ = {rho:g}: C_t contracts"
            out.append(Claim(text, f"≤ 1 − ρ/2 = {limit:.3f}", f"{seen:.3f}", seen <= limit))
        text = f"ours, ρ = {rho:g}, S/N = {share:g}: C_t contracts by 1 − ρS/N"
        out.append(Claim(text, f"{ours:.3f}", f"{seen:.3f}", abs(seen - ours) < 0.1 * (1 - ours)))
    return out


def floor(runs: list[Run]) -> list[Claim]:
    """Lemma 4: the noise."""
    out = []
    for run in runs:
        rho, steps, sigma2 = rank(run) / 40, run.spec.method.local_steps, noise(run)
        seen = float(floors(run, "control_error").mean())
        limit = 6 * sigma2 / (rho * steps)
        text = f"Lemma 4, ρ = {rho:g}: C_t settles below 6σ²/(ρK)"
        out.append(Claim(text, f"≤ {limit:.3g}", f"{seen:.3g}", seen <= limit))
        text = f"ours, ρ = {rho:g}: it settles at σ²/K, noise tightened by ρ"
        out.append(
            Claim(
                text, f"{sigma2 / steps:.3g}", f"{seen:.3g}", abs(seen * steps / sigma2 - 1) < 0.1
            )
        )
    return out


def bound(runs: list[Run]) -> list[Claim]:
    """The corollary."""
    out = []
    for run in runs:
        s, method = setting(run), cast(Any, run.spec.method)
        steps = Steps.of(method.lr, method.server.lr, method.local_steps)
        seen = float(run.mean("grad_sq").min())
        limits = {"corollary": corollary.bound(s), "ours": theorem.bound_proved(s, steps)}
        for name, limit in limits.items():
            text = f"{name}, ρ = {s.rho:g}, T = {s.rounds:,}: min ‖∇F‖² within the bound"
            out.append(
                Claim(
                    text,
                    f"≤ {limit:.3g}",
                    f"{seen:.3g}, {limit / seen:.0f} times below",
                    seen <= limit,
                )
            )
    return out


def _slope_claim(
    text: str, predicted: float, x: Sequence[float], y: Floats, allowance: float
) -> Claim:
    found, half = slope(x, y)
    return Claim(
        text,
        f"slope {predicted:g}",
        f"{found:.2f} ± {half:.2f}",
        abs(found - predicted) <= max(half, allowance),
    )


def clients(runs: list[Run]) -> list[Claim]:
    """Linear speed-up in N."""
    x = [run.point["task.clients"] * run.spec.method.local_steps for run in runs]
    return [
        _slope_claim(
            "‖∇F‖² falls as 1/N at constant η̃", -1, x, np.stack([floors(run) for run in runs]), 0.1
        )
    ]


def steps(runs: list[Run]) -> list[Claim]:
    """Linear speed-up in K."""
    x = [8 * run.point["method.local_steps"] for run in runs]
    return [
        _slope_claim(
            "‖∇F‖² falls as 1/K at constant η̃", -1, x, np.stack([floors(run) for run in runs]), 0.1
        )
    ]


def share_floor(runs: list[Run]) -> list[Claim]:
    """ρ and the noise."""
    x = [rank(run) / 20 for run in runs]
    y = np.stack([floors(run) for run in runs])
    found, half = slope(x, y)
    return [
        Claim(
            "noise floor grows no faster than 1/ρ at constant η̃",
            "slope ≥ −1",
            f"{found:.2f} ± {half:.2f}",
            found >= -1,
        ),
        _slope_claim("ours: it does not depend on ρ", 0, x, y, 0.1),
    ]


def share_rate(runs: list[Run]) -> list[Claim]:
    """ρ and the transient."""
    x = [rank(run) / 40 for run in runs]
    y = np.stack([rounds_to(run, 0.01) for run in runs])
    return [_slope_claim("rounds to a target grow as 1/ρ at constant η̃", -1, x, y, 0.1)]


def linear_rate(run: Run) -> float:
    """Decay of log ‖∇F‖² a round, over the second half of what is above rounding."""
    values = run.mean("grad_sq")
    seen = np.flatnonzero(values > 1e-20 * values[0])
    late = seen[len(seen) // 2 :]
    return float(-np.polyfit(run.rounds[late], np.log(values[late]), 1)[0])


def heterogeneity(runs: list[Run]) -> list[Claim]:
    """No heterogeneity in the rate."""
    own = [run for run in runs if run.point["method.name"] == "ssf"]
    rates = [linear_rate(run) for run in own]
    spread = max(rates) / min(rates) - 1
    levels = ", ".join(f"{run.point['task.target_het']:g}" for run in own)
    out = [
        Claim(
            f"linear rate of SSF alike at target_het {levels}",
            "same",
            f"± {50 * spread:.1f} %",
            spread < 0.1,
        )
    ]
    for run in runs:
        ends, far = run.mean("grad_sq"), run.point["task.target_het"]
        left = float(ends[-1] / ends[0])
        if far > 0:
            ssf = run.point["method.name"] == "ssf"
            what = "SSF goes on" if ssf else "without controls it stops"
            text = f"{what}, target_het {far:g}: ‖∇F‖² left of the start"
            out.append(
                Claim(text, "→ 0" if ssf else "a floor", f"{left:.1e}", (left < 1e-9) == ssf)
            )
    return out


def sampling(runs: list[Run]) -> list[Claim]:
    """Partial participation."""
    out = []
    for run in runs:
        rule, s = run.point["method.drift.rule"], run.point["clients_per_round"]
        values = run.mean("grad_sq")
        left, exact = float(values[-1] / values[0]), rule == "exact" or s == 20
        text = f"ours, rule = '{rule}', S = {s} of 20: ‖∇F‖² that is left"
        out.append(
            Claim(text, "→ 0" if exact else "a floor", f"{left:.1e}", (left < 1e-6) == exact)
        )
    return out


def predicted_error(run: Run, model: transient.Model) -> Floats:
    """The relative error that the transient of the quadratic predicts, in every row."""
    problem, method = problem_of(run.spec), run.spec.method
    ((hessian, *_),) = problem.terms
    start = problem.optimum().numpy().reshape(problem.layout.blocks[0].shape).T
    share = rank(run) / problem.layout.blocks[0].inputs
    return transient.relative_error(
        hessian,
        start,
        run.rounds,
        lr=float(method.lr),
        local_steps=method.local_steps,
        rho=share,
        model=model,
    )


def plateau(runs: list[Run]) -> list[Claim]:
    """The transient."""
    out = []
    for run in runs:
        seen = run.mean("rel_err")
        busy = seen > 10 * seen[-5:].min() if seen[-1] < 0.1 else np.ones(len(seen), bool)
        for model in ("mean field", "narrow"):
            ahead = predicted_error(run, model)
            off = float(np.abs(ahead[busy] / seen[busy] - 1).max())
            text = f"ours, r = {rank(run)}: transient by the {model} formula, at T = {run.rounds[busy][-1]:,.0f}"
            out.append(
                Claim(
                    text,
                    f"{ahead[busy][-1]:.3g}",
                    f"{seen[busy][-1]:.3g}, at most {100 * off:.0f} % off",
                    off < 0.15,
                )
            )
    return out


JUDGES: dict[str, Callable[[list[Run]], list[Claim]]] = {
    "drift": drift,
    "contraction": contraction,
    "floor": floor,
    "bound": bound,
    "clients": clients,
    "steps": steps,
    "share_floor": share_floor,
    "share_rate": share_rate,
    "heterogeneity": heterogeneity,
    "sampling": sampling,
    "transient": plateau,
}
