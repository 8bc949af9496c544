"""All clients on one machine: the clients of a round one after the other, as one batched computation, or on processes.

The loop and the processes do the same arithmetic; batched products may differ in the last digits. So `auto` chooses by
a rule that knows the network, the batches and the clients alone: the same spec gives the same numbers, whatever else
the machine does (`Simulator.how`). The clients' states are in `engine.population`.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle
from fedspan.core.config import Engine, Participation, Simulate
from fedspan.core.errors import SpecError
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.processes import NotSentError
from fedspan.core.reply import payload
from fedspan.core.round import Round
from fedspan.engine.pool import Pool
from fedspan.engine.population import Population
from fedspan.engine.running_mean import gathering, large
from fedspan.engine.screening import Outlier, Screen, impossible, in_words, norms
from fedspan.engine.transport import Replies
from fedspan.engine.worker import local_work

COPIES = 1 << 16  # values of a round's models from which new states replace copies
BATCHED = 1 << 23  # values of a round's models up to which batched formulas are faster

Answer = tuple[Any, Any, Vector | None]


class Simulator:
    """A transport to clients in this process."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        engine: Engine | None = None,
        *,
        participation: Participation | None = None,
        resume: bool = False,
    ) -> None:
        engine = engine or Engine(simulate="loop")
        together = problem.cohort_mode == "batched"
        if engine.simulate == "batched" and not together and not problem.can_batch():
            raise SpecError(
                "simulate 'batched' needs batches of equal size, tensors as data and a network without running "
                "statistics; use 'auto', 'loop' or 'pool'"
            )
        self.method, self.problem, self.workers = method, problem, engine.workers
        self.simulate: Simulate = "batched" if together else engine.simulate
        if self.simulate == "auto" and not problem.has_formulas():
            self.simulate = "loop"
        self._pool: Pool | None = None
        participation = participation or Participation(screen=None)
        self.screen, self.aggregator = (
            Screen(participation.screen, problem.x0.shape[0], method.statistics),
            participation.aggregator,
        )
        self.population = Population(method, problem, engine, resume=resume)

    def how(self, clients: int) -> Simulate:
        """How a round of so many clients is computed.

        `auto` is batched where the gradients of the network are known as formulas and the clients' models are not too
        large together; the loop elsewhere. `fedspan bench` tells whether another way is faster on a machine.
        """
        if self.simulate != "auto":
            return self.simulate
        return "batched" if clients * self.problem.layout.size <= BATCHED else "loop"

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """Hands the download to the clients of a round, all of which reply; replies out of all measure are left out."""
        cohort = rnd.ids.shape[1]
        how = self.how(cohort)
        if how == "batched" or cohort == 1:
            try:
                own, theirs = self.population.take(rnd), _overwriting(rnd)
                new, up, beside = local_work(self.method, self.problem, own, down, buffers, theirs)
            except RuntimeError as error:
                self._use_loop(error, cohort)
                return self.exchange(rnd, down, buffers)
        elif how == "pool":
            new, up, beside = self._work(rnd, down, buffers)
        elif large(rnd):
            return self._in_turn(rnd, down, buffers)
        else:
            new, up, beside = _one_by_one(
                self.method, self.problem, self.population.take(rnd), down, buffers, rnd
            )
        if outliers := self.screen.outliers(up, beside):
            return self._without(outliers, rnd, new, up, beside)
        self.population.put(rnd, new)
        return Replies(np.arange(cohort), up, beside)

    def _without(
        self, outliers: list[Outlier], rnd: Round, new: Any, up: Any, beside: Vector | None
    ) -> Replies:
        """The replies that count; only the clients that sent them get their new states."""
        places = np.delete(np.arange(rnd.ids.shape[1]), [one.place for one in outliers])
        if not len(places):
            return Replies(places, None, events=in_words(rnd, self._undone(outliers, rnd)))
        new, up = (
            wire.gather([wire.pick(one, place) for place in places.tolist()]) for one in (new, up)
        )
        self.population.put(rnd.subset(places), new)
        return Replies(
            places,
            up,
            None if beside is None else beside[:, places],
            events=in_words(rnd, outliers),
        )

    def _in_turn(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """The replies of the clients one after the other, so that one client's state is in memory.

        A reply is compared with what was usual in earlier rounds: those of this round are not all there.
        """
        replies = gathering(self.method, rnd, self.aggregator)
        beside, places, sizes, out = [], list[int](), [], list[Outlier]()
        for place in range(rnd.ids.shape[1]):
            one = rnd.subset(np.array([place]))
            new, up, own = local_work(
                self.method, self.problem, self.population.take(one), down, buffers, one
            )
            far = impossible(up, self.method.statistics)
            if self.screen.factor is not None:
                sizes.append(norms(payload(up).values()))
                far += self.screen.judge(sizes[-1], count=False)
            if far:
                out += [outlier._replace(place=place) for outlier in self._undone(far, one)]
                continue
            self.population.put(one, new)
            del new
            beside.append(own)
            places.append(place)
            replies.add(place, up)
            del up  # not to be held during the work of the next client
        if sizes:
            self.screen.judge(
                [[size for (size,) in of_run] for of_run in zip(*sizes, strict=True)]
            )  # what is usual
        if not places:
            return Replies(np.array(places, np.int64), None, events=in_words(rnd, out))
        return Replies(
            np.array(places), replies.reply(), _beside(beside), events=in_words(rnd, out)
        )

    def _undone(self, outliers: list[Outlier], rnd: Round) -> list[Outlier]:
        """Gives a client its first state where the step of a large model has overwritten the one before."""
        lost = self.population.restart(rnd)
        return [
            one._replace(why=f"{one.why}; its state starts again") if lost else one
            for one in outliers
        ]

    def _work(self, rnd: Round, down: Any, buffers: Vector | None) -> Answer:
        """The work of a round without storing it: (new states, replies, buffers)."""
        rnd, how = dataclasses.replace(rnd, overwrite=False), self.how(rnd.ids.shape[1])
        if how == "batched":
            try:
                return local_work(
                    self.method, self.problem, self.population.take(rnd), down, buffers, rnd
                )
            except RuntimeError as error:
                self._use_loop(error, rnd.ids.shape[1])
                return self._work(rnd, down, buffers)
        one_by_one = functools.partial(_one_by_one, self.method, self.problem)
        if how == "loop":
            return one_by_one(self.population.take(rnd), down, buffers, rnd)
        if self._pool is None:
            try:
                self._pool = Pool(one_by_one, max(2, self._processes(rnd)))
            except NotSentError as error:
                warnings.warn(
                    f"simulate 'pool' needs functions and classes that other processes can import ({error}): put them "
                    "into a module; using 'loop'",
                    stacklevel=4,
                )
                self.simulate = "loop"
                return self._work(rnd, down, buffers)
        shares = [
            rnd.subset(part)
            for part in np.array_split(np.arange(rnd.ids.shape[1]), len(self._pool))
            if len(part)
        ]
        return _joined(
            self._pool.map(
                [(self.population.take(share), down, buffers, share) for share in shares]
            )
        )

    def _use_loop(self, error: RuntimeError, cohort: int) -> None:
        """Gives up batching if the network draws dropout; raises any other error again."""
        if cohort == 1 or "vmap: called random operation" not in str(error):
            raise error
        warnings.warn(
            "simulate 'batched' cannot draw dropout per client; using 'loop'", stacklevel=4
        )
        self.simulate = "loop"

    def _processes(self, rnd: Round) -> int:
        """As many as the threads this process may use; 1 where the model is elsewhere."""
        here = getattr(self.problem, "device", torch.device("cpu")).type == "cpu"
        return min(self.workers or torch.get_num_threads(), rnd.ids.shape[1]) if here else 1

    def close(self) -> None:
        """End the worker processes and close the files of the clients' states, where there are any."""
        self.population.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clients(self) -> Any:
        """The states of all clients, (runs, N, size)."""
        return self.population.take_all()

    def save(self) -> wire.Arrays:
        """What a checkpoint must hold of the clients."""
        return {"usual": self.screen.save()} | self.population.save()

    def saved(self) -> None:
        """The checkpoint with what `save` gave is on disk."""
        self.population.saved()

    def load(self, arrays: wire.Arrays) -> None:
        """Go back to what `save` gave."""
        self.screen.load(arrays["usual"])
        self.population.load(arrays)


def _overwriting(rnd: Round) -> Round:
    """The round for clients whose states were copied to be read, as those of several clients are."""
    copies = rnd.ids.shape[1] > 1 and rnd.ids.size * rnd.layout.size >= COPIES
    return dataclasses.replace(rnd, overwrite=True) if copies else rnd


def _one_by_one(
    method: Method,
    problem: Problem,
    state: Any,
    down: Any,
    buffers: Vector | None,
    rnd: Round,
) -> Answer:
    """Several clients in turn."""
    parts = []
    for place in range(rnd.ids.shape[1]):
        own = Bundle(**{name: part[:, place : place + 1] for name, part in vars(state).items()})
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
