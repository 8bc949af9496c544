"""ε of single examples, where each client adds noise to its own gradients (`nn.objective.PrivateGradient`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedspan.core.callback import Callback
from fedspan.core.errors import SpecError
from fedspan.core.objective import Problem
from fedspan.core.privacy import Privacy
from fedspan.privacy import accountant
from fedspan.privacy.mechanism import check_delta


class ExampleEpsilon(Callback):
    """The column `epsilon`: that of the client whose examples are drawn most often, as if it took part in every round.

    All that a client sends and keeps follows from its noised gradients, so any method can be used.
    """

    def __init__(self, settings: Privacy, problem: Problem) -> None:
        rate = getattr(problem, "sampling_rate", None)
        if rate is None:
            raise SpecError(
                "`privacy` of level 'example' needs a task with a torch model; use level 'client'"
            )
        if problem.buffers0 is not None:
            raise SpecError(
                "the model has buffers, such as running statistics of BatchNorm, which have no noise; with `privacy` "
                "use GroupNorm or LayerNorm"
            )
        most = max(problem.examples(client) for client in range(problem.clients))
        check_delta(settings.delta, most, "examples of a client")
        self.settings, self.rate = settings, float(rate())

    def measure(self, run: Any) -> dict[str, Any]:
        """ε after the local steps of all rounds so far."""
        return {"epsilon": np.full(len(run.seeds), self.epsilon(run.t * run.method.local_steps))}

    def epsilon(self, steps: int) -> float:
        """ε after so many local steps."""
        return accountant.epsilon(self.settings.noise or 0.0, self.rate, steps, self.settings.delta)
