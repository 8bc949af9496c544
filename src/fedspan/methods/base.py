"""What methods with local steps share: the learning rate and its schedule, the number of steps, and the optimizer."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedspan import Layout, Method, Optimizer, Round, SpecError, Vector
from fedspan.core.errors import at_least, at_most, positive, shown
from fedspan.core.method import Footprint, LearningRate
from fedspan.core.objective import Direction
from fedspan.core.registry import name_of
from fedspan.core.tables import accept_choices
from fedspan.optimizers.sgd import SGD

PLAIN_STEPS = SGD()


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Method):
    """A method whose clients take K local steps.

    Args:
        lr: Local step size η_l. `"search"` tries several before the run, `"auto"` takes that of the theory.
        local_steps: Local steps per round, K.
        local: Optimizer of the local steps, such as `AdamW()`, `SGD(momentum=0.9)` or `"adamw"`.
        schedule: How `lr` falls over the rounds of the run: `"constant"`, `"linear"` or `"cosine"`, which end at a
            thousandth of `lr`.
        warmup: Rounds in which `lr` rises linearly at the start; the schedule spans the rounds after them.
    """

    lr: LearningRate = "search"  # η_l: local step size, "search" or "auto"
    local_steps: int = 10  # K: local steps per round
    local: Optimizer = PLAIN_STEPS  # optimizer of the local steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # how `lr` falls
    warmup: int = 0  # rounds at the start in which `lr` rises linearly
    keeps_local: ClassVar[bool] = False  # whether states of `local` last between rounds

    def __post_init__(self) -> None:
        accept_choices(self)
        if not isinstance(self.lr, str):
            positive("lr", self.lr)
        elif self.lr not in ("search", "auto"):
            raise SpecError(
                f"`lr` must be a positive number, 'search' or 'auto', got {shown(self.lr)}"
            )
        if (self.local.scaled or self.local.moments != "reset") and not self.keeps_local:
            raise SpecError(
                f"`local` {name_of(self.local)!r} keeps states between rounds, and {type(self).__name__} has no place "
                "for them; use sgd, or adamw with moments = 'reset'"
            )
        at_least("local_steps", self.local_steps, 1)
        at_most("local_steps", self.local_steps, 10**9)
        at_least("warmup", self.warmup, 0)

    def needs_plain_steps(self, why: str) -> None:
        """Raise SpecError unless the local steps are those of SGD without momentum."""
        if not self.local.plain or self.local.scaled:
            raise SpecError(
                f"`local` {name_of(self.local)!r} with these settings is not for {name_of(self)}, whose {why}; use sgd "
                "without momentum"
            )

    @property
    def spans_run(self) -> bool:  # type: ignore[override]
        """Whether `lr` follows a schedule; a warm-up alone does not depend on the length of the run."""
        return self.schedule != "constant"

    def footprint(self, layout: Layout) -> Footprint:
        space = getattr(self, "space", None)  # a step inside the subspace, if there is one
        size = layout.size if space is None else space.size(layout)
        return Footprint(size, self.local.size(size))

    def descend(
        self, start: Vector, direction: Direction, lr: float, origin: Vector | None = None
    ) -> Vector:
        """Return the end point of K local steps along a direction; the optimizer starts without memory."""
        return self.local.descend(start, direction, lr, self.local_steps, origin)[0]

    def rate(self, rnd: Round) -> float:
        """η_l in a round: `lr` times what warm-up and schedule leave of it."""
        if isinstance(self.lr, str):
            raise SpecError(
                f"`lr` is still {self.lr!r}: fedspan.run and fedspan.fit find the number; or set one"
            )
        if rnd.t < self.warmup:
            return self.lr * (rnd.t + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return self.lr
        if rnd.rounds is None:
            raise SpecError(
                f"`schedule` {self.schedule!r} needs the length of the run; give `rounds` to the Loop"
            )
        done = min((rnd.t - self.warmup) / max(rnd.rounds - self.warmup, 1), 1.0)
        left = 1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * max(left, 1e-3)
