"""What methods with local steps share: their hyper-parameters, the local solver, and the shared subspace."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np
import torch

from fedspan import (
    Compressor,
    Layout,
    LogsChanges,
    Method,
    Optimizer,
    Projector,
    Round,
    SpecError,
    Vector,
)
from fedspan.core.building import accept_choices
from fedspan.core.errors import at_least, at_most, below_one, items, number, one_of, positive, shown
from fedspan.core.footprint import Footprint
from fedspan.core.linear_map import LinearMap
from fedspan.core.method import ClientState, Down, HasModel, LearningRate, ServerState, Up
from fedspan.core.objective import Direction
from fedspan.core.projector import Rank, draw
from fedspan.core.registry import name_of
from fedspan.core.sync import Entry, Log, SyncedDown, bytes_of
from fedspan.optimizers.sgd import SGD
from fedspan.projectors.coordinate import Coordinate
from fedspan.projectors.identity import Identity

TENTH = Coordinate(rank=0.1)
LARGE_LOG = 1 << 24  # bytes of a log from which entries are dropped that no client lacks


@dataclass(frozen=True, eq=False)
class FullModel:
    """The model in full, d numbers, as a server holds and sends it."""

    x: Vector


@dataclass(frozen=True, eq=False)
class LoggedModel(FullModel):
    """The model, its changes in the last rounds, and the server's momentum, which is empty if it has none."""

    log: Log
    m: Vector


@dataclass(frozen=True, eq=False)
class ProbedDown(SyncedDown):
    """What the client lacks of x, and one number to check P."""

    probe: torch.Tensor


@dataclass(frozen=True, eq=False)
class NoState:
    """Clients keep nothing between rounds."""


class Averaged:
    """A direction that remembers the mean of its values; only after plain steps the end point tells it."""

    def __init__(self, direction: Direction) -> None:
        self.direction, self.total, self.calls = direction, torch.zeros(()), 0

    def __call__(self, y: Vector) -> Vector:
        g = self.direction(y)
        self.total, self.calls = self.total + g, self.calls + 1
        return g

    @property
    def mean(self) -> Vector:
        """ḡ."""
        return self.total / self.calls


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Method[ServerState, ClientState, Down, Up]):
    """A method whose clients take K local steps: SGD, with momentum, or another optimizer.

    Args:
        lr: Local step size η_l. `"search"` tries several before the run, `"auto"` takes that of the theory.
        local_steps: Local steps per round, K.
        server_lr: Server step size η_g, which multiplies the mean change.
        momentum: Momentum of the local steps.
        optimizer: Optimizer of the local steps, such as `AdamW()` or `"adamw"`. None is SGD with `momentum`.
        schedule: How `lr` falls over the rounds of the run: `"constant"`, `"linear"`, `"cosine"`, or `"step"`, which
            multiplies it by `gamma` at each of `milestones`. Linear and cosine end at a thousandth of `lr`.
        warmup: Rounds in which `lr` rises linearly at the start; the schedule spans the rounds after them.
        milestones: Where `"step"` lowers `lr`, as shares of the scheduled rounds.
        gamma: What `"step"` multiplies `lr` by.
    """

    lr: LearningRate = "search"  # η_l: local step size, "search" or "auto"
    local_steps: int = 10  # K: local steps per round
    server_lr: float = 1.0  # η_g: server step size
    momentum: float = 0.0  # momentum of the local steps
    optimizer: Optimizer | None = None  # optimizer of the local steps; none: SGD with `momentum`
    schedule: Literal["constant", "linear", "cosine", "step"] = (
        "constant"  # how `lr` falls over the run's rounds
    )
    warmup: int = 0  # rounds at the start in which `lr` rises linearly
    milestones: tuple[float, ...] = (
        0.5,
        0.75,
    )  # where schedule = "step" lowers `lr`, as shares of the run
    gamma: float = 0.1  # what schedule = "step" multiplies `lr` by

    def __post_init__(self) -> None:
        accept_choices(self)
        if isinstance(self.lr, str):
            if self.lr not in ("search", "auto"):
                raise SpecError(
                    f"`lr` must be a positive number, 'search' or 'auto', got {shown(self.lr)}"
                )
        else:
            positive("lr", self.lr)
        at_least("local_steps", self.local_steps, 1)
        at_most("local_steps", self.local_steps, 10**9)
        positive("server_lr", self.server_lr)
        below_one("momentum", self.momentum)
        if self.momentum and self.optimizer is not None:
            name = name_of(self.optimizer)
            raise SpecError(
                f"`momentum` {self.momentum!r} is for SGD, and {name!r} has its own; leave it at 0"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        one_of("schedule", self.schedule, ("constant", "linear", "cosine", "step"))
        at_least("warmup", self.warmup, 0)
        object.__setattr__(
            self, "milestones", items("milestones", self.milestones, "shares of the run")
        )
        if not all(0 < number("milestones", share) < 1 for share in self.milestones):
            raise SpecError(
                f"`milestones` must be shares of the run between 0 and 1, got {list(self.milestones)}"
            )
        positive("gamma", self.gamma)

    @property
    def spans_run(self) -> bool:
        """Whether `lr` follows a schedule; a warm-up alone does not depend on the length of the run."""
        return self.schedule != "constant"

    @functools.cached_property
    def solver(self) -> Optimizer:
        """The optimizer of the local steps."""
        return SGD(momentum=self.momentum) if self.optimizer is None else self.optimizer

    def footprint(self, layout: Layout) -> Footprint:
        return Footprint(layout.size, self.solver.size(layout.size))

    def descend(
        self, start: Vector, direction: Direction, lr: float, origin: Vector | None = None
    ) -> Vector:
        """The end point of K local steps along a direction; the optimizer starts without memory."""
        return self.solver.descend(start, direction, lr, self.local_steps, origin)[0]

    def only_plain(self, why: str) -> None:
        """Refuses momentum and optimizers, for methods that need plain steps."""
        if self.momentum:
            raise SpecError(
                f"`momentum` {self.momentum!r} is not for {name_of(self)}: {why}; leave it at 0"
            )
        if self.optimizer is not None:
            name = name_of(self.optimizer)
            raise SpecError(f"`optimizer` {name!r} is not for {name_of(self)}: {why}; leave it out")

    def needs_contractive(self, compressor: Compressor, n: int, key: str = "compressor") -> None:
        """Refuses a compressor of n numbers that may leave out more than it sends."""
        if compressor.delta(n) is None:
            raise SpecError(
                f"`{key}` {name_of(compressor)!r} is not contractive for {n} numbers with these settings, and "
                f"{name_of(self)} needs a contractive one; use topk or sign, or set its unbiased = false"
            )

    def rate(self, rnd: Round) -> float:
        """η_l in a round: `lr` times what warm-up and schedule leave of it."""
        if isinstance(self.lr, str):
            raise SpecError(
                f"`lr` is still {self.lr!r}: fedspan.run and fedspan.fit find the number; or set one"
            )
        if rnd.t < self.warmup:
            return self.lr * (rnd.t + 1) / (self.warmup + 1)
        return self.lr if self.schedule == "constant" else self.lr * self._left(rnd)

    def _left(self, rnd: Round) -> float:
        """What the schedule leaves of `lr`: at the start 1, at the end of the run a thousandth, or gamma^milestones."""
        if rnd.rounds is None:
            raise SpecError(
                f"`schedule` {self.schedule!r} needs the length of the run; give `rounds` to the Loop"
            )
        done = min((rnd.t - self.warmup) / max(rnd.rounds - self.warmup, 1), 1.0)
        if self.schedule == "step":
            return self.gamma ** sum(done >= share for share in self.milestones)
        return max(
            1 - done if self.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2, 1e-3
        )


class HasLog(HasModel, Protocol):
    """A server state with a log of the changes of x."""

    @property
    def log(self) -> Log:
        """The changes of the last rounds."""


LoggedState = TypeVar("LoggedState", bound=HasLog)


@dataclass(frozen=True, kw_only=True)
class InSubspace(LocalSteps[LoggedState, ClientState, Down, Up], LogsChanges[LoggedState]):
    """A method whose local steps stay in x + range(Pᵀ), with a P that server and clients draw from the shared seed.

    Args:
        projector: The random subspace: a projector, its name, or a table with `name`.
        rank: Replaces the rank of `projector`: a number of directions, a share of them, or a table by name pattern.
        refresh: Rounds after which a new P is drawn.
        rank_boost: Uses lr · min(d/r, rank_boost) as the local step size. 1 leaves `lr` as it is.
        moments: What becomes of the optimizer's memory between a client's rounds: `"reset"` drops it, `"keep"` keeps it
            while P is the same, `"project"` also carries it over to the next P.
    """

    projector: Projector = TENTH  # the random subspace
    rank: Rank | None = (
        None  # replaces the projector's rank: 20 directions, a share of 0.2, or a table by name pattern
    )
    refresh: int = 1  # rounds after which a new P is drawn
    rank_boost: float = 1.0  # the local step size is lr · min(d/r, rank_boost)
    moments: Literal["reset", "keep", "project"] = (
        "reset"  # the optimizer's memory between a client's rounds
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            object.__setattr__(self, "projector", replace(self.projector, rank=self.rank))
            object.__setattr__(self, "rank", None)
        at_least("refresh", self.refresh, 1)
        positive("rank_boost", self.rank_boost)
        if self.rank_boost < 1:
            raise SpecError(f"`rank_boost` must be at least 1, got {self.rank_boost!r}")
        one_of("moments", self.moments, ("reset", "keep", "project"))
        if self.keeps_moments and self.solver.plain:
            raise SpecError(
                f"`moments` {self.moments!r}: plain steps have none; set `momentum` or `optimizer`"
            )
        if (
            self.moments == "keep"
            and self.refresh == 1
            and not isinstance(self.projector, Identity)
        ):
            raise SpecError(
                "`moments` 'keep' keeps nothing if P is drawn in every round; set `refresh` above 1, or "
                "`moments` to 'project'"
            )

    @functools.cached_property
    def keeps_moments(self) -> bool:
        """Whether clients keep the optimizer's memory between rounds."""
        return self.moments != "reset"

    def check(self, layout: Layout) -> None:
        """The rank must fit every block."""
        for block in layout.blocks:
            if block.axis is not None:
                self.projector.rank_of(block)

    def projected(self, layout: Layout) -> tuple[int, int, int]:
        """Parameters of the tensors that are projected, values inside the subspace, and all parameters."""
        inside = [
            b for b in layout.blocks if b.axis is not None and self.projector.rank_of(b) < b.inputs
        ]
        return sum(b.size for b in inside), self.projector.size(layout), layout.size

    def footprint(self, layout: Layout) -> Footprint:
        """A step inside the subspace."""
        r = self.projector.size(layout)
        return Footprint(r, self.solver.size(r))

    def subspace(self, rnd: Round) -> LinearMap:
        """P_t."""
        return draw(self.projector, rnd.layout, rnd.seeds, rnd.t // self.refresh)

    def step(self, P: LinearMap, rnd: Round) -> float:
        """η_l inside the subspace."""
        return self.rate(rnd) * self.boost(P)

    def boost(self, P: LinearMap) -> float:
        """Factor of the step: in a random subspace curvature and noise shrink with r/d, so a larger one is stable."""
        return min(P.layout.size / P.rank, self.rank_boost)

    @property
    def private(self) -> tuple[str, ...]:
        """Moments follow from a client's own gradients."""
        return ("moments",) if self.keeps_moments else ()

    def no_moments(self, x0: Vector, layout: Layout) -> Vector:
        """The moments of a client that has not taken part yet; empty if none are kept."""
        kept = self.solver.size(self.projector.size(layout)) if self.keeps_moments else 0
        return x0.new_zeros(*x0.shape[:-1], kept)

    def descend_inside(
        self, x: Vector, P: LinearMap, direction: Direction, held: Vector, rnd: Round
    ) -> tuple[Vector, Vector]:
        """(z, moments to keep) of K local steps from z = 0 inside x + range(Pᵀ)."""
        start = x.new_zeros(()).expand(*rnd.ids.shape, P.rank)
        origin = P @ x if self.solver.decay else None
        begin = self.carried(held, P, rnd) if self.keeps_moments else None
        z, memory = self.solver.descend(
            start, direction, self.step(P, rnd), self.local_steps, origin, begin
        )
        return z, memory if self.keeps_moments else held

    def carried(self, held: Vector, P: LinearMap, rnd: Round) -> Vector:
        """A cohort's moments inside P: those of another P are projected again, or dropped."""
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

    @property
    def copied(self) -> int:
        """Vectors of d numbers that a client copies from the server: x."""
        return 1

    def push(self, log: Log, entry: Entry, rnd: Round) -> Log:
        """The log with this round's change, and as many before it as are worth sending: beyond d/r x is cheaper."""
        size = bytes_of(entry)
        keep = max(1, self.copied * rnd.layout.size * rnd.layout.dtype.itemsize // size)
        if size * len(log.entries) > LARGE_LOG:
            keep = min(keep, rnd.missed_by_any)
        return log.push(entry, keep)

    def expand_entry(self, entry: Vector, rnd: Round) -> Vector:
        """Pᵀ δ: the log holds what a round added to x in its own subspace."""
        return self.subspace(rnd).T @ entry

    def no_move(self, x: Vector, rnd: Round) -> Entry:
        """The log entry of a round that leaves x as it is."""
        return x.new_zeros(*x.shape[:-1], self.subspace(rnd).rank)

    def empty_round(self, server: LoggedState, rnd: Round) -> LoggedState:
        log = self.push(server.log, self.no_move(server.x, rnd), rnd)
        return cast(LoggedState, replace(cast(Any, server), log=log))
