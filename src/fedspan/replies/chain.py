"""What happens to the replies of a round, in order, in the simulator as across machines.

    screen   replies that are out of all measure do not count (`replies.screen`)
    clip     with privacy each reply has at most the norm C; clients clip, and servers again (`replies.clip`)
    round    in secure sums each number is a whole one (`replies.fixed_point`)
    sum      their mean, a robust mean, or a secure sum (`replies.running_mean`, `aggregators`, `replies.secure`)
    noise    with privacy the sum gets noise (`replies.noise`)

A method whose `server_step` uses nothing of the replies but `rnd.mean` takes one vector per run as that mean. So
whatever combines the replies in another way hands it a reply with one row, (runs, 1, n). Statistics stay as they are:
`Round.average` takes their median.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedspan.aggregators.mean import Mean
from fedspan.core import wire
from fedspan.core.bundle import payload
from fedspan.core.config import Participation
from fedspan.core.errors import one_line
from fedspan.core.extras import needs
from fedspan.core.layout import Vector
from fedspan.core.method import Method, is_plain_sum
from fedspan.core.privacy import Privacy
from fedspan.core.round import Round
from fedspan.core.spec import Spec
from fedspan.replies.clip import shrunk
from fedspan.replies.fixed_point import FixedPoint
from fedspan.replies.noise import Mechanism
from fedspan.replies.running_mean import Gathered, RunningMean
from fedspan.replies.screen import Screen

LARGE = 1 << 22  # numbers in the replies of a round from which they are not kept
NAMED = 5  # clients with the same event


class Event(NamedTuple):
    """Something that went wrong in a round."""

    kind: str  # "left out", "refused", "restored", "state lost", "no reply", "failed" or "other"
    client: int | None  # None: it happened to the round
    text: str
    seed: int | None = None  # of several that are computed together


def in_words(t: int, events: Iterable[Event]) -> list[str]:
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
            told.append(f"round {t}: client {event.client}{of_seed}: {what}")
        elif event is same[0]:
            named = ", ".join(str(one.client) for one in same[:NAMED])
            told.append(f"round {t}: clients {named} and {len(same) - NAMED} more: {what}")
    return told


@dataclass(frozen=True, eq=False)
class Replies:
    """What came of a round's exchange: which places of the cohort replied, and what."""

    places: npt.NDArray[np.int64]
    up: Any  # the cohort's message of those places; anything where there are none
    buffers: Vector | None = None
    sent: npt.NDArray[np.int64] | None = None  # (runs, S): bytes, if not the download's
    received: npt.NDArray[np.int64] | None = None  # (runs, places): the same of the replies
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
        self.screen = Screen(None if noise or secure else chosen.screen, runs, method.statistics)
        self.aggregator = None if isinstance(chosen.aggregator, Mean) else chosen.aggregator

    @staticmethod
    def of(
        spec: Spec, method: Method, clients: int, clients_per_round: int, runs: int = 1
    ) -> Chain:
        """The chain of a run of so many clients."""
        noise = None
        if spec.dp is not None and spec.dp.level == "client":
            noise = Mechanism.of(spec.dp, clients, clients_per_round, spec.rounds)
        if spec.secure is not None:
            needs("privacy", "cryptography")
            most = clients_per_round if noise is None else clients  # then cohorts vary in size
            FixedPoint.of(spec.secure).check(most)
        return Chain(method, spec.participation, runs=runs, noise=noise, secure=spec.secure)

    def large(self, rnd: Round) -> bool:
        """Whether the models of all clients of a round are too large to be held at once."""
        return self.secure is None and bool(rnd.ids.shape[1] * rnd.layout.size >= LARGE)

    def gathering(self, rnd: Round) -> Gathered | RunningMean:
        """What takes in replies one by one; large ones are averaged as they come where nothing needs each of them."""
        alone = self.aggregator is None and rnd.ids.shape[1] > 1 and self.large(rnd)
        return RunningMean(rnd) if alone and is_plain_sum(self.method) else Gathered()

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

    def save(self) -> wire.Arrays:
        """What a resumed run needs: the usual norms, and the key of the noise."""
        return {"usual": self.screen.save()} | ({} if self.noise is None else self.noise.save())

    def load(self, arrays: wire.Arrays) -> None:
        """Puts back what `save` gave."""
        self.screen.load(arrays["usual"])
        if self.noise is not None:
            self.noise.load({name: array for name, array in arrays.items() if name != "usual"})
