"""What happens to the replies of a round, in order, in the simulator as across machines.

    screen   replies that are out of all measure do not count (`Chain.screened`)
    clip     with privacy each reply has at most the norm C; clients clip, and servers again (`replies.clip`)
    round    in secure sums each number is a whole one (`replies.fixed_point`)
    sum      their mean, a robust mean, or a secure sum (`Gathered`, `aggregators`, `replies.secure`)
    noise    with privacy the sum gets noise (`replies.noise`)

A method whose `server_step` uses nothing of the replies but `rnd.mean` takes one vector per run as that mean. So
whatever combines the replies in another way hands it a reply with one row, (runs, 1, n).

Every step takes the two kinds of parts apart by `core.bundle`: the payload is measured, clipped, combined and noised,
whatever its parts are called; statistics must be within the ranges that the method declares, and stay as they are:
`Round.average` takes their median.

Screening: a finite number of 3e38 passes every other check and ends a run, because the next sum overflows. So a reply
that is far larger than those of other clients is left out, as if it had not come. It is compared with the usual norm,
the largest median norm of a round so far. The median of a round alone would not do: once most clients fit their data,
their replies are almost zero, and an honest one that still learns is a million times larger.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedspan.aggregators.mean import Mean
from fedspan.core import wire
from fedspan.core.bundle import STATISTIC, Bundle, outside, payload
from fedspan.core.config import Participation
from fedspan.core.encoded import Encoded
from fedspan.core.errors import CheckpointError, client_name, one_line
from fedspan.core.extras import needs
from fedspan.core.layout import Vector
from fedspan.core.method import Method, is_plain_sum
from fedspan.core.privacy import Privacy
from fedspan.core.round import Round
from fedspan.core.spec import Spec
from fedspan.replies.fixed_point import FixedPoint
from fedspan.replies.noise import Mechanism

NAMED = 5  # clients with the same event
PIECE = 1 << 20  # numbers of a reply that are squared at once
LEAST = 3  # replies of a round from which their median tells what is usual
OUTSIDE = "its statistics are outside their ranges"
COLUMNS = 64  # torch adds so many columns at once
LEVELS = 4  # of torch's partial sums
KINDS = ("its norm", "the norm of its buffers")
Places = npt.NDArray[np.int64]  # in the cohort
Norms = list[list[list[float]]]  # (kinds, runs, clients)
Outliers = list[tuple[int, "Event"]]  # the places of replies that do not count, and why


class Event(NamedTuple):
    """Something that went wrong in a round."""

    kind: str  # "left out", "refused", "restored", "state lost", "no reply", "failed" or "other"
    client: int | None  # None: it happened to the round
    text: str
    seed: int | None = None  # of several that are computed together


def in_words(t: int, events: Iterable[Event], names: Sequence[str] | None = None) -> list[str]:
    """The events of round t; where the same happens to many clients, it is one sentence with the first of them."""
    clients: dict[str, list[Event]] = {}
    for event in events:
        clients.setdefault(event.text, []).append(event)
    told = []
    for event in events:
        same, what = clients[event.text], one_line(event.text)
        if event.client is None:
            told.append(f"round {t}: {what}")
        elif len(same) <= NAMED:
            of_seed = "" if event.seed is None else f" of seed {event.seed}"
            told.append(f"round {t}: {client_name(event.client, names)}{of_seed}: {what}")
        elif event is same[0]:
            first = [client_name(one.client or 0, names) for one in same[:NAMED]]
            named = ", ".join(one.removeprefix("client ") for one in first)
            told.append(f"round {t}: clients {named} and {len(same) - NAMED} more: {what}")
    return told


@dataclass(frozen=True, eq=False)
class Replies:
    """What came of a round's exchange: which places of the cohort replied, and what."""

    places: Places
    up: Any  # the cohort's message of those places; anything where there are none
    buffers: Vector | None = None
    sent: wire.Counts | None = None  # (runs, S): bytes, if not the download's
    received: wire.Counts | None = None  # (runs, places): the same of the replies
    events: tuple[Event, ...] = ()


class Chain:
    """The steps between the clients' replies and the server's own.

    Args:
        method: The method of the run.
        participation: Its screen and aggregator. None neither screens nor replaces the mean.
        runs: Number of seeds that are computed together.
        noise: The private sum.
        secure: Settings of secure sums.
    """

    large_from = 1 << 22  # numbers in the replies of a round from which they are not kept

    def __init__(
        self,
        method: Method,
        participation: Participation | None = None,
        *,
        runs: int = 1,
        noise: Mechanism | None = None,
        secure: Privacy | None = None,
    ) -> None:
        self.method, self.noise, self.secure = method, noise, secure
        chosen = Participation(screen=None) if participation is None else participation
        # With noise none is left out: one client could decide whether another one counts.
        self.factor = None if noise or secure else chosen.screen
        self.aggregator = None if isinstance(chosen.aggregator, Mean) else chosen.aggregator
        self.usual = [[0.0] * runs for _ in KINDS]  # the largest median norm of a round so far
        self._came = list[Norms]()  # of the replies of a round

    @staticmethod
    def of(
        spec: Spec, method: Method, clients: int, clients_per_round: int, runs: int = 1
    ) -> Chain:
        """The chain of a run of so many clients."""
        noise = None
        if spec.dp is not None and spec.dp.level == "client":
            noise = Mechanism(spec.dp, clients, clients_per_round, spec.rounds)
        if spec.secure is not None:
            needs("privacy", "cryptography")
            most = clients_per_round if noise is None else clients  # then cohorts vary in size
            FixedPoint.of(spec.secure).check(most)
        return Chain(method, spec.participation, runs=runs, noise=noise, secure=spec.secure)

    # screen

    def screened(
        self, up: Any, buffers: Vector | None, rnd: Round, *, one_of_many: bool = False
    ) -> Outliers:
        """Those of a round's replies that do not count, as (place, event).

        With `one_of_many` the replies come one by one, in calls of their own. They are compared with earlier rounds,
        and are part of what is usual once `all_came` is called.
        """
        found: Outliers = []
        wrong = outside(self.method.statistics, vars(up))
        if wrong is not None and wrong.any():
            found = [left_out(rnd, run, place, OUTSIDE) for run, place in wrong.nonzero().tolist()]
        if self.factor is None:
            return found
        norms = self.came(up, buffers)
        if one_of_many:
            return found + self.compared(norms, rnd, count=False)
        return found + self.all_came(rnd)

    def came(self, up: Any, buffers: Vector | None) -> Norms:
        """Takes in one of a round's replies, to be compared with the others by `all_came`."""
        norms = [norms_of(payload(up).values()).tolist()]
        if buffers is not None:
            norms.append(norms_of([buffers]).tolist())
        self._came.append(norms)
        return norms

    def all_came(self, rnd: Round) -> Outliers:
        """Those of the replies since the last call, which were all of a round, that are too large."""
        came, self._came = self._came, []
        joined = [
            [[*itertools.chain(*rows)] for rows in zip(*kind, strict=True)]
            for kind in zip(*came, strict=True)
        ]
        return self.compared(joined, rnd) if came else []

    def compared(self, norms: Norms, rnd: Round, count: bool = True) -> Outliers:
        """Those of a round's replies that are too large by their norms, which `count` in what is usual."""
        assert self.factor is not None
        found: Outliers = []
        for kind, usual, rows in zip(KINDS, self.usual, norms, strict=False):
            for run, row in enumerate(rows):
                ordered = sorted(row)
                median = ordered[(len(row) - 1) // 2]
                if count and len(row) >= LEAST and usual[run] < median < math.inf:
                    usual[run] = median
                known = usual[run]
                most = self.factor * known or math.inf
                for place, size in enumerate(row if not ordered[-1] <= most else ()):
                    # NaN and infinity are no lies but divergence, which must show
                    if most < size < math.inf:
                        times = f"{size / known:.3g} times the median, {known:.3g}"
                        why = f"{kind}, {size:.3g}, is {times}"
                        found.append(left_out(rnd, run, place, why))
        return found

    # sum and noise

    def large(self, rnd: Round) -> bool:
        """Whether the models of all clients of a round are too large to be held at once."""
        return self.secure is None and rnd.ids.shape[1] * rnd.layout.size >= self.large_from

    def gathering(self, rnd: Round) -> Gathered:
        """What takes in replies one by one; large ones are averaged as they come where nothing needs each of them."""
        alone = self.aggregator is None and rnd.ids.shape[1] > 1 and self.large(rnd)
        return Gathered(rnd, running=alone and is_plain_sum(self.method))

    def total(
        self, up: Any, buffers: Vector | None, rnd: Round
    ) -> tuple[Any, Vector | None, Round]:
        """What the server's step is given of the replies that count: (message, buffers, round)."""
        if self.noise is not None:
            up, rnd = self.noise.release(up, buffers, rnd)
            return up, None, rnd
        if self.aggregator is not None:
            vectors = payload(up)  # of a client they count as one vector
            joined = torch.cat(list(vectors.values()), -1)
            sizes = [part.shape[-1] for part in vectors.values()]
            parts = self.aggregator.combine(joined, rnd).split(sizes, -1)
            up = up.replace(**dict(zip(vectors, parts, strict=True)))
            buffers = None if buffers is None else self.aggregator.combine(buffers, rnd)
        return up, None if buffers is None else replace(rnd, unbiased=False).mean(buffers), rnd

    def leaked(self, server: Any) -> Any:
        """The server's state after a round, with controls that have leaked."""
        assert self.noise is not None
        leak = self.noise.settings.leak
        return shrunk(self.method, server, 1 - leak) if leak else server

    # checkpoints

    def save(self) -> wire.Arrays:
        """What a resumed run needs: the usual norms, and the key of the noise."""
        usual = torch.tensor(self.usual, dtype=torch.float64)
        return {"usual": usual} | ({} if self.noise is None else self.noise.save())

    def load(self, arrays: wire.Arrays) -> None:
        """Puts back what `save` gave."""
        wire.check_forms(arrays, self.save())
        if not bool((arrays["usual"] >= 0).all()):
            raise CheckpointError(
                "the checkpoint is damaged: its usual norms are impossible; start the run again"
            )
        self.usual = arrays["usual"].tolist()
        if self.noise is not None:
            self.noise.load(arrays)


class Gathered:
    """The replies of a cohort, which come in its order; with `running` their mean alone is kept.

    The mean equals `Round.mean` of all replies to the last bit. Torch adds the rows of a matrix in blocks, and so does
    this. The last few columns it adds in another order; of these the rows are kept.
    """

    def __init__(self, rnd: Round, running: bool) -> None:
        self.rnd, self.running = rnd, running
        self.places: list[int] = []  # whose replies came
        self.ups: list[Any] = []
        self.levels: dict[str, list[Vector]] = {}  # of each vector: torch's partial sums
        self.tails: dict[str, list[Vector]] = {}  # and the last columns of all rows

    def add(self, place: int, up: Any) -> None:
        """Takes in the reply of one place, whose vectors it may change."""
        self.places.append(place)
        if not self.running:
            self.ups.append(up)
            return
        bits = max(4, math.ceil(math.log2(self.rnd.ids.shape[1])) // LEVELS)
        for name, row in vars(up).items():
            if self.rnd.weights is not None and not name.startswith(STATISTIC):
                row.mul_(self.rnd.weights[:, place : place + 1])
            tail = row[..., row.shape[-1] - row.shape[-1] % COLUMNS :].clone()
            self.tails.setdefault(name, []).append(tail)
            sums = self.levels.setdefault(name, [])
            for level in range(LEVELS):
                if level == len(sums):  # the first row is the caller's to give away
                    sums.append(row.clone() if level else row)
                else:
                    sums[level].add_(row)
                if level:
                    row.zero_()
                if (len(self.places) >> bits * level) % (1 << bits):
                    break
                row = sums[level]

    def reply(self) -> Any:
        """The replies as one, (runs, S, n), or their mean, (runs, 1, n)."""
        if not self.running:
            return wire.gather(self.ups)
        rnd, means = self.rnd.subset(np.array(self.places)), {}
        for name, (total, *others) in self.levels.items():
            for other in others:
                total.add_(other)
            tail = torch.cat(self.tails[name], 1).sum(1, keepdim=True)
            total[..., total.shape[-1] - tail.shape[-1] :] = tail
            alike = rnd.weights is None or name.startswith(STATISTIC)
            means[name] = total.div_(float(len(self.places)) if alike else rnd.share)
        return Bundle(**means)


def left_out(rnd: Round, run: int, place: int, why: str) -> tuple[int, Event]:
    """The place of a reply that does not count, and its event."""
    seed = rnd.seeds[run] if len(rnd.seeds) > 1 else None
    return place, Event("left out", int(rnd.ids[run, place]), f"reply left out: {why}", seed)


def norms_of(parts: Iterable[Any], at_once: int = PIECE) -> Vector:
    """‖reply‖ of each client over all of its parts, (runs, clients); of codes, over their scales and values.

    In float64, in which no square of a float32 overflows. Torch makes a copy in that type, so piece by piece.
    """
    found = [
        torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float64)
        for part in parts
        for vector in (part.parts.values() if isinstance(part, Encoded) else (part,))
        if vector.is_floating_point()
        for piece in vector.split(at_once, -1)
    ]
    norm: Vector = found[0] if len(found) == 1 else torch.stack(found).norm(dim=0)
    return norm


def shrunk(method: Method, state: Any, factor: float | Vector) -> Any:
    """A state of server or clients with its controls times a factor."""
    held = {name: getattr(state, name) for name in method.controls}
    return state.replace(**{name: (value * factor).to(value.dtype) for name, value in held.items()})
