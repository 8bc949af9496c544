"""A round as server and clients know it without a message: who takes part, with which weights and seeds."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedspan.core.layout import Ints, Layout, Seeds, Vector


@dataclass(frozen=True, eq=False)
class Schedule:
    """The cohorts of consecutive rounds; lets a task in the same process prepare several rounds at once."""

    first: int
    ids: Ints  # (rounds, runs, S)
    rows: Ints  # (rounds, runs · S): the same as flat numbers run · N + client


def flat_rows(ids: Ints, clients: int) -> Ints:
    """run · N + client of ids (…, runs, S), as (…, runs · S)."""
    runs = np.arange(0, ids.shape[-2] * clients, clients)
    return (ids + runs[:, None]).reshape(*ids.shape[:-2], -1)


@dataclass(frozen=True)
class Terms:
    """What privacy asks of clients in a round."""

    clip: float  # largest norm of a reply
    leak: float = 0.0  # what controls lose per round


@dataclass(frozen=True, eq=False)
class Round:
    """What server and clients know of a round without a message, for the clients that take part in it."""

    t: int  # the number of the round, from 0
    seeds: Seeds  # one per run
    clients: int  # N
    layout: Layout  # of the model
    ids: Ints  # (runs, S): who takes part
    last_round: Ints  # (runs, S): the round in which each one last took part, -1 for none
    weights: Tensor | None = None  # (runs, S, 1): shares w_i of all N; None: 1/N each
    unbiased: bool = False  # whether means are divided by S/N instead of Σ_S w_i
    everyone: Ints | None = None  # (runs, N): `last_round` of all, at the server
    local_steps: int = 1  # K, so that a task may draw the mini-batches of a round at once
    schedule: Schedule | None = None  # the cohorts of the next rounds, where they are known
    known_start: bool = False  # whether clients have the initial x: new ones need changes only
    rounds: int | None = None  # length of the run, which a schedule of the step size spans
    overwrite: bool = False  # whether a new state, not x, may take the old one's place
    steps: Tensor | None = None  # (runs, S, 1): K_i, where each client has its own
    privacy: Terms | None = None  # what clients do to their replies
    robust: bool = False  # whether an aggregator takes the place of the mean of the replies
    q: float | None = None  # with privacy: the probability to take part, which then counts

    @property
    def share(self) -> Tensor | float:
        """The share of all clients that takes part, by which means are divided.

        It is Σ_S w_i, or its expectation S/N with `unbiased`; S/N with equal weights, and q with privacy.
        """
        if self.q is not None:
            return self.q
        if self.weights is None or self.unbiased:
            return float(self.ids.shape[1] / self.clients)
        return self.weights.sum(1, keepdim=True)

    @property
    def pace(self) -> Tensor | float:
        """K̄ / K: the mean number of steps of the round's clients, by their weights, over `local_steps`."""
        if self.steps is None:
            return 1.0
        more = self.steps / self.local_steps - 1  # exactly 0 where all take K steps
        if self.weights is None:
            return 1 + more.mean(1, keepdim=True)
        return 1 + (self.weights * more).sum(1, keepdim=True) / self.weights.sum(1, keepdim=True)

    @property
    def oldest(self) -> int:
        """The earliest round whose change some client may not have received."""
        return 0 if self.everyone is None else max(0, int(self.everyone.min()))

    @property
    def missed_by_any(self) -> int:
        """How many of the last rounds' changes, this one's included, some client with a copy of x lacks after it."""
        if self.everyone is None:
            return self.t + 1
        copies = self._last_rounds.clip(min=0 if self.known_start else -1)
        return self.t + 1 - int(copies[copies >= 0].min(initial=self.t))

    def still_last(self, rounds: Collection[int]) -> set[int]:
        """Those of some rounds in which some client last took part, after this one; all where that is not known."""
        if self.everyone is None:
            return set(rounds)
        asked = np.array([*rounds], np.int64)
        return set(asked[np.isin(asked, self._last_rounds)].tolist())

    @property
    def _last_rounds(self) -> Ints:
        """`last_round` of all clients after this round, where that is known."""
        assert self.everyone is not None
        copies = self.everyone.flatten()
        copies[self.rows] = self.t
        return copies

    @functools.cached_property
    def rows(self) -> Ints:
        """The cohort as flat numbers run · N + client, in order."""
        plan = self.schedule
        return flat_rows(self.ids, self.clients) if plan is None else plan.rows[self.t - plan.first]

    def mean(self, v: Vector) -> Vector:
        """mean_S v: over the clients of the round, by their weights; (runs, S, n) → (runs, 1, n).

        One vector for a round of several clients is what all of them have in common, and its own mean.
        """
        if v.shape[1] == 1 < self.ids.shape[1]:
            return v
        if self.weights is None:
            return v.mean(1, keepdim=True)
        return (self.weights * v).sum(1, keepdim=True) / self.share

    def average(self, v: Vector) -> Vector:
        """The mean of statistics over the clients of the round, each of whom counts once.

        With an aggregator it is the median, over those clients whose numbers are not all zero.
        """
        if v.shape[1] == 1 < self.ids.shape[1]:
            return v
        if not self.robust:
            return v.mean(1, keepdim=True)
        known = v.masked_fill(~v.any(-1, keepdim=True), torch.nan)
        return known.nanquantile(0.5, 1, keepdim=True).nan_to_num(0.0)

    def subset(self, arrived: Ints) -> Round:
        """The round with some places of the cohort only, the same in every run: those that replied."""
        weights, steps = (v if v is None else v[:, arrived] for v in (self.weights, self.steps))
        ids, last = self.ids.take(arrived, 1), self.last_round.take(arrived, 1)  # in memory's order
        return replace(self, ids=ids, last_round=last, weights=weights, steps=steps, schedule=None)
