"""The simulator with secure aggregation: the clients of a round run the whole protocol in this process.

The server's step is given the mean of the replies, one row, and no client's state moves before the sum is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import wire
from fedspan.core.config import Engine
from fedspan.core.layout import Vector
from fedspan.core.method import Method
from fedspan.core.objective import Problem
from fedspan.core.privacy import Privacy
from fedspan.core.reply import weighted
from fedspan.core.round import Round
from fedspan.core.sync import subset
from fedspan.engine.simulator import Simulator
from fedspan.engine.transport import Replies
from fedspan.engine.worker import BUFFERS
from fedspan.privacy.clipping import after, leaked
from fedspan.privacy.secure_client import PHASES, factors
from fedspan.privacy.secure_local import LocalClients
from fedspan.privacy.secure_masks import Numbers
from fedspan.privacy.secure_numbers import FixedPoint, Payload, clipped_values
from fedspan.privacy.secure_sum import SecureSum, TooFewError

Places = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    """What the clients of a round have computed."""

    states: Any  # that follow from `up`
    up: Any  # the replies as they count
    payload: Payload
    factors: npt.NDArray[np.float64]  # (runs, S): weights, 1 on average
    vectors: dict[tuple[int, int], Numbers]  # (run, place) → what is masked


class SecureSimulator(Simulator):
    """A transport to clients in this process whose replies are added up by secure aggregation."""

    def __init__(
        self,
        method: Method,
        problem: Problem,
        privacy: Privacy,
        engine: Engine | None = None,
        *,
        resume: bool = False,
    ) -> None:
        super().__init__(method, problem, engine, resume=resume)
        self.privacy, self.fixed = privacy, FixedPoint.of(privacy)
        self.gone: Callable[[int, str], Collection[int]] = (
            lambda _, __: ()
        )  # (round, question) → places without answer
        self._used: set[bytes] = set()

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None) -> Replies:
        """A round in which the server learns the sum of the replies, or nothing."""
        cohort = rnd.ids.shape[1]
        gone = {phase: set(self.gone(rnd.t, phase)) for phase in PHASES}
        silent = set[int]().union(*(gone[phase] for phase in PHASES[:3]))
        there = np.array([place for place in range(cohort) if place not in silent], np.int64)
        work = None
        if len(there) >= self.privacy.survivors(cohort):
            own = subset(down, there)
            roster = [place for place in range(cohort) if place not in gone["keys"]]
            each = [
                factors({p: self._examples(rnd, run)[p] for p in roster})
                for run in range(rnd.ids.shape[0])
            ]
            work = self._rounded(
                rnd.subset(there),
                own,
                buffers,
                np.array([[one[p] for p in there.tolist()] for one in each]),
            )
        sums = [self._sum(run, rnd, there, work, gone) for run in range(rnd.ids.shape[0])]
        asked = np.array([place not in gone["keys"] | gone["shares"] for place in range(cohort)])
        base = wire.sizes(down) + (0 if buffers is None else buffers.shape[-1] * buffers.itemsize)
        sent, received = (np.stack([counts[way] for _, counts, _ in sums]) for way in (0, 1))
        events = tuple(event for _, _, told in sums for event in told)
        totals = [total for total, _, _ in sums if total is not None]
        if work is None or len(totals) < len(sums):
            return Replies(
                np.array([], np.int64), None, buffers, sent + base * asked, events=events
            )
        return self._counted(
            rnd.subset(there), there, work, totals, buffers, sent + base * asked, received, events
        )

    def _examples(self, rnd: Round, run: int) -> list[int]:
        """By which the client at each place counts."""
        return [
            1 if rnd.weights is None else self.problem.examples(one)
            for one in rnd.ids[run].tolist()
        ]

    def _rounded(
        self, rnd: Round, down: Any, buffers: Vector | None, factors: npt.NDArray[np.float64]
    ) -> _Work:
        """The local work of the clients that reply, rounded to whole numbers; their states follow from the rounded."""
        before = self.population.take(rnd)
        new, up, beside = self._work(rnd, down, buffers)
        arrays = wire.pack(up)
        if beside is not None and buffers is not None:
            arrays[BUFFERS] = beside - buffers
        arrays = {name: array.expand(*rnd.ids.shape, -1) for name, array in arrays.items()}
        payload = Payload.of(
            self.fixed,
            {name: array[:1, :1] for name, array in arrays.items()},
            self.method.statistics,
        )
        vectors, counted = {}, {name: torch.empty_like(array) for name, array in arrays.items()}
        for run, place in np.ndindex(*rnd.ids.shape):
            own = {name: array[run, place][None, None] for name, array in arrays.items()}
            vectors[run, place], read = payload.encode(own, float(factors[run, place]))
            for name, array in read.items():
                counted[name][run, place] = array[0, 0]
        counted.pop(BUFFERS, None)
        reply: Any = wire.unpack(counted)
        states = after(self.method, leaked(self.method, before, rnd), new, down, reply, rnd)
        return _Work(states, reply, payload, factors, vectors)

    def _sum(
        self, run: int, rnd: Round, there: Places, work: _Work | None, gone: dict[str, set[int]]
    ) -> tuple[Numbers | None, tuple[Places, Places], list[str]]:
        """(the sum of one run or None, bytes to and from each place, events)."""
        cohort = rnd.ids.shape[1]
        nothing = np.zeros(1, self.fixed.dtype)
        vectors = {
            p: nothing if work is None else work.vectors[run, n]
            for n, p in enumerate(there.tolist())
        }
        examples = None if rnd.weights is None else dict(enumerate(self._examples(rnd, run)))
        clients = LocalClients(self.privacy, lambda _: vectors, gone.__getitem__, examples)
        length = 1 if work is None else work.payload.length
        shares = None if rnd.weights is None else dict(enumerate(rnd.weights[run, :, 0].tolist()))
        one = SecureSum(list(range(cohort)), length, self.privacy, clients.ask, self._used, shares)
        total, events = None, []
        try:
            _, total = one.run()
        except TooFewError as error:
            events.append(f"round {rnd.t}: {error}; nothing counted")
        events += [
            f"round {rnd.t}: client {rnd.ids[run, place]}: {what}" for place, what in one.events
        ]
        sent, received = (
            np.array([table[p] for p in range(cohort)])
            for table in (clients.sent, clients.received)
        )
        return total, (sent, received), events

    def _counted(
        self,
        rnd: Round,
        there: Places,
        work: _Work,
        totals: list[Numbers],
        buffers: Vector | None,
        sent: Places,
        received: Places,
        events: tuple[str, ...],
    ) -> Replies:
        """The round as it counts: the clients' new states are stored, and the server is given the mean."""
        self.population.put(rnd, work.states)
        sums = zip(totals, work.factors.sum(1), strict=True)
        means, clipped = zip(
            *(work.payload.decode(total, own, len(there)) for total, own in sums), strict=True
        )
        arrays = {name: torch.cat([mean[name] for mean in means]) for name in means[0]}
        changed = arrays.pop(BUFFERS, None)
        up: Any = weighted(wire.unpack(arrays), rnd)
        beside = None if buffers is None or changed is None else buffers + changed
        if sum(clipped):
            events += (clipped_values(rnd.t, sum(clipped), self.privacy),)
        return Replies(there, up, beside, sent, received[:, there], events)
