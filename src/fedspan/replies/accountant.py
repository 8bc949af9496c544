"""ε and δ of a run, by Google's dp-accounting.

A round is a Gaussian mechanism on a Poisson sample: every client takes part with probability q, its part of the sum has
a norm of at most C, and each number of the sum gets noise of standard deviation σC. Neighbors differ by one client that
is there or not. The privacy loss distributions of the rounds are composed, each rounded up (Doroshenko et al. 2022).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.extras import needs
from fedspan.core.privacy import Privacy

INTERVAL = 1e-3  # of the discretized privacy loss: ε is right to about this, and never too small
COARSE = 0.3  # below this σ losses are large, and so is the interval
LEAST, MOST = 0.05, 1e6  # noise multipliers between which a solution is sought


def epsilon(noise: float, q: float, rounds: int, delta: float) -> float:
    """ε after so many rounds."""
    if rounds == 0:
        return 0.0
    if noise <= 0:
        return math.inf
    return float(_one_round(noise, q).self_compose(rounds).get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=8)
def _one_round(noise: float, q: float) -> Any:
    needs("privacy", "dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution  # 2 s

    interval = INTERVAL * max(1.0, (COARSE / noise) ** 2)
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=q, value_discretization_interval=interval, use_connect_dots=True
    )


@functools.lru_cache(maxsize=64)
def noise_for(target: float, q: float, rounds: int, delta: float) -> float:
    """The smallest noise multiplier with which a run spends at most this ε, to 4 digits, rounded up."""
    low, high = LEAST, 1.0
    while epsilon(high, q, rounds, delta) > target:
        low, high = high, 2 * high
        if high > MOST:
            raise SpecError(
                f"`epsilon` {target!r} needs more noise than {MOST:g} over {rounds} rounds; give a larger one"
            )
    while high - low > 1e-4 * high:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon(middle, q, rounds, delta) > target else (low, middle)
    return high


def check_delta(delta: float, count: int, of: str) -> None:
    """Refuses a δ that would allow to publish the data of one of so many."""
    if delta * count >= 1:
        raise SpecError(
            f"`delta` {delta!r} is not below 1/{count}: it would allow to publish the data of one of {count} {of}; "
            f"give at most {0.1 / count:.1g}"
        )


class ExampleEpsilon(Callback):
    """ε of single examples, whose gradients have noise (`nn.objective.PrivateGradient`), as the column `epsilon`.

    It is that of the client whose examples are drawn most often, as if it took part in every round.

    All that a client sends and keeps follows from its noised gradients, so any method can be used.
    """

    def __init__(self, settings: Privacy, problem: Any) -> None:
        most = max(map(problem.examples, range(problem.clients)))
        check_delta(settings.delta, most, "examples of a client")
        self.settings, self.rate = settings, float(problem.sampling_rate())

    def measure(self, run: Any) -> dict[str, Any]:
        """ε after the local steps of all rounds so far."""
        return {"epsilon": np.full(len(run.seeds), self.epsilon(run.t * run.method.local_steps))}

    def epsilon(self, steps: int) -> float:
        """ε after so many local steps."""
        return epsilon(self.settings.noise or 0.0, self.rate, steps, self.settings.delta)
