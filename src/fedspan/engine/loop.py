"""The only loop: rounds of a method on a problem through a transport, as a generator of rows.

ServerState → broadcast → Down → (transport) → client_step → Up → (transport) → server_step → ServerState
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import seeds as streams
from fedspan.core import wire
from fedspan.core.errors import CheckpointError, SpecError, positive
from fedspan.core.layout import Vector
from fedspan.core.method import LogsChanges, Method, Round, Schedule, flat_rows
from fedspan.core.objective import Problem


@dataclass(frozen=True, eq=False)
class Replies:
    """What came of a round's exchange: which places of the cohort replied, and what."""

    places: npt.NDArray[np.int64]
    up: Any  # the cohort's message of those places; anything where there are none
    buffers: Vector | None = None
    sent: npt.NDArray[np.int64] | None = None  # (runs, S): bytes sent, where they are not those of the download
    received: npt.NDArray[np.int64] | None = None  # (runs, places): the same of the replies
    events: tuple[str, ...] = ()  # what went wrong, in words


class Transport(Protocol):
    """The only thing in which runtimes differ."""

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """Deliver a round's download and what goes beside it to the cohort."""

    def save(self) -> wire.Arrays:
        """What this end must keep of the clients for a later `load`."""

    def load(self, arrays: wire.Arrays) -> None:
        """Put back what `save` gave."""


@dataclass(frozen=True)
class Row:
    """The runs after `round` rounds; each array has one number a run."""

    round: int
    up_bytes: npt.NDArray[np.int64]
    down_bytes: npt.NDArray[np.int64]
    seconds: float
    metrics: dict[str, npt.NDArray[np.float64]]
    diverged: npt.NDArray[np.bool_]
    events: tuple[str, ...] = ()  # since the row before


def over_epochs(
    method: Method[Any, Any, Any, Any], problem: Problem, epochs: float | None
) -> Method[Any, Any, Any, Any]:
    """The method with as many local steps as `epochs` passes over the mean client's examples take.

    Every client takes the same number, whatever its own amount: controls and averages are of K steps each.
    """
    if epochs is None:
        return method
    positive("epochs", epochs)
    steps = max(1, round(epochs * problem.steps_per_epoch))
    return dataclasses.replace(method, local_steps=steps)  # type: ignore[type-var]


AHEAD = 16  # rounds whose cohorts are drawn in one go


@functools.lru_cache(maxsize=4)
def _cohorts(seeds: tuple[int, ...], clients: int, size: int, part: int) -> Schedule:
    """Who takes part in AHEAD consecutive rounds; each round depends on its own key alone."""
    rounds = range(part * AHEAD, (part + 1) * AHEAD)
    keys = np.stack([streams.keys(seeds, "cohort", t) for t in rounds])
    ids = streams.choose(keys, clients, size)
    return Schedule(rounds.start, ids, flat_rows(ids, clients))


def cohort_of(seeds: tuple[int, ...], clients: int, size: int, t: int) -> npt.NDArray[np.int64]:
    """Who takes part in round t, (runs, S)."""
    ids: npt.NDArray[np.int64] = _cohorts(seeds, clients, size, t // AHEAD).ids[t % AHEAD]
    return ids


def _beside(buffers: Vector | None) -> int:
    return 0 if buffers is None else buffers.shape[-1] * buffers.element_size()


@dataclass
class Loop:
    """A run in progress. `rows()` may be left at any row and taken up again, here or from `save()` elsewhere."""

    method: Method[Any, Any, Any, Any]
    problem: Problem
    transport: Transport
    seeds: tuple[int, ...]
    clients_per_round: int
    t: int = 0
    seconds: float = 0.0
    events: tuple[str, ...] = ()  # since the last row
    after_round: Callable[[], None] | None = None  # called after each round
    observe: Callable[[Loop], Mapping[str, npt.NDArray[np.float64]]] | None = None  # more metrics for each row
    stop: bool = False  # set from outside: leave after the round in hand
    server: Any = field(init=False)
    last_round: npt.NDArray[np.int64] = field(init=False)  # (runs, N)
    ledger: wire.Ledger = field(init=False)
    buffers: Vector | None = field(init=False)  # (runs, 1, n): averaged beside x, such as running statistics

    def __post_init__(self) -> None:
        n = self.problem.clients
        if not 1 <= self.clients_per_round <= n:
            raise SpecError(
                f"`participation.clients_per_round` must be from 1 to the {n} clients, got {self.clients_per_round}"
            )
        self.method.check(self.problem.layout)
        self.server = self.method.init_server(self.problem.x0, self.problem.layout)
        self.last_round = np.full((len(self.seeds), n), -1, np.int64)
        self.ledger = wire.Ledger.empty(len(self.seeds), n)
        self.buffers = self.problem.buffers0

    def rows(self, rounds: int, eval_every: int) -> Iterator[Row]:
        """Go on to round `rounds`: a row at the start, every `eval_every` rounds, at the end, or when all diverged."""
        if self.t == 0:
            yield self._evaluate()
        while self.t < rounds:
            began = time.perf_counter()
            until = min(rounds, self.t + eval_every - self.t % eval_every)
            with torch.inference_mode():
                while self.t < until and not self.stop:
                    self.step()
                    if self.after_round is not None:
                        self.after_round()
            self.seconds += time.perf_counter() - began
            if self.stop and self.t < until:
                return
            row = self._evaluate()
            yield row
            if row.diverged.all() or self.stop:
                return

    def step(self) -> None:
        """One round."""
        rnd = self._round()
        down = self.method.broadcast(self.server, rnd)
        found = self.transport.exchange(rnd, down, self.buffers)
        sent = wire.sizes(down, rnd.ids.shape) + _beside(self.buffers) if found.sent is None else found.sent
        self.ledger.sent(rnd, sent)
        self.events += found.events
        if len(found.places) < rnd.ids.shape[1]:
            rnd = rnd.subset(found.places)
        if not len(found.places):
            if isinstance(self.method, LogsChanges):
                self.server = self.method.empty_round(self.server, rnd)
        else:
            self.server = self.method.server_step(self.server, found.up, rnd)
            received = found.received
            self.ledger.received(
                rnd, wire.sizes(found.up, rnd.ids.shape) + _beside(found.buffers) if received is None else received
            )
            self.buffers = None if found.buffers is None else rnd.mean(found.buffers)
            self.last_round.reshape(-1)[rnd.rows] = self.t
        self.t += 1

    def _round(self) -> Round:
        n = self.problem.clients
        schedule = _cohorts(self.seeds, n, self.clients_per_round, self.t // AHEAD)
        ids, rows = schedule.ids[self.t % AHEAD], schedule.rows[self.t % AHEAD]
        weights = None
        if self.problem.weights is not None:
            shares = torch.from_numpy(self.problem.weights[ids]).unsqueeze(-1)
            weights = shares.to(self.problem.layout.dtype)
        return Round(
            t=self.t,
            seeds=self.seeds,
            clients=n,
            layout=self.problem.layout,
            ids=ids,
            last_round=self.last_round.reshape(-1)[rows].reshape(ids.shape),
            weights=weights,
            everyone=self.last_round,
            local_steps=self.method.local_steps,
            schedule=schedule,
        )

    def _evaluate(self) -> Row:
        metrics = dict(self.problem.evaluate(self.method.model(self.server), self.buffers))
        if self.observe is not None:
            metrics |= self.observe(self)
        up, down = self.ledger.totals()
        events, self.events = self.events, ()
        return Row(self.t, up, down, self.seconds, metrics, self.problem.diverged(metrics), events)

    def save(self) -> wire.Arrays:
        """Everything a later `load` needs to go on to the same bits."""
        arrays = {f"server.{name}": array for name, array in wire.pack(self.server).items()}
        arrays |= {f"clients.{name}": array for name, array in self.transport.save().items()}
        counts = {"last_round": self.last_round, "up": self.ledger.up, "down": self.ledger.down}
        arrays |= {f"loop.{name}": torch.from_numpy(array) for name, array in counts.items()}
        beside = {} if self.buffers is None else {"loop.aside": self.buffers}
        clock = torch.tensor([self.t, self.seconds], dtype=torch.float64)
        return arrays | beside | {"loop.clock": clock}

    def load(self, arrays: wire.Arrays) -> None:
        """Take up a run where `save` left it."""
        parts: dict[str, wire.Arrays] = {"server": {}, "clients": {}, "loop": {}}
        for name, array in arrays.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = array
        if parts["loop"]["last_round"].shape != self.last_round.shape:
            there = tuple(parts["loop"]["last_round"].shape)
            raise CheckpointError(f"the checkpoint is of {there} (runs, clients), this run of {self.last_round.shape}")
        self.server = wire.unpack(type(self.server), parts["server"])
        self.transport.load(parts["clients"])
        self.last_round = parts["loop"]["last_round"].numpy()
        self.ledger = wire.Ledger(*(parts["loop"][name].numpy() for name in ("up", "down")))
        self.buffers = parts["loop"].get("aside")
        clock = parts["loop"]["clock"].tolist()
        self.t, self.seconds = int(clock[0]), clock[1]
