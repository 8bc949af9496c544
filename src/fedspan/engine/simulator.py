"""All clients on one machine: the clients of a round one after the other, as one batched computation, or on processes.

The loop and the processes do the same arithmetic; batched products may differ in the last digits. So `auto` chooses by
a rule that knows the network, the batches and the clients alone: the same spec gives the same numbers, whatever else
the machine does (`Simulator.how`). The work of a client is the same across machines: `answer` takes and gives packed
arrays.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspan.core import wire
from fedspan.core.bundle import Bundle, weighted
from fedspan.core.config import Engine, Simulate
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.privacy import Privacy
from fedspan.core.processes import NotSentError
from fedspan.core.round import Round
from fedspan.core.sync import opened as rebuilt
from fedspan.engine.pool import Pool
from fedspan.engine.states import ClientStates
from fedspan.replies.chain import Chain, Event, Outliers, Replies
from fedspan.replies.clip import after, leaked, private_work
from fedspan.replies.fixed_point import FixedPoint, clipped_values, fixed_point_mean

BATCHED = 1 << 23  # numbers of a round's models up to which batched formulas are faster

Answer = tuple[Any, Any, Vector | None]


@dataclass(frozen=True, eq=False)
class Replica:
    """All that one client keeps between rounds: the method's state and its dated copy of x."""

    state: Any
    x: Vector | None = None
    last_round: int = -1


def without_zeros(state: Any) -> Any:
    """A state whose vectors of zeros take no memory."""
    zeros = {
        name: part.new_zeros(()).expand(part.shape)
        for name, part in vars(state).items()
        if not part.numel() or all(bool(end == 0) for end in torch.aminmax(part))
    }
    return state.replace(**zeros)


BUFFERS = "buffers"  # the name under which they are packed, next to a message's own arrays


def answer(
    method: Method, problem: Problem, replica: Replica, down: wire.Arrays, rnd: Round
) -> tuple[Replica, wire.Arrays]:
    """One client's round from packed arrays to packed arrays; `rnd` is the round of this client alone."""
    message = opened(method, replica, down, rnd)
    x = None if (sync := message.get("sync")) is None else sync.model
    rnd = replace(rnd, last_round=np.array([[replica.last_round]]))
    with torch.inference_mode():
        given = replica.state, message, down.get(BUFFERS), rnd
        state, up, buffers = local_work(method, problem, *given)
    beside = {} if buffers is None else {BUFFERS: buffers}
    return Replica(state, x, rnd.t), wire.pack(up) | beside


def local_work(
    method: Method, problem: Problem, state: Any, down: Any, buffers: Vector | None, rnd: Round
) -> Answer:
    """What the clients of a round do, however many: (new states, replies, buffers). The same for every transport."""
    f = problem.cohort(rnd)
    if rnd.privacy is not None:
        return private_work(method, f, state, down, buffers, rnd)
    if buffers is None:
        return *method.client_step(state, down, f, rnd), None
    f.begin(buffers)
    state, up = method.client_step(state, down, f, rnd)
    return state, up, f.buffers()


def opened(method: Method, replica: Replica, down: wire.Arrays, rnd: Round) -> Bundle:
    """A download from its arrays, with x rebuilt from the client's copy if the server sent changes of it."""
    message = wire.unpack({name: array for name, array in down.items() if name != BUFFERS})
    if (sync := message.get("sync")) is not None:
        missed, since = len(sync.log.entries), max(replica.last_round, 0)
        lacks = method.logs_changes and sync.x is None and missed < rnd.t - since
        if lacks or missed > rnd.t - since:
            raise ProtocolError(
                f"the server sent {missed:,} changes of the model, but this client's copy is of round {since} and this "
                f"is round {rnd.t}"
            )

    def apply(copy: Vector, entry: Any, t: int) -> Vector:
        if not method.logs_changes:
            raise ProtocolError(
                f"the server sent changes of the model, and {type(method).__name__} keeps no log of them"
            )
        # a copy made here for the change before may be overwritten
        one = replace(rnd, t=t, overwrite=copy is not replica.x)
        return method.apply_entry(copy, entry, one)

    return rebuilt(message, replica.x, replica.last_round, apply)


class Simulator(contextlib.AbstractContextManager["Simulator"]):
    """A transport to clients in this process."""

    copies = 1 << 16  # numbers of a round's models from which new states take the place of copies

    def __init__(
        self,
        method: Method,
        problem: Problem,
        engine: Engine | None = None,
        *,
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
        first = without_zeros(method.init_client(problem.x0[:1], problem.layout))
        self.shape = problem.x0.shape[0], problem.clients  # (runs, N)
        folder = None if engine.states_dir is None else Path(engine.states_dir)
        self.states = ClientStates(first, math.prod(self.shape), folder, resume=resume)
        self.save, self.saved, self.load = self.states.save, self.states.saved, self.states.load

    def how(self, clients: int) -> Simulate:
        """How a round of so many clients is computed.

        `auto` is batched where the gradients of the network are known as formulas and the clients' models are not too
        large together; the loop elsewhere.
        """
        if clients == 1:
            return "batched"
        if self.simulate != "auto":
            return self.simulate
        return "batched" if clients * self.problem.layout.size <= BATCHED else "loop"

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Hands the download to the clients of a round, all of which reply; the chain decides what counts."""
        cohort = rnd.ids.shape[1]
        how = self.how(cohort)
        if chain.secure is not None:
            return self._secure(rnd, down, buffers, chain.secure)
        if how == "loop" and chain.large(rnd):
            return self._in_turn(rnd, down, buffers, chain)
        # states of several clients are copied to be read, so that they may be overwritten
        copies = cohort > 1 and rnd.ids.size * rnd.layout.size >= self.copies
        overwrite = how == "batched" and (copies or rnd.overwrite)
        own = rnd if rnd.overwrite == overwrite else replace(rnd, overwrite=overwrite)
        new, up, beside = self._work(own, down, buffers, how)
        outliers, places = chain.screened(up, beside, rnd), np.arange(cohort)
        if not outliers:
            self.states.put(rnd.rows, new)
            return Replies(places, up, beside)
        places = np.delete(places, [place for place, _ in outliers])
        if not len(places):
            return Replies(places, None, events=self._undone(outliers, rnd))
        # only clients whose replies count get their new states
        new, up = (
            wire.gather([wire.pick(one, place) for place in places.tolist()]) for one in (new, up)
        )
        self.states.put(rnd.subset(places).rows, new)
        beside = None if beside is None else beside[:, places]
        return Replies(places, up, beside, events=tuple(event for _, event in outliers))

    def _in_turn(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """The replies of the clients one after the other, so that one client's state is in memory."""
        replies = chain.gathering(rnd)
        beside, places, out = list[Vector | None](), list[int](), tuple[Event, ...]()
        for place in range(rnd.ids.shape[1]):
            one = rnd.subset(np.array([place]))
            state = self.states.take(one.rows, one.ids.shape)
            sent = wire.of_clients(down, np.array([place]))
            new, up, own = local_work(self.method, self.problem, state, sent, buffers, one)
            if outliers := chain.screened(up, own, one, one_of_many=True):
                out += self._undone(outliers, one)
                continue
            self.states.put(one.rows, new)
            beside.append(own)
            places.append(place)
            replies.add(place, up)
            del state, new, up  # not to be held during the work of the next client
        chain.all_came(rnd)
        up = replies.reply() if places else None
        return Replies(np.array(places, np.int64), up, _beside(beside), events=out)

    def _undone(self, outliers: Outliers, rnd: Round) -> tuple[Event, ...]:
        """Gives a client its first state where the step of a large model has overwritten the one before."""
        lost = rnd.overwrite and self.states.restart(rnd.rows)
        again = "; its state starts again" if lost else ""
        return tuple(event._replace(text=event.text + again) for _, event in outliers)

    def _secure(self, rnd: Round, down: Any, buffers: Vector | None, privacy: Privacy) -> Replies:
        """A round of secure sums. The masks would cancel, so the rounded replies are added up as they are.

        The clients' states follow from the rounded replies. The bytes are those of the protocol (`replies.secure`).
        """
        from fedspan.replies.secure.server import bytes_of_round, check_enough

        runs, cohort = rnd.ids.shape
        base = wire.sizes(down, buffers) + np.zeros(rnd.ids.shape, np.int64)
        try:
            check_enough("keys", cohort, cohort, privacy.survivors(cohort))
        except ProtocolError as error:
            sent, _ = bytes_of_round(0, 0, privacy)
            event = Event("other", None, f"{error}; nothing counted")
            none = np.array([], np.int64)
            return Replies(none, None, buffers, sent + base, events=(event,) * runs)
        rnd = replace(rnd, overwrite=False)
        before = self.states.take(rnd.rows, rnd.ids.shape)
        new, up, beside = self._work(rnd, down, buffers, self.how(cohort))
        examples = np.ones(rnd.ids.shape, np.int64)
        if rnd.weights is not None:
            examples = np.vectorize(self.problem.examples, otypes=[np.int64])(rnd.ids)
        change = None if beside is None or buffers is None else beside - buffers
        fixed = FixedPoint.of(privacy, self.method.statistics)
        counted, mean, changed, clipped, length = fixed_point_mean(fixed, up, change, examples)
        states = after(self.method, leaked(self.method, before, rnd), new, down, counted, rnd)
        self.states.put(rnd.rows, states)
        sent, received = bytes_of_round(cohort, length, privacy)
        told = Event("other", None, clipped_values(clipped, privacy))
        return Replies(
            np.arange(cohort),
            weighted(mean, rnd),
            None if buffers is None or changed is None else buffers + changed,
            sent + base,
            np.full(rnd.ids.shape, received),
            (told,) if clipped else (),
        )

    def _work(self, rnd: Round, down: Any, buffers: Vector | None, how: Simulate) -> Answer:
        """The work of a round without storing it: (new states, replies, buffers)."""
        cohort = rnd.ids.shape[1]
        if how == "batched":
            state = self.states.take(rnd.rows, rnd.ids.shape)
            try:
                return local_work(self.method, self.problem, state, down, buffers, rnd)
            except RuntimeError as error:
                if cohort == 1 or "vmap: called random operation" not in str(error):
                    raise
            warnings.warn(
                "simulate 'batched' cannot draw dropout per client; using 'loop'", stacklevel=4
            )
            self.simulate, how, rnd = "loop", "loop", replace(rnd, overwrite=False)
        one_by_one = functools.partial(_one_by_one, self.method, self.problem)
        if how == "pool" and self._pool is None:
            here = getattr(self.problem, "device", torch.device("cpu")).type == "cpu"
            processes = min(self.workers or torch.get_num_threads(), cohort) if here else 1
            try:
                self._pool = Pool(one_by_one, max(2, processes))
            except NotSentError as error:
                warnings.warn(
                    f"simulate 'pool' needs functions and classes that other processes can import ({error}): put them "
                    "into a module; using 'loop'",
                    stacklevel=4,
                )
                self.simulate = how = "loop"
        if how == "loop" or self._pool is None:
            return one_by_one(self.states.take(rnd.rows, rnd.ids.shape), down, buffers, rnd)
        tasks = []
        for part in np.array_split(np.arange(cohort), min(cohort, len(self._pool))):
            share = rnd.subset(part)
            state = self.states.take(share.rows, share.ids.shape)
            tasks.append((state, wire.of_clients(down, part), buffers, share))
        return _joined(self._pool.map(tasks))

    def close(self) -> None:
        """Ends the worker processes and closes the files of the clients' states, if any."""
        self.states.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def clients(self) -> Any:
        """The states of all clients, (runs, N, size)."""
        return self.states.take(None, self.shape)


def _one_by_one(
    method: Method, problem: Problem, state: Any, down: Any, buffers: Vector | None, rnd: Round
) -> Answer:
    """Several clients in turn."""
    parts = []
    for place in range(rnd.ids.shape[1]):
        one = rnd.subset(np.array([place]))
        own, sent = wire.pick(state, place), wire.of_clients(down, np.array([place]))
        parts.append(local_work(method, problem, own, sent, buffers, one))
    return _joined(parts)


def _joined(parts: list[Answer]) -> Answer:
    """Several answers as one."""
    states, ups, buffers = zip(*parts, strict=True)
    return wire.gather([*states]), wire.gather([*ups]), _beside(buffers)


def _beside(buffers: Sequence[Vector | None]) -> Vector | None:
    """The clients' buffers as one vector."""
    known = [one for one in buffers if one is not None]
    return torch.cat(known, 1) if known else None
