"""What local methods share: the one local solver, and the hyper-parameters everybody has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from fedspan.core.errors import SpecError, at_least, below_one, one_of, positive
from fedspan.core.layout import Layout, Vector
from fedspan.core.linear import LinearMap
from fedspan.core.method import ClientState, Down, Method, Round, ServerState, Up
from fedspan.core.projector import Projector, draw
from fedspan.core.sync import Log
from fedspan.projectors.coordinate import Coordinate


def descend(
    start: Vector, direction: Callable[[Vector], Vector], lr: float, steps: int, momentum: float = 0.0
) -> Vector:
    """y ← y − η direction(y), `steps` times; with momentum v ← β v + direction(y), y ← y − η v."""
    walk: Callable[[Vector, float, int], Vector] | None = getattr(direction, "walk", None)
    if walk is not None and not momentum:
        return walk(start, lr, steps)
    y, v = start, None
    for _ in range(steps):
        d = direction(y)
        if momentum:
            d = v = d if v is None else torch.add(d, v, alpha=momentum)
        y = torch.add(y, d, alpha=-lr)
    return y


class Averaged:
    """A direction that remembers the mean of what it gave; with momentum that cannot be read off the end point."""

    def __init__(self, grad: Callable[[Vector], Vector]) -> None:
        self.grad, self.total, self.calls = grad, torch.zeros(()), 0

    def __call__(self, y: Vector) -> Vector:
        g = self.grad(y)
        self.total, self.calls = self.total + g, self.calls + 1
        return g

    @property
    def mean(self) -> Vector:
        """ḡ."""
        return self.total / self.calls


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Method[ServerState, ClientState, Down, Up]):
    """A method of K plain local steps."""

    lr: float  # η_l
    local_steps: int = 10  # K
    server_lr: float = 1.0  # η_g
    momentum: float = 0.0  # β of the local steps; starts at rest in each round
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of lr over rounds
    schedule_rounds: int | None = None  # when a schedule has run out

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        at_least("local_steps", self.local_steps, 1)
        positive("server_lr", self.server_lr)
        below_one("momentum", self.momentum)
        one_of("schedule", self.schedule, ("constant", "linear", "cosine"))
        if self.schedule != "constant":
            if self.schedule_rounds is None:
                raise SpecError(
                    f"`schedule` {self.schedule!r} needs `schedule_rounds`, the round at which it has run out"
                )
            at_least("schedule_rounds", self.schedule_rounds, 1)

    def rate(self, t: int) -> float:
        """η_l in round t: lr times what the schedule leaves of it, never less than a thousandth."""
        if self.schedule_rounds is None or self.schedule == "constant":
            return self.lr
        gone = min(t / self.schedule_rounds, 1.0)
        left = 1 - gone if self.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.lr * max(left, 1e-3)


@dataclass(frozen=True, kw_only=True)
class InSubspace(LocalSteps[ServerState, ClientState, Down, Up]):
    """A method whose local steps stay in x + range(Pᵀ), with P drawn by both ends."""

    projector: Projector = None  # type: ignore[assignment]  # set from `rank` where it is not given
    rank: int | float | Mapping[str, int | float] | None = None  # short for a coordinate projector of this rank
    refresh: int = 1  # rounds between two draws of P
    rank_boost: float = 1.0  # η_l = lr · min(d/r, rank_boost): a step that knows the rank; 1 leaves lr as it is

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.projector is None) == (self.rank is None):
            raise SpecError("give either `projector`, such as {name = 'gaussian', rank = 20}, or `rank`, such as 0.2")
        if self.rank is not None:
            object.__setattr__(self, "projector", Coordinate(rank=self.rank))
            object.__setattr__(self, "rank", None)
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

    def step(self, P: LinearMap, t: int) -> float:
        """η_l. Inside a random subspace curvature and noise shrink with r/d, so a larger step stays stable."""
        return self.rate(t) * min(P.layout.size / P.rank, self.rank_boost)

    def expand(self, entry: Vector, rnd: Round) -> Vector:
        """Pᵀ δ: the log holds what a round added to x in its own subspace."""
        return self.subspace(rnd).T @ entry

    def push(self, log: Log, entry: Vector, rnd: Round) -> Log:
        """The log with this round's change, and as many before it as are worth sending: beyond d/r x is cheaper."""
        return log.push(entry, max(1, rnd.layout.size // entry.shape[-1]))

    def skip(self, server: ServerState, rnd: Round) -> ServerState:
        """Nobody replied: x stays, and the log says so."""
        held: Any = server
        entry = held.x.new_zeros(*held.x.shape[:-1], self.subspace(rnd).rank)
        return cast(ServerState, replace(held, log=self.push(held.log, entry, rnd)))
