"""Bytes of a run before it runs: the method's own messages, packed and counted, with no data and no gradients.

The method takes its real steps on tensors without values and an objective without slope, so the bytes are those of
real messages, for a model of any size. The first rounds are walked through. Later downloads depend on how long ago
each client took part last, which the seed tells; beyond that a round costs what the last ones cost on average.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import seeds, wire
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import Method
from fedspan.core.objective import Flat, Objective, Problem
from fedspan.core.projector import LinearMap, Projector
from fedspan.core.round import Round
from fedspan.costs.dry_run import NOWHERE, Live
from fedspan.engine.clock import Clock
from fedspan.engine.loop import Loop, Transport, cohort_of
from fedspan.projectors._dense import Dense
from fedspan.projectors.identity import Identity
from fedspan.replies.chain import Chain, Replies

WALKED = 40  # rounds that are walked through, at least
DRAWN = 2000  # rounds whose cohorts are drawn to know their downloads
STEADY = 8  # rounds after which a run with all clients is taken to repeat its last two


class FlatProblem(Problem):
    """A model of the right size over clients that have nothing to learn; the vectors of a large one have no values."""

    seeds = (0,)
    with_values = 300_000  # parameters up to which a walk with values is faster than without

    def __init__(self, layout: Layout, clients: int, buffers: int = 0) -> None:
        device = None if layout.size <= self.with_values else NOWHERE
        self.layout, self.clients, self.weights = layout, clients, None
        self.x0 = torch.zeros(1, 1, layout.size, dtype=layout.dtype, device=device)
        self.buffers0 = self.x0.new_zeros(1, 1, buffers) if buffers else None

    @staticmethod
    def of(problem: Problem) -> "FlatProblem":
        """Return one like a problem, with a layout of its own, so that no cache gives its P to others."""
        buffers = 0 if problem.buffers0 is None else problem.buffers0.shape[-1]
        return FlatProblem(dataclasses.replace(problem.layout), problem.clients, buffers)

    def cohort(self, rnd: Round) -> Objective:
        return Flat(rnd.ids.shape[1])

    def evaluate(
        self, x: Vector, buffers: Vector | None = None
    ) -> Mapping[str, npt.NDArray[np.float64]]:
        return {}

    def diverged(self, metrics: Mapping[str, npt.NDArray[np.float64]]) -> npt.NDArray[np.bool_]:
        return np.array([False])


class AlikeClients(Transport):
    """A transport whose clients are all alike and always new: states have the right shape, which is all that counts."""

    def __init__(self, method: Method, problem: Problem) -> None:
        self.method, self.problem = method, problem
        self.state = method.init_client(problem.x0, problem.layout)

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Take the cohort's step as one computation."""
        cohort = rnd.ids.shape[1]
        own = {name: part.expand(-1, cohort, -1) for name, part in wire.pack(self.state).items()}
        f, rnd = self.problem.cohort(rnd), dataclasses.replace(rnd, overwrite=False)
        _, up = self.method.client_step(wire.unpack(own), down, f, rnd)
        beside = None if buffers is None else buffers.expand(-1, cohort, -1)
        return Replies(np.arange(cohort), up, beside)


def _undrawn(projector: Projector, layout: Layout, keys: seeds.Keys) -> LinearMap:
    """Sample a P that has the right shape and no values, because drawing one for a large model takes too long."""
    factors: list[Dense | None] = []
    for block in layout.blocks:
        factors.append(None)
        if block.axis is not None:
            shape = (len(keys), projector.rank_of(block), block.inputs)
            P = torch.empty(*shape, dtype=layout.dtype, device=NOWHERE)
            factors[-1] = Dense(P, P)
    probe = torch.empty(len(keys), 1, 1, dtype=torch.float64, device=NOWHERE)
    return LinearMap(layout, tuple(factors), probe)


@dataclass(frozen=True)
class Cost:
    """Bytes of a method on a model."""

    up_round: float  # of one client and round, once every client has the model
    down_round: float
    rounds: int
    walked: tuple[tuple[int, int], ...]  # (up, down) of all clients after 0, 1, 2, … rounds
    rates: tuple[float, float]  # of each later round
    client_state: int  # that one client keeps between rounds, besides its copy of the model
    client_disk: int  # of one client: two versions of its state and of its copy of the model, where it keeps one
    server_memory: int  # of model, controls and log
    server_peak: int  # of the server's process across machines, besides what Python and torch take
    server_disk: int  # of the copies of all clients' states
    hours_round: float | None = None  # of a round by the virtual clock; None: there is none
    hours: float | None = None  # of the run

    def after(self, rounds: int) -> tuple[float, float]:
        """Return (up, down) of all clients in a run of that many rounds."""
        last = len(self.walked) - 1
        up, down = self.walked[min(rounds, last)]
        late = max(0, rounds - last)
        return up + late * self.rates[0], down + late * self.rates[1]

    @property
    def up(self) -> float:
        """Bytes that all clients send in the run."""
        return self.after(self.rounds)[0]

    @property
    def down(self) -> float:
        """Bytes that all clients are sent in the run."""
        return self.after(self.rounds)[1]


def cost(
    method: Method,
    problem: Problem,
    clients_per_round: int,
    rounds: int,
    seed: int,
    *,
    known_start: bool = False,
    clock: Clock | None = None,
) -> Cost:
    """Return the bytes of a run of a method on a problem's model and clients, and its hours by a clock."""
    method.check(problem.layout)
    flat = FlatProblem.of(problem)
    changes: dict[str, Any] = {"lr": 1.0, "local_steps": 1}  # messages do not depend on them
    space = getattr(method, "space", None)
    if flat.x0.is_meta and space is not None and not isinstance(space, Identity):
        kind = type(space)
        changes["space"] = type(kind.__name__, (kind,), {"sample": _undrawn})(**vars(space))
    method = dataclasses.replace(method, **changes)  # type: ignore[type-var]
    most = DRAWN if known_start else max(WALKED, 2 * problem.clients // clients_per_round)
    everyone = clients_per_round == problem.clients
    totals, server = [(0, 0)], [0]
    downloads: dict[int, set[int]] = {}  # rounds since a client's last, or 0 for its first → bytes
    dry = Live(None) if flat.x0.is_meta else contextlib.nullcontext()
    with dry, torch.inference_mode():
        clients = AlikeClients(method, flat)
        own = (method, flat, clients, (seed,), clients_per_round)
        loop = Loop(*own, rounds=rounds, known_start=known_start, clock=clock)
        while loop.t < min(rounds, most) and not (everyone and _steady(totals)):
            before, last_round = loop.ledger.down.copy(), loop.last_round[0].copy()
            loop.step()
            totals.append((int(loop.ledger.up.sum()), int(loop.ledger.down.sum())))
            server.append(bytes_of(loop.server))
            sent = (loop.ledger.down - before)[0]
            for client in np.flatnonzero(sent):
                lag = 0 if last_round[client] < 0 else int(loop.t - 1 - last_round[client])
                downloads.setdefault(lag, set()).add(int(sent[client]))
        step = _server_step(loop)
        keeps_copy = method.broadcast(loop.server, loop._round()).get("sync") is not None
    if not known_start and (clock is None or clock.always):
        totals += _later(loop, totals, downloads, min(rounds, DRAWN))
    late = max(1, (len(totals) - 1) // 4 * 2)  # if rounds are of two kinds, as many of either
    up, down = ((totals[-1][i] - totals[-1 - late][i]) / late for i in (0, 1))
    timed: dict[str, float] = {}
    if clock is not None:  # the rounds after the walk have messages as they are on average
        for t in range(loop.t, min(rounds, DRAWN)):
            drawn = cohort_of((seed,), problem.clients, clients_per_round, t)[0]
            some, _ = clock.cohort(drawn, t)
            clock.advance(some, up / clients_per_round, down / clients_per_round)
        each = clock.hours / max(1, min(rounds, max(loop.t, DRAWN)))
        timed = {"hours_round": each, "hours": rounds * each}
    # The log of some methods grows and shrinks, and that of others still grows, to a model's size.
    recent = server[-STEADY:]
    growth = [later - before for before, later in zip(recent, recent[2:], strict=False)]
    log = min(max(0, min(growth, default=0) // 2) * (rounds - loop.t), flat.x0.nbytes)
    held = (server[-1] if loop.t == rounds else max(recent)) + log
    state = bytes_of(clients.state)
    sending = max(flat.x0.nbytes, int(up))  # x in full, as Flower holds it, then a round's replies
    return Cost(
        up_round=up / clients_per_round,
        down_round=down / clients_per_round,
        rounds=rounds,
        walked=tuple(totals),
        rates=(up, down),
        client_state=state,
        client_disk=2 * (state + (flat.x0.nbytes if keeps_copy else 0)),
        server_memory=held,
        server_peak=held + max(sending, step),
        server_disk=problem.clients * state,
        **timed,
    )


def _server_step(loop: Loop) -> int:
    """Return the bytes at the peak of the server's step beyond its state: replies, or their mean, and the new x."""
    rnd = loop._round()
    up = loop.transport.exchange(rnd, loop.method.broadcast(loop.server, rnd), None, loop.chain).up
    up = wire.pick(up, 0) if loop.chain.gathering(rnd).running else up
    with Live(loop.problem.x0.device) as live:
        live.count([*wire.pack(loop.server).values(), *wire.pack(up).values()])
        start = live.now
        loop.method.server_step(loop.server, up, rnd)
    return int(live.peak - start + bytes_of(up))


def _later(
    loop: Loop, totals: list[tuple[int, int]], downloads: dict[int, set[int]], rounds: int
) -> list[tuple[int, int]]:
    """Return (up, down) after each later round up to `rounds`; none where they cannot be known without walking.

    Replies must be alike, and downloads lie on a line over the rounds since a client's last, up to those of its first.
    """
    (up, down), spent = totals[-1], np.diff(totals, axis=0)
    alike = all(len(sizes) == 1 for sizes in downloads.values())
    known = {lag: min(sizes) for lag, sizes in sorted(downloads.items())}
    first = known.pop(0, None)
    if not alike or first is None or not known or loop.t >= rounds or len(set(spent[:, 0])) > 1:
        return []
    table = np.full(rounds + 1, first)
    rising = [(lag, size) for lag, size in known.items() if size < first]
    if len(rising) > 1:
        (lag, size), (later, larger) = rising[0], rising[-1]
        slope = (larger - size) // (later - lag)
        table[1:] = np.minimum(size + slope * (np.arange(1, rounds + 1) - lag), first)
    for lag, size in rising:
        table[lag] = size
    if len(rising) == len(known) == 1 or any(table[lag] != size for lag, size in known.items()):
        return []
    last_round, found = loop.last_round[0].copy(), []
    for t in range(loop.t, rounds):
        ids = cohort_of(loop.seeds, len(last_round), loop.clients_per_round, t)[0]
        lags = np.where(last_round[ids] < 0, 0, t - last_round[ids])
        up, down = up + int(spent[0, 0]), down + int(table[lags].sum())
        last_round[ids] = t
        found.append((up, down))
    return found


def _steady(totals: list[tuple[int, int]]) -> bool:
    """Return whether each of the last rounds cost what the round two before it cost."""
    spent = np.diff(totals[-STEADY - 1 :], axis=0)
    return len(spent) == STEADY and np.array_equal(spent[2:], spent[:-2])


def bytes_of(state: Any) -> int:
    """Return the bytes of a state or message."""
    return sum(array.nbytes for array in wire.pack(state).values())
