"""What local methods share: the way to the one local solver, and the hyper-parameters everybody has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from fedspan.core.errors import SpecError, at_least, below_one, one_of, positive
from fedspan.core.layout import Layout, Vector
from fedspan.core.linear import LinearMap
from fedspan.core.method import ClientState, Down, Method, Round, ServerState, Up
from fedspan.core.objective import Direction
from fedspan.core.optimizer import SGD, Optimizer
from fedspan.core.projector import Projector, draw
from fedspan.core.registry import name_of
from fedspan.core.sync import Log
from fedspan.projectors.coordinate import Coordinate
from fedspan.projectors.identity import Identity


DEFAULT_RANK = 0.1


class Averaged:
    """A direction that remembers the mean of what it gave; only plain steps tell it by their end point."""

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
    """A method of K local steps: plain ones, or with momentum or another optimizer."""

    lr: float | Literal["search", "auto"] = "search"  # η_l
    local_steps: int = 10  # K
    server_lr: float = 1.0  # η_g
    momentum: float = 0.0  # β of the local steps
    optimizer: Optimizer | None = None  # of the local steps, such as adamw; None: SGD with `momentum`
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # of lr over rounds
    schedule_rounds: int | None = None  # when a schedule has run out

    def __post_init__(self) -> None:
        if isinstance(self.lr, str):
            one_of("lr", self.lr, ("search", "auto"))
        else:
            positive("lr", self.lr)
        at_least("local_steps", self.local_steps, 1)
        positive("server_lr", self.server_lr)
        below_one("momentum", self.momentum)
        if self.momentum and self.optimizer is not None:
            raise SpecError(
                f"`momentum` is that of SGD, got {self.momentum!r} with `optimizer` {name_of(self.optimizer)!r}, which "
                "has its own; leave it at 0"
            )
        one_of("schedule", self.schedule, ("constant", "linear", "cosine"))
        if self.schedule != "constant":
            if self.schedule_rounds is None:
                raise SpecError(
                    f"`schedule` {self.schedule!r} needs `schedule_rounds`, the round at which it has run out"
                )
            at_least("schedule_rounds", self.schedule_rounds, 1)

    @property
    def solver(self) -> Optimizer:
        """The optimizer of the local steps."""
        return SGD(momentum=self.momentum) if self.optimizer is None else self.optimizer

    def descend(self, start: Vector, direction: Direction, lr: float, origin: Vector | None = None) -> Vector:
        """Where K local steps along a direction lead; the optimizer starts at rest."""
        return self.solver.descend(start, direction, lr, self.local_steps, origin)[0]

    def only_plain(self, why: str) -> None:
        """Refuse momentum and optimizers."""
        if self.momentum:
            raise SpecError(f"{name_of(self)} takes no local `momentum`, got {self.momentum!r}: {why}; leave it at 0")
        if self.optimizer is not None:
            kind = name_of(self.optimizer)
            raise SpecError(f"{name_of(self)} takes no local `optimizer`, got {kind!r}: {why}; leave it out")

    def rate(self, t: int) -> float:
        """η_l in round t: lr times what the schedule leaves of it, never less than a thousandth."""
        if isinstance(self.lr, str):
            raise SpecError(f"`lr` is {self.lr!r}: `fedspan.run` and `fedspan.fit` find the number; give one here")
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
    moments: Literal["reset", "keep", "project"] | None = (
        None  # the optimizer's, between a client's rounds; None: reset
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.projector is None and self.rank is None:
            object.__setattr__(self, "rank", DEFAULT_RANK)
        if (self.projector is None) == (self.rank is None):
            raise SpecError("give either `projector`, such as {name = 'gaussian', rank = 20}, or `rank`, such as 0.2")
        if self.rank is not None:
            object.__setattr__(self, "projector", Coordinate(rank=self.rank))
            object.__setattr__(self, "rank", None)
        at_least("refresh", self.refresh, 1)
        if not self.rank_boost >= 1:
            raise SpecError(f"`rank_boost` must be at least 1, got {self.rank_boost!r}")
        if self.moments == "reset":
            object.__setattr__(self, "moments", None)
        if self.moments is not None:
            one_of("moments", self.moments, ("reset", "keep", "project"))
            if self.solver.plain:
                raise SpecError(f"`moments` {self.moments!r}: plain steps have none; set `momentum` or `optimizer`")
        if self.moments == "keep" and self.refresh == 1 and not isinstance(self.projector, Identity):
            raise SpecError(
                "`moments` 'keep' keeps nothing where P is drawn anew in every round; set `refresh` above 1, or "
                "`moments` to 'project'"
            )

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

    @property
    def private(self) -> tuple[str, ...]:
        """Moments follow from a client's own gradients."""
        return () if self.moments is None else ("moments",)

    def at_rest(self, x0: Vector, layout: Layout) -> Vector:
        """The moments of a client that has not taken part; no numbers at all where none are kept."""
        kept = 0 if self.moments is None else self.solver.size(draw(self.projector, layout, (0,), 0).rank)
        return x0.new_zeros(*x0.shape[:-1], kept)

    def descend_inside(
        self, x: Vector, P: LinearMap, direction: Direction, held: Vector, rnd: Round
    ) -> tuple[Vector, Vector]:
        """(z, moments to keep) of K local steps from z = 0 inside x + range(Pᵀ)."""
        start = x.new_zeros(*rnd.ids.shape, P.rank)
        origin = P @ x if self.solver.decay else None
        begin = None if self.moments is None else self.recalled(held, P, rnd)
        z, memory = self.solver.descend(start, direction, self.step(P, rnd.t), self.local_steps, origin, begin)
        return z, held if self.moments is None else memory

    def recalled(self, held: Vector, P: LinearMap, rnd: Round) -> Vector:
        """A cohort's moments as they are in P: those of another P are re-projected, or given up."""
        if all(factor is None for factor in P.factors):
            return held
        now = rnd.t // self.refresh
        then = np.where(rnd.last_round < 0, now, rnd.last_round // self.refresh)
        for epoch in np.unique(then[then != now]).tolist():
            new = torch.zeros_like(held)
            if self.moments == "project":
                new = self.solver.carry(held, draw(self.projector, rnd.layout, rnd.seeds, epoch), P)
            held = torch.where(torch.from_numpy(then == epoch).unsqueeze(-1), new, held)
        return held

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
