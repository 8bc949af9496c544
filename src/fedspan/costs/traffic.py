"""Bytes of a run before it runs: the method's own messages, packed and counted, with no data and no gradients.

The method takes its real steps on tensors without values and an objective without slope, so the bytes are those of
real messages, for a model of any size. The first rounds are walked through. Later downloads depend on how long ago
each client took part last, which the seed tells; beyond that a round costs what the last ones cost on average.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import seeds, wire
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Direction, Objective, Problem
from fedspan.core.projector import LinearMap, Projector
from fedspan.core.round import Round
from fedspan.costs.dry_run import NOWHERE, Live, WithoutNumbers
from fedspan.engine.loop import Loop, cohort_of
from fedspan.projectors._dense import Dense
from fedspan.projectors.identity import Identity
from fedspan.replies.chain import Chain, Replies
from fedspan.replies.running_mean import RunningMean

WITH_VALUES = 300_000  # parameters up to which a walk with values is faster than without
WALKED = 40  # rounds that are walked through, at least
DRAWN = 2000  # rounds whose cohorts are drawn to know their downloads
STEADY = 8  # rounds after which a run with all clients is taken to repeat its last two

Method = Method


class FlatProblem(Problem):
    """A model of the right size over clients that have nothing to learn; the vectors of a large one have no values."""

    seeds = (0,)

    def __init__(self, layout: Layout, clients: int, buffers: int = 0) -> None:
        device = None if layout.size <= WITH_VALUES else NOWHERE
        self.layout, self.clients, self.weights = layout, clients, None
        self.x0 = torch.zeros(1, 1, layout.size, dtype=layout.dtype, device=device)
        self.buffers0 = (
            torch.zeros(1, 1, buffers, dtype=layout.dtype, device=device) if buffers else None
        )

    def cohort(self, rnd: Round) -> Objective:
        return _Level(rnd.ids.shape)

    def evaluate(
        self, x: Vector, buffers: Vector | None = None
    ) -> Mapping[str, npt.NDArray[np.float64]]:
        return {}

    def diverged(self, metrics: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
        return np.array([False])


class _Level(Objective):
    """f = 0 of a whole cohort."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def grad(self, y: Vector) -> Vector:
        return y.new_zeros(*self.shape, y.shape[-1])

    def full_grad(self, x: Vector) -> Vector:
        return self.grad(x)

    def restrict(self, x: Vector, P: LinearMap, plus: Vector | None = None) -> Direction:
        return self.grad


class AlikeClients:
    """A transport whose clients are all alike and always new: states have the right shape, which is all that counts."""

    def __init__(self, method: Method, problem: Problem) -> None:
        self.method, self.problem = method, problem
        self.state = method.init_client(problem.x0, problem.layout)

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Take the cohort's step as one computation."""
        cohort = rnd.ids.shape[1]
        own = {name: part.expand(-1, cohort, -1) for name, part in wire.pack(self.state).items()}
        states = wire.unpack(own)
        rnd = dataclasses.replace(rnd, overwrite=False)  # their states are one
        _, up = self.method.client_step(states, down, self.problem.cohort(rnd), rnd)
        return Replies(
            np.arange(cohort), up, None if buffers is None else buffers.expand(-1, cohort, -1)
        )

    def save(self) -> wire.Arrays:
        return {}

    def saved(self) -> None:
        pass

    def load(self, arrays: wire.Arrays) -> None:
        pass


class _Undrawn(Projector):
    """Mixed into a projector: P has the right shape, because drawing one for a large model takes too long."""

    def sample(self, layout: Layout, keys: seeds.Keys) -> LinearMap:
        factors: list[Dense | None] = []
        for block in layout.blocks:
            if block.axis is None:
                factors.append(None)
                continue
            shape = (len(keys), self.rank_of(block), block.inputs)
            P = torch.empty(*shape, dtype=layout.dtype, device=NOWHERE)
            factors.append(Dense(P, P))
        probe = torch.empty(len(keys), 1, 1, dtype=torch.float64, device=NOWHERE)
        return LinearMap(layout, tuple(factors), probe)


@dataclass(frozen=True)
class Course:
    """What has been sent after any number of rounds."""

    walked: tuple[tuple[int, int], ...]  # (up, down) after 0, 1, 2, … rounds
    rates: tuple[float, float]  # of each later round

    def after(self, rounds: int) -> tuple[float, float]:
        """(up, down) of a run of that many rounds."""
        last = len(self.walked) - 1
        up, down = self.walked[min(rounds, last)]
        late = max(0, rounds - last)
        return up + late * self.rates[0], down + late * self.rates[1]


@dataclass(frozen=True)
class Cost:
    """Bytes of a method on a model."""

    up_round: float  # of one client and round, once every client has the model
    down_round: float
    up: float  # of the run, all clients
    down: float
    client_state: int  # that one client keeps between rounds, besides its copy of the model
    client_disk: int  # of one client: two versions of its state and of its copy of the model, where it keeps one
    server_memory: int  # of model, controls and log
    server_peak: int  # of the server's process across machines, besides what Python and torch take
    server_disk: int  # of the copies of all clients' states
    course: Course


def cost(
    method: Method,
    problem: Problem,
    clients_per_round: int,
    rounds: int,
    seed: int,
    *,
    known_start: bool = False,
) -> Cost:
    """Bytes of a run of a method on a problem's model and clients."""
    method.check(problem.layout)
    buffers = 0 if problem.buffers0 is None else problem.buffers0.shape[-1]
    layout = dataclasses.replace(problem.layout)  # its own: no cache gives these P to anybody else
    flat = FlatProblem(layout, problem.clients, buffers)
    changes: dict[str, Any] = {"lr": 1.0, "local_steps": 1}  # messages do not depend on them
    projector = getattr(method, "space", None)
    if flat.x0.is_meta and projector is not None and not isinstance(projector, Identity):
        kind = type(projector)
        changes["space"] = type(kind.__name__, (_Undrawn, kind), {})(**vars(projector))
    method = dataclasses.replace(method, **changes)  # type: ignore[type-var]
    most = DRAWN if known_start else max(WALKED, 2 * problem.clients // clients_per_round)
    everyone = clients_per_round == problem.clients
    totals, server = [(0, 0)], [0]
    downloads: dict[int, set[int]] = {}  # rounds since a client's last, or 0 for its first → bytes
    dry = WithoutNumbers() if flat.x0.is_meta else contextlib.nullcontext()
    with dry, torch.inference_mode():
        clients = AlikeClients(method, flat)
        loop = Loop(
            method,
            flat,
            clients,
            (seed,),
            clients_per_round,
            rounds=rounds,
            known_start=known_start,
        )
        while loop.t < min(rounds, most) and not (everyone and _steady(totals)):
            before, last_round = loop.ledger.down.copy(), loop.last_round[0].copy()
            loop.step()
            totals.append((int(loop.ledger.up.sum()), int(loop.ledger.down.sum())))
            server.append(_bytes(loop.server))
            sent = (loop.ledger.down - before)[0]
            for client in np.flatnonzero(sent):
                lag = 0 if last_round[client] < 0 else int(loop.t - 1 - last_round[client])
                downloads.setdefault(lag, set()).add(int(sent[client]))
        step = _server_step(loop)
        keeps_copy = method.broadcast(loop.server, loop._round()).get("sync") is not None
    if not known_start:
        totals += _later(loop, totals, downloads, min(rounds, DRAWN))
    late = max(1, (len(totals) - 1) // 4 * 2)  # if rounds are of two kinds, as many of either
    up, down = ((totals[-1][i] - totals[-1 - late][i]) / late for i in (0, 1))
    course = Course(tuple(totals), (up, down))
    # The log of some methods grows and shrinks, and that of others still grows, to a model's size.
    recent = server[-STEADY:]
    growth = [later - before for before, later in zip(recent, recent[2:], strict=False)]
    log = min(max(0, min(growth, default=0) // 2) * (rounds - loop.t), flat.x0.nbytes)
    held = (server[-1] if loop.t == rounds else max(recent)) + log
    state = _bytes(clients.state)
    copy = flat.x0.nbytes if keeps_copy else 0
    sending = max(flat.x0.nbytes, int(up))  # x in full, as Flower holds it, then a round's replies
    return Cost(
        up_round=up / clients_per_round,
        down_round=down / clients_per_round,
        up=course.after(rounds)[0],
        down=course.after(rounds)[1],
        client_state=state,
        client_disk=2 * (state + copy),
        server_memory=held,
        server_peak=held + max(sending, step),
        server_disk=problem.clients * state,
        course=course,
    )


def _server_step(loop: Loop) -> int:
    """Bytes at the peak of the server's step beyond its state: replies, or their mean, and the new x."""
    rnd = loop._round()
    up = loop.transport.exchange(rnd, loop.method.broadcast(loop.server, rnd), None, loop.chain).up
    up = wire.pick(up, 0) if isinstance(loop.chain.gathering(rnd), RunningMean) else up
    replies = wire.pack(up).values()
    with Live(loop.problem.x0.device) as live:
        live.count([*wire.pack(loop.server).values(), *replies])
        start = live.now
        loop.method.server_step(loop.server, up, rnd)
    return int(live.peak - start + sum(part.nbytes for part in replies))


def _later(
    loop: Loop, totals: list[tuple[int, int]], downloads: dict[int, set[int]], rounds: int
) -> list[tuple[int, int]]:
    """(up, down) after each later round up to `rounds`; none where they cannot be known without walking."""
    ups = {b[0] - a[0] for a, b in itertools.pairwise(totals)}
    table = _by_lag(downloads, rounds) if len(ups) == 1 and loop.t < rounds else None
    if table is None:
        return []
    (up_round,), (up, down), found = ups, totals[-1], []
    last_round = loop.last_round[0].copy()
    for t in range(loop.t, rounds):
        ids = cohort_of(loop.seeds, len(last_round), loop.clients_per_round, t)[0]
        lags = np.where(last_round[ids] < 0, 0, t - last_round[ids])
        up, down = up + up_round, down + int(table[lags].sum())
        last_round[ids] = t
        found.append((up, down))
    return found


def _by_lag(downloads: dict[int, set[int]], most: int) -> npt.NDArray[np.int64] | None:
    """Bytes for 0, 1, … rounds: a line up to what a first download costs; None where they are not like that."""
    if any(len(sizes) > 1 for sizes in downloads.values()) or 0 not in downloads:
        return None
    known = {lag: next(iter(sizes)) for lag, sizes in downloads.items()}
    first = known.pop(0)
    rising = sorted((lag, size) for lag, size in known.items() if size < first)
    if not known or (len(rising) == 1 and len(known) == 1):
        return None
    table = np.full(most + 1, first)
    if len(rising) > 1:
        (lag, size), (later, larger) = rising[0], rising[-1]
        slope = (larger - size) // (later - lag)
        table[1:] = np.minimum(size + slope * (np.arange(1, most + 1) - lag), first)
    table[[lag for lag, _ in rising]] = [size for _, size in rising]
    return table if all(table[lag] == size for lag, size in known.items()) else None


def _steady(totals: list[tuple[int, int]]) -> bool:
    """Whether each of the last rounds cost what the round two before it cost."""
    spent = np.diff(totals[-STEADY - 1 :], axis=0)
    return len(spent) == STEADY and np.array_equal(spent[2:], spent[:-2])


def _bytes(state: Any) -> int:
    return sum(array.nbytes for array in wire.pack(state).values())
