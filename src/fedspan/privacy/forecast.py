"""How much noise an ε costs, before a run: what `fedspan plan --epsilon` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedspan.core.privacy import Privacy
from fedspan.privacy.mechanism import Mechanism


@dataclass(frozen=True)
class Forecast:
    """The noise of a run, in units of the clip."""

    noise: float  # σ
    q: float
    expected: float  # qN
    rounds: int

    @staticmethod
    def of(settings: Privacy, clients: int, clients_per_round: int, rounds: int) -> Forecast:
        """The noise that settings of privacy mean for so many clients and rounds."""
        made = Mechanism.of(settings, clients, clients_per_round, rounds)
        return Forecast(made.vector_noise, made.q, made.expected, rounds)

    @property
    def per_number(self) -> float:
        """Standard deviation of the noise of each number of the mean."""
        return self.noise / self.expected

    def signal_to_noise(self, numbers: int) -> float:
        """Norm of the mean over norm of the noise in a round, if all clients sent the same vector of norm C."""
        return 1 / (self.per_number * math.sqrt(numbers)) if self.noise else math.inf

    def over_the_run(self, numbers: int) -> float:
        """The same of the sum of all rounds, if the mean always had one direction."""
        return self.signal_to_noise(numbers) * math.sqrt(self.rounds)
