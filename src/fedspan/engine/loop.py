"""The only loop: rounds of a method on a problem through a transport, as a generator of rows.

ServerState → broadcast → Down → (transport) → client_step → Up → (transport) → server_step → ServerState
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedspan.core import seeds as streams
from fedspan.core import wire
from fedspan.core.bundle import payload
from fedspan.core.callback import Callback
from fedspan.core.digest import digest, sampled
from fedspan.core.errors import CheckpointError, FormError, ProtocolError, SpecError, one_line
from fedspan.core.json_log import Line as Line
from fedspan.core.json_log import check_form
from fedspan.core.layout import Vector, all_finite
from fedspan.core.method import Method
from fedspan.core.objective import Flat, Problem
from fedspan.core.round import Round, Schedule, flat_rows
from fedspan.engine.clock import Clock
from fedspan.engine.states import check_rows
from fedspan.replies.chain import Chain, Event, Replies, in_words

Ids = npt.NDArray[np.int64]
DRAWN_AHEAD = 64  # rounds whose cohorts are drawn at once


@functools.lru_cache(maxsize=4)
def cohorts(seeds: tuple[int, ...], clients: int, size: int, part: int) -> Schedule:
    """Who takes part in DRAWN_AHEAD consecutive rounds; each round depends on its own key alone."""
    rounds = range(part * DRAWN_AHEAD, (part + 1) * DRAWN_AHEAD)
    ids = streams.choose(streams.keys_of_rounds(seeds, "cohort", rounds), clients, size)
    return Schedule(rounds.start, ids, flat_rows(ids, clients))


def cohort_of(seeds: tuple[int, ...], clients: int, size: int, t: int) -> Ids:
    """Who takes part in round t, (runs, S)."""
    ids: Ids = cohorts(seeds, clients, size, t // DRAWN_AHEAD).ids[t % DRAWN_AHEAD]
    return ids


class Heard(NamedTuple):
    """Who took part in a round."""

    t: int
    ids: Ids  # (runs, S)
    places: Ids  # that counted
    events: tuple[Event, ...] = ()


class Transport(Protocol):
    """What carries the messages of a round between the server and its clients: in which runtimes differ."""

    def exchange(self, rnd: Round, down: Any, buffers: Vector | None, chain: Chain) -> Replies:
        """Delivers a round's download and the model's buffers to the cohort; the chain decides which replies count."""

    def save(self) -> wire.Arrays:
        """What this end must keep of the clients for a later `load`; nothing, if it is never resumed."""
        return {}

    def saved(self) -> None:
        """What `save` gave is on disk."""
        return

    def load(self, arrays: wire.Arrays) -> None:
        """Puts back what `save` gave."""
        return


@dataclass(frozen=True)
class Row:
    """The runs after `round` rounds; each array has one number per run."""

    round: int
    up_bytes: Ids
    down_bytes: Ids
    seconds: float
    metrics: dict[str, npt.NDArray[np.float64]]
    diverged: npt.NDArray[np.bool_]
    events: tuple[str, ...] = ()  # since the row before
    hours: float | None = None  # of the virtual clock


RECORD = {
    "id": str, "t": int, "seconds": float, "shape": list[int], "events": list[str], "more": int,
    "checks": dict[str, str],
}  # fmt: skip
EVENTS_KEPT = 200  # between two rows; of the others only the number
# Last round, bytes up and bytes down of a client that never took part
NEVER = np.array([[-1], [0], [0]], np.int64)
NOBODY = Replies(np.array([], np.int64), None)


@dataclass
class Loop:
    """A run in progress. `rows()` may be left at any row and continued, here or from `save()` elsewhere.

    Callbacks are given the loop: `t` rounds are done, `lines` holds the evaluations of each seed so far, `model()` is
    the server's model, and `end(reason)` ends the run after the current round.
    """

    method: Method
    problem: Problem
    transport: Transport
    seeds: tuple[int, ...]
    clients_per_round: int
    callbacks: Sequence[Callback] = ()
    run_dir: Path | None = None
    rounds: int | None = None  # length of the run, for schedules; else that of the first `rows`
    chain: Chain = field(default=None)  # type: ignore[assignment]  # what happens to replies; by default their mean
    known_start: bool = False  # whether clients have the initial model
    unbiased: bool = False  # how a round weights its clients: `Participation.unbiased`
    on_events: Callable[[Sequence[str]], None] | None = None  # is given what went wrong in a round
    metrics: Sequence[Any] = ()  # as the user gives them; they say whether more is better
    clock: Clock | None = None  # counts the hours of a run with one seed, and knows who is there
    large: ClassVar[int] = 1 << 22  # parameters from which the server's vectors change in place

    def __post_init__(self) -> None:
        n, problem, runs = self.problem.clients, self.problem, len(self.seeds)
        if not 1 <= self.clients_per_round <= n:
            raise SpecError(
                f"`clients_per_round` must be from 1 to the {n} clients, got {self.clients_per_round}"
            )
        self.method.check(problem.layout)
        self.chain = self.chain or Chain(self.method, runs=runs)
        self.server: Any = self.method.init_server(problem.x0, problem.layout)
        self.buffers = problem.buffers0  # (runs, 1, n): averaged beside x, as running statistics
        self.last_round: Ids = np.full((runs, n), -1, np.int64)  # of each client's copy of x
        self.ledger = wire.Ledger.empty(runs, n)
        self.t, self.seconds = 0, 0.0
        self.stop, self.reason = False, ""  # leave after the current round, and why
        self.lines: list[list[Line]] = [[] for _ in self.seeds]
        self.events = list[str]()  # since the last row, at most EVENTS_KEPT
        self.more_events = 0  # that were not kept
        nobody = self.last_round[:, :0]
        self.heard = Heard(0, nobody, nobody[0])  # of the last round
        self.id = secrets.token_hex(8)  # in every file of the run that it reads back
        self.start = start_of(problem.x0)  # a hash of sampled initial weights
        self.checks = dict[str, str]()  # file of lines → checksum of its last line
        self._each_round = [
            one for one in self.callbacks if type(one).on_round_end is not Callback.on_round_end
        ]

    def model(self) -> Vector:
        """x, (runs, 1, d)."""
        x: Vector = self.server.x
        return x

    def state_dict(self, number: int = 0) -> dict[str, torch.Tensor]:
        """The server's model as tensors by name, of the seed with this number in `seeds`."""
        return self.problem.state_dict(self.model(), self.buffers, number)

    def end(self, reason: str) -> None:
        """Ends the run after the current round."""
        self.stop, self.reason = True, reason

    def rows(self, rounds: int, eval_every: int) -> Iterator[Row]:
        """Continues to round `rounds`: a row at the start, every `eval_every` rounds, at the end, or on divergence."""
        self.rounds = rounds if self.rounds is None else self.rounds
        # a run may have been killed between the checkpoint of an evaluation's round and the evaluation itself
        last = max((lines[-1]["round"] for lines in self.lines if lines), default=-1)
        if last < self.t and (self.t % eval_every == 0 or self.t >= rounds):
            yield self._evaluate()
        while self.t < rounds and not self.stop:
            began = time.perf_counter()
            until = min(rounds, self.t + eval_every - self.t % eval_every)
            with torch.inference_mode():
                while self.t < until and not self.stop:
                    self.step()
                    for callback in self._each_round:
                        callback.on_round_end(self)
            self.seconds += time.perf_counter() - began
            if self.t < until and not self.reason:
                return  # interrupted: the next evaluation comes when it is resumed
            row = self._evaluate()
            yield row
            if row.diverged.all():
                return

    def step(self) -> None:
        """One round."""
        rnd, beside, noise = self._round(), self.buffers, self.chain.noise
        events: list[Event] = []
        if self.clock is not None:
            ids, events = self.clock.cohort(rnd.ids[0], self.t)
            rnd = self._round(ids[None]) if events else rnd
        if noise is not None:
            beside = noise.sent(self.problem.x0)
        asked, found = rnd.ids, NOBODY
        sent: Ids | int = 0
        received: Ids | int = 0
        if asked.shape[1]:
            down = self.method.broadcast(self.server, rnd)
            found = self.transport.exchange(rnd, down, beside, self.chain)
            sent = wire.sizes(down, beside) if found.sent is None else found.sent
            self.ledger.sent(rnd, sent)
        places, count = found.places, len(found.places)
        if count < asked.shape[1]:
            rnd = rnd.subset(places)
        if count:
            received = (
                wire.sizes(found.up, found.buffers) if found.received is None else found.received
            )
            self.ledger.received(rnd, received)
            self.last_round.reshape(-1)[rnd.rows] = self.t
        if self.clock is not None:  # it waits for all that were asked if nobody replied
            came = places if count else np.arange(asked.shape[1])
            each = sent if isinstance(sent, int) else sent[:, came]
            events += self.clock.advance(asked[0, came], received, each)
        self.heard = Heard(self.t, asked, places, tuple(events))
        if found.events:
            self.note(found.events)
        if count or noise is not None:
            up = found.up if count else self.empty_reply(rnd)
            up, self.buffers, rnd = self.chain.total(up, found.buffers, rnd)
            server, here = self.method.server_step(self.server, up, rnd), self.problem.x0.shape
            if server.x.shape != here:
                raise FormError(
                    f"`server_step` of {type(self.method).__name__} returns x of shape {tuple(server.x.shape)} instead "
                    f"of {tuple(here)}, which is (runs, 1, size); a mean over clients keeps its axis with "
                    "keepdim=True, as rnd.mean(v) does"
                )
            self.server = server if noise is None else self.chain.leaked(server)
        else:
            self.server = self.method.empty_round(self.server, rnd)
        self.t += 1

    def note(self, events: Sequence[Event]) -> None:
        """Adds events to the last round, and to the next evaluation."""
        told = in_words(self.heard.t, events, self.problem.names)
        self.heard = self.heard._replace(events=(*self.heard.events, *events))
        if self.on_events is not None:
            self.on_events(told)
        kept = told[: EVENTS_KEPT - len(self.events)]
        self.events += kept
        self.more_events += len(told) - len(kept)

    def empty_reply(self, rnd: Round) -> Any:
        """A reply of zeros in the form of the method's own: with noise a round without any releases noise alone."""
        one = np.zeros((len(rnd.seeds), 1), np.int64)
        alone = replace(rnd, ids=one, last_round=one - 1, schedule=None)
        state = self.method.init_client(self.problem.x0, self.problem.layout)
        down = self.method.broadcast(self.server, alone)
        _, up = self.method.client_step(state, down, Flat(), alone)
        return up.replace(**{name: torch.zeros_like(v) for name, v in payload(up).items()})

    def _round(self, ids: Ids | None = None) -> Round:
        """The next round, of these clients or of those that are drawn."""
        problem, method, noise, schedule = self.problem, self.method, self.chain.noise, None
        if ids is None and noise is not None:
            ids = noise.cohort(self.t, len(self.seeds))
        if ids is None:
            part, place = divmod(self.t, DRAWN_AHEAD)
            schedule = cohorts(self.seeds, problem.clients, self.clients_per_round, part)
            ids, rows = schedule.ids[place], schedule.rows[place]
        else:
            rows = flat_rows(ids, problem.clients)
        rnd = object.__new__(Round)  # whose own __init__ sets one field at a time
        vars(rnd).update(
            t=self.t,
            seeds=self.seeds,
            clients=problem.clients,
            layout=problem.layout,
            ids=ids,
            rows=rows,
            last_round=self.last_round.reshape(-1)[rows].reshape(ids.shape),
            weights=None if problem.weights is None else self._of(problem.weights, ids),
            unbiased=self.unbiased and not method.follows_states,
            everyone=self.last_round,
            local_steps=method.local_steps,
            steps=None if problem.steps is None else self._of(problem.steps, ids),
            schedule=schedule,
            known_start=self.known_start,
            rounds=self.rounds,
            overwrite=noise is None and problem.layout.size >= self.large,
            privacy=None if noise is None else noise.terms(),
            robust=self.chain.aggregator is not None,
        )
        return rnd

    def _of(self, values: npt.NDArray[Any], ids: Ids) -> Vector:
        """Values of some clients, (runs, S, 1)."""
        return torch.from_numpy(values[ids]).unsqueeze(-1).to(self.problem.layout.dtype)

    def _evaluate(self) -> Row:
        metrics = dict(self.problem.evaluate(self.model(), self.buffers))
        metrics |= self.method.measures(self.server)
        if self.chain.noise is not None:
            metrics |= self.chain.noise.measures(self.t, len(self.seeds))
        for callback in self.callbacks:
            metrics |= callback.measure(self)
        if self.more_events:
            self.events.append(f"{self.more_events:,} more events")
        events, self.events, self.more_events = tuple(self.events), [], 0
        hours = None if self.clock is None else self.clock.hours
        diverged = self.problem.diverged(metrics)
        return Row(self.t, *self.ledger.totals(), self.seconds, metrics, diverged, events, hours)

    def save(self) -> wire.Arrays:
        """Everything a later `load` needs to continue to the same bits; `lines` are in the history files."""
        counts = np.stack([self.last_round, self.ledger.up, self.ledger.down]).reshape(3, -1)
        rows = np.flatnonzero((counts != NEVER).any(0))
        record = {
            "id": self.id,
            "t": self.t,
            "seconds": self.seconds,
            "shape": self.last_round.shape,
            "events": self.events,
            "more": self.more_events,
            "checks": self.checks,
        }
        if self.clock is not None:
            record["clock"] = self.clock.save()
        own = {
            "rows": torch.from_numpy(rows),
            "counts": torch.from_numpy(counts[:, rows]),
            "record": torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8),
        }
        parts = {
            "server": wire.pack(self.server),
            "clients": self.transport.save(),
            "replies": self.chain.save(),
            "loop": own if self.buffers is None else own | {"buffers": self.buffers},
        }
        return {f"{part}.{name}": one for part, own in parts.items() for name, one in own.items()}

    def load(self, arrays: wire.Arrays) -> None:
        """Continues a run from where `save` left it.

        Raises:
            CheckpointError: The arrays are not what a run of this method, model and population saves.
        """
        try:
            self._load(arrays)
        except (LookupError, ValueError, RuntimeError, OverflowError, ProtocolError) as error:
            raise CheckpointError(
                f"the checkpoint is damaged ({one_line(error, 100)}); start the run again"
            ) from error

    def _load(self, arrays: wire.Arrays) -> None:
        parts: dict[str, wire.Arrays] = {"server": {}, "clients": {}, "loop": {}, "replies": {}}
        for name, array in arrays.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = array
        record, loop, shape = record_of(arrays), parts["loop"], self.last_round.shape
        if tuple(record["shape"]) != shape:
            raise CheckpointError(
                f"the checkpoint is of {tuple(record['shape'])} (runs, clients), this run of {shape}"
            )
        like = wire.Arrays(rows=torch.tensor([]).long(), record=loop["record"])
        like["counts"] = like["rows"].expand(3, 0)
        wire.check_forms(loop, like | ({} if self.buffers is None else {"buffers": self.buffers}))
        t, seconds, counts = record["t"], record["seconds"], loop["counts"].numpy()
        check_rows(loop["rows"], counts.shape[1], self.last_round.size)
        possible = (counts >= NEVER).all() and (counts[0] < max(t, 1)).all()
        if not (possible and min(t, seconds, record["more"]) >= 0):
            raise CheckpointError(
                "the checkpoint is damaged: its counts are impossible; start the run again"
            )
        self.server = self._server_of(parts["server"], t)
        whole = all_finite(self.model())  # if not, a seed has diverged and may hold anything
        for name, array in arrays.items():
            if whole and array.is_floating_point() and array.numel() and not all_finite(array):
                raise CheckpointError(
                    f"the checkpoint is damaged: {name!r} is not finite; start the run again"
                )
        self.chain.load(parts["replies"])
        self.transport.load(parts["clients"])
        tables = NEVER.repeat(self.last_round.size, 1)
        tables[:, loop["rows"].numpy()] = counts
        self.last_round, *sizes = tables.reshape(3, *shape)
        self.ledger = wire.Ledger(*sizes)
        self.buffers, self.t, self.seconds = loop.get("buffers"), t, float(seconds)
        self.id, self.events, self.more_events = record["id"], record["events"], record["more"]
        self.checks = record["checks"] if t else {}
        if self.clock is not None:
            self.clock.load(record["clock"])

    def _server_of(self, arrays: wire.Arrays, t: int) -> Any:
        """The server's state after t rounds, in the form that it has in this run."""
        like, logs = wire.pack(self.server), wire.Arrays()
        if t and self.method.logs_changes:  # of a round without replies, whose log has one entry
            one = replace(self._round(), overwrite=False)
            logged = wire.pack(self.method.empty_round(self.server, one)).items()
            logs = {name: array[:, :0] for name, array in logged if name.startswith("log.missed")}
            logs["log.end"] = like.pop("log.end")[:0]
        server, unset = wire.unpack(arrays), set(self.method.later) - like.keys()
        wire.check_forms({name: arrays[name] for name in arrays if name in logs}, logs)
        others = arrays.keys() - logs.keys() - unset
        wire.check_forms({name: arrays[name] for name in others}, like, exact=True)
        log = getattr(server, "log", None)
        if log is not None and (
            log.end != t or (t and not 0 < len(log.entries) <= t - len(log.earlier))
        ):
            why = f"its log has {len(log.entries)} changes up to round {log.end}, and the run is at round {t}"
        elif not any(map(all_finite, server.x)):
            why = "its model is not finite"
        else:
            return server
        raise CheckpointError(f"the checkpoint is damaged: {why}; start the run again")


def start_of(x: Vector) -> str:
    """A hash of sampled weights; a dry run has none."""
    return "" if x.is_meta else digest(repr(sampled(x)))


def record_of(arrays: wire.Arrays) -> Line:
    """What a checkpoint says in words: the run's id and shape, events, and checksums of other files."""
    try:
        record = json.loads(arrays["loop.record"].numpy().tobytes())
    except (KeyError, ValueError, TypeError, RecursionError):
        record = None
    return check_form(record, "checkpoint.safetensors", RECORD, {"clock": dict[str, Any]})
