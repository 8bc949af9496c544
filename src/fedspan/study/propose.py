"""Rank, bits, local steps and learning rate for a budget of bytes and a link: `fedspan.tune` without a grid.

     1  plan      the bytes of each setting from packed messages, and so its rounds within the budget
     2  search    the learning rate for that many rounds, once per rank and number of local steps
     3  race      every setting runs for an eighth of its rounds; the better half goes on to a quarter, then to a half
     4  vary      half and twice the local steps of the winner, in the same way

All settings of a stage have spent the same share of the same budget. They are compared by what a search of the learning
rate goes by: the error itself, the validation loss or the training loss, and never by the test set.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fedspan.api.step_size import built
from fedspan.core.building import as_choice
from fedspan.core.errors import SpecError, one_of, shown
from fedspan.core.method import Method
from fedspan.core.spec import Spec, changed
from fedspan.costs.plan import price
from fedspan.study.bar import Bar, progress_of
from fedspan.study.budget import KINDS, Budget
from fedspan.study.proposal import Candidate, Link, Proposal
from fedspan.theory.lr_search import TrialRunner, search

RANKS, BITS = (0.05, 0.1, 0.2, 0.5), (32, 8)
SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the budget that each stage of a race has spent
FEWEST = 8  # rounds below which a setting is not tried


def propose(
    spec: Spec,
    budget: str | Sequence[str] | None,
    link: str | Link | None,
    vary: Mapping[str, Any] | None,
    console: Console,
) -> Proposal:
    """The best rank, bits, local steps and learning rate of the spec's method; `console` shows how far it is."""
    found, grid = Link.parse(link), _grid(spec, vary)
    limits = _limits(budget, found)
    with progress_of("trials", console) as bar:
        return _propose(_Room(spec, limits, found, bar), grid, vary is None)


def _propose(room: _Room, grid: dict[str, list[Any]], more: bool) -> Proposal:
    k = room.method.local_steps
    steps = grid.pop("local_steps", [k])
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    best = room.race(
        [room.candidate(point | {"local_steps": n}) for point in points for n in steps]
    )
    if more:
        near = [
            room.candidate(best.point | {"local_steps": n}) for n in {max(1, k // 2), 2 * k} - {k}
        ]
        best = room.final([best, *near])
    return room.proposal(best)


class _Room:
    """The problem, the budget, and all that was tried."""

    def __init__(self, spec: Spec, limits: tuple[Budget, float], link: Link, bar: Bar) -> None:
        self.budget, self.most = limits
        self.spec, self.link, self.tried, self.spent = spec, link, list[Candidate](), 0
        self.rates: dict[tuple[Any, ...], float] = {}
        self.method, self.problem, self.cohort = built(spec)
        self.metric, self.bar = "", bar

    def candidate(self, point: dict[str, Any]) -> Candidate:
        """A setting with its costs."""
        spec = dataclasses.replace(self.spec, method=_method(self.method, point), epochs=None)
        cost = price(spec)
        each = self.link.seconds(cost.up_round, cost.down_round, spec.method.local_steps)
        rounds = self.affordable(spec)
        rounds = min(rounds, int(self.most / each)) if self.most < math.inf else rounds
        found = Candidate(
            dataclasses.replace(spec, rounds=max(rounds, 1)),
            point,
            cost.up_round,
            cost.down_round,
            0.0,
        )
        found.seconds = found.spec.rounds * each
        found.why = "" if rounds >= FEWEST else f"only {rounds} rounds within the budget"
        self.tried.append(found)
        return found

    def affordable(self, spec: Spec) -> int:
        """Rounds within the bytes of the budget."""
        try:
            return self.budget.rounds(spec) if self.budget.limits else spec.rounds
        except SpecError:  # less than one
            return 0

    def race(self, candidates: list[Candidate]) -> Candidate:
        """The best after the last stage; the worse half is out after each."""
        left = [one for one in candidates if not one.why]
        if not left:
            raise SpecError(
                f"no setting has {FEWEST} rounds within the budget; give a larger one, or lower ranks"
            )
        self.bar.more(
            sum(
                max(min(2, len(left)), math.ceil(len(left) / 2**stage))
                for stage in range(len(SHARES))
            )
        )
        for share in SHARES:
            left = sorted((self.run(one, share) for one in left), key=lambda one: one.value)
            kept = len(left) if share == SHARES[-1] else max(2, math.ceil(len(left) / 2))
            for one in left[kept:]:
                one.why = f"behind at {share:.1%} of the budget".replace(".0%", "%")
            left = left[:kept]
        return self.chosen(left)

    def final(self, candidates: list[Candidate]) -> Candidate:
        """The best at the last stage's share."""
        left = [one for one in candidates if not one.why]
        self.bar.more(sum(one.share != SHARES[-1] for one in left))
        left = [one if one.share == SHARES[-1] else self.run(one, SHARES[-1]) for one in left]
        return self.chosen(sorted(left or candidates[:1], key=lambda one: one.value))

    def chosen(self, ranked: list[Candidate]) -> Candidate:
        """The first, once the others have been told why they are not."""
        for one in ranked[1:]:
            one.why = "behind at 50% of the budget"
        return ranked[0]

    def run(self, one: Candidate, share: float) -> Candidate:
        """A setting for a share of its rounds, at the learning rate that a search finds for it."""
        method, rounds = one.spec.method, max(4, int(share * one.spec.rounds))
        counted = self.spec.participation
        trials = TrialRunner(
            method, self.problem, self.cohort, one.spec.rounds, (), lambda _: None, counted
        )
        self.metric = trials.metric
        self.bar.doing(f"{one.name}: searching lr")
        one.lr = self.rate(one)
        self.bar.doing(f"{one.name}: {share:.1%} of the budget")
        trial = trials(one.lr, min(rounds, one.spec.rounds))
        self.spent += trial.rounds
        one.share, one.value = share, math.inf if trial.diverged else trial.tail
        self.bar.done()
        return one

    def rate(self, one: Candidate) -> float:
        """The learning rate; bits do not change it much, so it is searched once for all of them."""
        key = tuple((name, str(value)) for name, value in one.point.items() if name != "bits")
        if key not in self.rates:
            spec, counted = one.spec, self.spec.participation
            found = search(
                spec.method,
                self.problem,
                self.cohort,
                spec.rounds,
                spec.search,
                participation=counted,
            )
            self.rates[key] = found.lr
            self.spent += found.rounds
        return self.rates[key]

    def proposal(self, best: Candidate) -> Proposal:
        others = sorted(
            (one for one in self.tried if one is not best), key=lambda one: (-one.share, one.value)
        )
        next_best = (
            f"; next {others[0].name} with {others[0].value:.4g}"
            if others and others[0].share
            else ""
        )
        best.why = (
            f"lowest {self.metric} at {best.share:.0%} of the budget: {best.value:.4g}{next_best}"
        )
        method: Any = dataclasses.replace(best.spec.method, lr=best.lr)  # type: ignore[type-var]
        words = [self.budget.words()] if self.budget.limits else []
        words += [f"{self.most:g} s"] if self.most < math.inf else []
        return Proposal(
            method, best.spec.rounds, self.metric, (best, *others), self.spent, " and ".join(words)
        )


def _limits(budget: str | Sequence[str] | None, link: Link) -> tuple[Budget, float]:
    """The budget of bytes or rounds, and that of seconds."""
    texts = [budget] if isinstance(budget, str) else [] if budget is None else budget
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise SpecError(
            f"`budget` must be a text such as 'total=50MB', or a list of such, got {shown(budget)}"
        )
    for text in texts:
        if text.partition("=")[0].strip() not in (*KINDS, "seconds") or "=" not in text:
            raise SpecError(
                f"a budget is written total=50MB, up=10MB, rounds=200 or seconds=3600, got {shown(text)}"
            )
    times = [text for text in texts if text.strip().startswith("seconds")]
    if not texts or (times and link == Link()):
        raise SpecError(
            "`budget` needs bytes such as 'total=50MB'; one of seconds needs a `link` as well"
        )
    parsed = Budget.parse([text for text in texts if text not in times]) or Budget({})
    return parsed, _seconds(times[0]) if times else math.inf


def _seconds(text: str) -> float:
    amount = text.partition("=")[2]
    try:
        found = float(amount)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise SpecError(
            f"a budget of seconds is a positive number such as seconds=3600, got {shown(text)}"
        )
    return found


def _grid(spec: Spec, vary: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """What is varied; by default rank and bits, as far as the method has them."""
    fields = {field.name for field in dataclasses.fields(spec.method)}  # type: ignore[arg-type]
    own = [key for key in ("compressor", "down_compressor") if key in changed(spec.method)]
    known = fields | ({"bits"} if "compressor" in fields and not own else set())
    usual = {key: values for key, values in {"rank": RANKS, "bits": BITS}.items() if key in known}
    if vary is not None and not isinstance(vary, Mapping):
        raise SpecError(
            f"`vary` must be a table such as {{'rank': [0.05, 0.1]}}, got {shown(vary)}"
        )
    if own and "bits" in (vary or ()):
        raise SpecError(
            f"`vary` of 'bits' would replace `{own[0]}` of the method; leave one of them out"
        )
    for key in vary or ():
        one_of("vary", key, sorted(known))
    given = (usual if vary is None else vary).items()
    return {
        key: list(values) if isinstance(values, list | tuple) else [values] for key, values in given
    }


def _method(method: Method, point: Mapping[str, Any]) -> Any:
    """The method with the settings of a point; `bits` stands for compressors in both directions."""
    own = {key: value for key, value in point.items() if key != "bits"}
    bits = point.get("bits", 32)
    if bits != 32:
        levels = 2 ** (_whole(bits) - 1) - 1
        code = as_choice(
            "compressor",
            {"name": "qsgd", "levels": levels, "bucket": min(2048, max(1, levels**2 // 2))},
        )
        fields = {field.name for field in dataclasses.fields(method)}  # type: ignore[arg-type]
        own |= {key: code for key in ("compressor", "down_compressor") if key in fields}
    return dataclasses.replace(method, **own)  # type: ignore[type-var]


def _whole(bits: Any) -> int:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 3 <= bits <= 16:
        raise SpecError(f"`bits` must be 32, or a whole number from 3 to 16, got {shown(bits)}")
    return bits


def varied(texts: Sequence[str] | None) -> dict[str, list[Any]] | None:
    """From texts such as `rank=0.05,0.1`; None if there are none."""
    found: dict[str, list[Any]] = {}
    for text in texts or ():
        key, _, values = text.partition("=")
        try:
            found[key] = [json.loads(value) for value in values.split(",")]
        except json.JSONDecodeError:
            raise SpecError(
                f"values are written key=1,2,3, as in rank=0.05,0.1, got {shown(text)}"
            ) from None
    return found or None
