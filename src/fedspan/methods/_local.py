"""What local methods share: the one local solver, and the hyper-parameters everybody has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedspan.core.errors import SpecError, at_least, positive
from fedspan.core.layout import Layout, Vector
from fedspan.core.linear import LinearMap
from fedspan.core.method import ClientState, Down, Method, Round, ServerState, Up
from fedspan.core.projector import Projector, draw


def descend(start: Vector, direction: Callable[[Vector], Vector], lr: float, steps: int) -> Vector:
    """y ← y − η direction(y), `steps` times."""
    y = start
    for _ in range(steps):
        y = torch.add(y, direction(y), alpha=-lr)
    return y


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Method[ServerState, ClientState, Down, Up]):
    """A method of K plain local steps."""

    lr: float  # η_l
    local_steps: int  # K
    server_lr: float = 1.0  # η_g

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        at_least("local_steps", self.local_steps, 1)
        positive("server_lr", self.server_lr)


@dataclass(frozen=True, kw_only=True)
class InSubspace(LocalSteps[ServerState, ClientState, Down, Up]):
    """A method whose local steps stay in x + range(Pᵀ), with P drawn by both ends."""

    projector: Projector
    refresh: int = 1  # rounds between two draws of P
    rank_boost: float = 1.0  # η_l = lr · min(d/r, rank_boost): a step that knows the rank; 1 leaves lr as it is

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("refresh", self.refresh, 1)
        if not self.rank_boost >= 1:
            raise SpecError(f"`rank_boost` must be at least 1, got {self.rank_boost!r}")

    def check(self, layout: Layout) -> None:
        """The rank must fit every block."""
        for block in layout.blocks:
            if block.axis is not None:
                self.projector.rank_of(block)

    def subspace(self, rnd: Round) -> LinearMap:
        """P_t."""
        return draw(self.projector, rnd.layout, rnd.seeds, rnd.t // self.refresh)

    def step(self, P: LinearMap) -> float:
        """η_l. Inside a random subspace curvature and noise shrink with r/d, so a larger step stays stable."""
        return self.lr * min(P.layout.size / P.rank, self.rank_boost)

    def expand(self, entry: Vector, rnd: Round) -> Vector:
        """Pᵀ δ: the log holds what a round added to x in its own subspace."""
        return self.subspace(rnd).T @ entry

    def log_length(self, layout: Layout, entry: Vector) -> int:
        """As many entries as are worth sending: beyond d/r the whole x is cheaper."""
        return max(1, layout.size // entry.shape[-1])
