"""All clients on one machine: the clients of a round one after the other, as one batched computation, or on processes.

Which is fastest depends on the network and the machine. Where a run is long enough, `auto` times the first round in
every way (`engine.ways`). The loop and the processes do the same arithmetic; batched products may differ in the last
digits.

Client states are rows, one table per field (`engine.states`). A round reads and writes the rows of its clients only, so
its cost grows with S and not with N. No client's copy of x is stored: it equals the server's x of an earlier round.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.config import Engine, Participation
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.method import Method, Replayable, Round
from fedspan.core.objective import Problem
from fedspan.engine.compact_states import CompactStates
from fedspan.engine.loop import local_work
from fedspan.engine.pool import Pool
from fedspan.engine.running_mean import RunningMean, averages, large
from fedspan.engine.screening import Outlier, Screen, in_words, norms
from fedspan.engine.states import STORED, InMemory, OnDisk, States, load_states, save_states
from fedspan.engine.transport import Replies
from fedspan.engine.ways import LONG_RUN, ROUNDS_PER_WAY, SHARE, WAYS, Way, fastest, threads, timed
from fedspan.engine.worker import without_zeros

LARGE = 1 << 25  # numbers of the models of all clients of a round above which only one of them is in memory


class Simulator:
    """A transport to clients in this process."""

    def __init__(
        self,
        method: Method[Any, Any, Any, Any],
        problem: Problem,
        engine: Engine | None = None,
        *,
        participation: Participation | None = None,
        resume: bool = False,
        rounds: int | None = None,  # how long the run will be, where that is known
    ) -> None:
        engine = engine or Engine(simulate="loop")
        simulate = engine.simulate
        folder = None if engine.states_dir is None else Path(engine.states_dir)
        if simulate == "batched" and problem.cohort_mode == "per_client" and not problem.can_batch():
            raise SpecError(
                "simulate 'batched' needs batches of equal size, tensors as data and a network without running "
                "statistics; use 'auto', 'loop' or 'pool'"
            )
        self.method, self.problem, self.rounds, self.workers = method, problem, rounds, engine.workers
        self.way = Way("batched" if problem.cohort_mode == "batched" else simulate)
        self.times: dict[Way, float] = {}  # seconds of a round, for each way that was tried
        self._pool: Pool | None = None
        participation = participation or Participation(screen=None)
        self.screen, self.aggregator = Screen(participation.screen, problem.x0.shape[0]), participation.aggregator
        one = without_zeros(method.init_client(problem.x0[:1], problem.layout))
        self._kind = type(one)
        rows = problem.x0.shape[0] * problem.clients
        self._population: dict[str, States | CompactStates] = {}
        self._empty: dict[str, Vector] = {}  # fields without numbers
        for field in dataclasses.fields(one):
            first = getattr(one, field.name)[0]
            if not first.numel():
                self._empty[field.name] = first
            elif engine.compact_states:
                self._population[field.name] = self._compact(one, field.name, rows)
            elif folder is None:
                self._population[field.name] = InMemory(first, rows)
            else:
                path, dtype = folder / f"{field.name}.states", STORED[engine.states_dtype]
                self._population[field.name] = OnDisk(path, first, rows, dtype, resume=resume)

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """Hands the download to the clients of a round, all of which reply; replies out of all measure are left out."""
        if not self.way.threads:
            return self._exchange(rnd, down, buffers)
        with threads(self.way.threads):
            return self._exchange(rnd, down, buffers)

    def _exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        cohort, how = rnd.ids.shape[1], self.way.how
        if how == "batched" or cohort == 1:
            try:
                new, up, beside = local_work(self.method, self.problem, self._take(rnd), down, buffers, rnd)
            except RuntimeError as error:
                if cohort == 1 or "vmap: called random operation" not in str(error):
                    raise
                warnings.warn("simulate 'batched' cannot draw dropout per client; using 'loop'", stacklevel=3)
                self.way = Way("loop")
                return self._exchange(rnd, down, buffers)
        elif how == "pool":
            new, up, beside = self._by(self.way, rnd, down, buffers)
        else:
            began = time.perf_counter()
            found = self._in_turn(rnd, down, buffers) if large(rnd) else None
            if found is None:
                new, up, beside = _one_by_one(self.method, self.problem, self._take(rnd), down, buffers, rnd)
            if how == "auto":
                self._choose(rnd, down, buffers, time.perf_counter() - began)
            if found is not None:
                return found
        if self.screen.factor and (outliers := self.screen.outliers(up, beside)):
            return self._without(outliers, rnd, new, up, beside)
        self._put(rnd, new, up)
        return Replies(np.arange(cohort), up, beside)

    def _without(self, outliers: list[Outlier], rnd: Round, new: Any, up: Any, beside: Vector | None) -> Replies:
        """The replies that count; only the clients that sent them get their new states."""
        places = np.delete(np.arange(rnd.ids.shape[1]), [one.place for one in outliers])
        if not len(places):
            return Replies(places, None, events=in_words(rnd, self._undone(outliers, rnd)))
        new, up = (wire.gather([wire.pick(one, place) for place in places.tolist()]) for one in (new, up))
        self._put(rnd.subset(places), new, up)
        return Replies(places, up, None if beside is None else beside[:, places], events=in_words(rnd, outliers))

    def _in_turn(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """The replies of the clients one after the other, so that one client's state is in memory.

        A reply is compared with what was usual in earlier rounds: those of this round are not all there.
        """
        mean = RunningMean(rnd) if self.aggregator is None and averages(self.method, rnd) else None
        ups, beside, places, sizes, out = [], [], list[int](), [], list[Outlier]()
        for place in range(rnd.ids.shape[1]):
            one = rnd.subset(np.array([place]))
            new, up, own = local_work(self.method, self.problem, self._take(one), down, buffers, one)
            if self.screen.factor is not None:
                sizes.append(norms(vars(up).values()))
                if far := self.screen.judge(sizes[-1], count=False):
                    out += [outlier._replace(place=place) for outlier in self._undone(far, one)]
                    continue
            self._put(one, new, up)
            del new
            beside.append(own)
            places.append(place)
            if mean is None:
                ups.append(up)
            else:
                mean.add(place, up)
            del up  # not to be held during the work of the next client
        if sizes:
            self.screen.judge([[size for (size,) in of_run] for of_run in zip(*sizes, strict=True)])  # what is usual
        if not places:
            return Replies(np.array(places, np.int64), None, events=in_words(rnd, out))
        up = wire.gather(ups) if mean is None else mean.reply()
        return Replies(np.array(places), up, _beside(beside), events=in_words(rnd, out))

    def _undone(self, outliers: list[Outlier], rnd: Round) -> list[Outlier]:
        """Gives a client its first state where the step of a large model has overwritten the one before."""
        lost = [states for states in self._population.values() if rnd.overwrite and isinstance(states, InMemory)]
        for states in lost:
            states.put(rnd.rows, states.first.expand(len(rnd.rows), -1))
        return [one._replace(why=f"{one.why}; its state starts again") if lost else one for one in outliers]

    def _by(self, way: Way, rnd: Round, down: Any, buffers: Vector | None) -> tuple[Any, Any, Vector | None]:
        """The work of a round without storing it: (new states, replies, buffers)."""
        rnd = dataclasses.replace(rnd, overwrite=False)
        with threads(way.threads):
            if way.how == "batched":
                return local_work(self.method, self.problem, self._take(rnd), down, buffers, rnd)
            one_by_one = functools.partial(_one_by_one, self.method, self.problem)
            if way.how == "loop":
                return one_by_one(self._take(rnd), down, buffers, rnd)
        if self._pool is None:
            self._pool = Pool(one_by_one, max(2, self._processes(rnd)))
        shares = [
            rnd.subset(part) for part in np.array_split(np.arange(rnd.ids.shape[1]), len(self._pool)) if len(part)
        ]
        return _joined(self._pool.map([(self._take(share), down, buffers, share) for share in shares]))

    def _choose(self, rnd: Round, down: Any, buffers: Vector | None, took: float) -> None:
        """Chooses the fastest way by timing a round that is already done."""
        self.way, tried = Way("loop"), self._ways(rnd)
        long = self.rounds is not None and self.rounds >= ROUNDS_PER_WAY * len(tried)
        if (
            rnd.ids.size * rnd.layout.size > LARGE
            or not long
            or len(tried) == 1
            or self.rounds is None
            or took * self.rounds < LONG_RUN
        ):
            return
        runs = {way: functools.partial(self._by, way, rnd, down, buffers) for way in tried}
        self.times = timed(runs, SHARE * took * self.rounds)
        self.way = fastest(self.times)
        if self.way.how != "pool":
            self.close()

    def _ways(self, rnd: Round) -> list[Way]:
        """All ways of this problem on this machine. Small networks are slower on several threads than on one."""
        found = [Way("loop"), *([Way("batched")] if self.problem.can_batch() else [])]
        if torch.get_num_threads() > 1:
            found += [Way(way.how, 1) for way in found]
        return found + ([Way("pool")] if self._processes(rnd) > 1 else [])

    def _processes(self, rnd: Round) -> int:
        """As many as the threads this process may use; 1 where processes cannot be forked or the model is elsewhere."""
        here = getattr(self.problem, "device", torch.device("cpu")).type == "cpu"
        return min(self.workers or torch.get_num_threads(), rnd.ids.shape[1]) if hasattr(os, "fork") and here else 1

    def _take(self, rnd: Round) -> Any:
        taken = {name: states.take(rnd.rows) for name, states in self._population.items()}
        return self._state(taken, *rnd.ids.shape)

    def _state(self, rows: dict[str, Vector], runs: int, clients: int) -> Any:
        """Rows of the tables as the states of clients."""
        full = {name: part.view(runs, clients, -1) for name, part in rows.items()}
        return self._kind(**full, **{name: first.expand(runs, clients, -1) for name, first in self._empty.items()})

    def _put(self, rnd: Round, new: Any, up: Any) -> None:
        for name, states in self._population.items():
            if isinstance(states, CompactStates):
                assert isinstance(self.method, Replayable)
                states.append(rnd.rows, rnd.t, self.method.state_change(up, rnd).flatten(0, 1))
            else:
                states.put(rnd.rows, getattr(new, name).flatten(0, 1))

    def _compact(self, one: Any, field: str, rows: int) -> CompactStates:
        name, method = type(self.method).__name__, self.method
        if not isinstance(method, Replayable):
            raise SpecError(f"{name}'s client states do not follow from its replies; leave `compact_states` out")
        if method.private:
            kept = ", ".join(method.private)
            raise SpecError(f"{name}'s clients keep {kept}, which no reply tells; leave `compact_states` out")
        problem, clients = self.problem, self.problem.clients

        def grow(state: Vector, entry: Vector, t: int, row: int) -> Vector:
            seed, client = problem.seeds[row // clients], np.array([[row % clients]])
            rnd = Round(t, (seed,), clients, problem.layout, client, np.array([[-1]]))
            grown = method.replay(dataclasses.replace(one, **{field: state}), entry, rnd)
            return cast(Vector, getattr(grown, field))

        return CompactStates(getattr(one, field)[0], rows, grow)

    def close(self) -> None:
        """End the worker processes, where there are any."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clients(self) -> Any:
        """The states of all clients, (runs, N, size)."""
        rows = {name: states.take_all() for name, states in self._population.items()}
        return self._state(rows, self.problem.x0.shape[0], self.problem.clients)

    def save(self) -> wire.Arrays:
        """What a checkpoint must hold of the clients."""
        way = {"simulate": torch.tensor([WAYS.index(self.way.how), self.way.threads]), "usual": self.screen.save()}
        return way | save_states(self._population)

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        for states in self._population.values():
            if isinstance(states, OnDisk):
                states.saved()

    def load(self, arrays: wire.Arrays) -> None:
        """Go back to what `save` gave."""
        how, number = arrays["simulate"].tolist()
        self.way = Way(WAYS[how], number)
        self.screen.load(arrays["usual"])
        load_states(self._population, arrays)


Answer = tuple[Any, Any, Vector | None]


def _one_by_one(
    method: Method[Any, Any, Any, Any], problem: Problem, state: Any, down: Any, buffers: Vector | None, rnd: Round
) -> Answer:
    """Several clients in turn."""
    parts = []
    for place in range(rnd.ids.shape[1]):
        own = type(state)(**{f.name: getattr(state, f.name)[:, place : place + 1] for f in dataclasses.fields(state)})
        parts.append(local_work(method, problem, own, down, buffers, rnd.subset(np.array([place]))))
    return _joined(parts)


def _joined(parts: list[Answer]) -> Answer:
    """Several answers as one."""
    states = None if parts[0][0] is None else wire.gather([part[0] for part in parts])
    return states, wire.gather([part[1] for part in parts]), _beside([part[2] for part in parts])


def _beside(buffers: list[Vector | None]) -> Vector | None:
    """The clients' buffers as one vector."""
    known = [one for one in buffers if one is not None]
    return torch.cat(known, 1) if known else None
