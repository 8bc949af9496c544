"""Rank, bits, local steps and learning rate for a budget of bytes and a link: `fedspan.tune` without a grid.

     1  plan      the bytes of each setting from packed messages, and so its rounds within the budget
     2  search    the learning rate of each setting for that many rounds, with the codes that it will run with
     3  tune      all settings are one grid, run for half of the budget, of which the tuner drops what is far behind
     4  vary      half and twice the local steps of the best one, in the same way

Settings are compared by what a search of the learning rate goes by: the error itself, the validation loss or the
training loss, and never by the test set.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedspan.api.fit import as_method
from fedspan.api.step_size import TRAINING_LOSS, built, search
from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.core.errors import SpecError, one_of, shown
from fedspan.core.extras import data_frame
from fedspan.core.method import Method
from fedspan.core.spec import Spec, with_values
from fedspan.core.tables import describe
from fedspan.core.terminal import plain
from fedspan.study.budget import Budget, Link
from fedspan.study.conduct import make_runs
from fedspan.study.curves import Table
from fedspan.study.model import Part, Study, Variant, objects_of, settings
from fedspan.study.request import values_of

if TYPE_CHECKING:
    from fedspan.study.compare import Comparison

WIDTH = 80  # columns of a terminal, in which no word is to be broken
RANKS, BITS = (0.05, 0.1, 0.2, 0.5), (32, 8)
FEWEST = 8  # rounds below which a setting is not tried
EVALUATIONS = 16  # of the shortest run
SHARE = 0.5  # of the budget for which settings are run, but where the length of a run decides its numbers


@dataclass(frozen=True, eq=False)
class Tuned:
    """What `fedspan.tune` returns.

    Attributes:
        method: The method with the best settings and learning rate.
        rounds: The rounds of a run with it; of a proposal, those that the budget allows.
        metric: What the settings were compared by.
        rows: One dictionary per setting that was tried. Of a proposal the chosen one is first, and `why` says what
            became of each.
        reason: Why this one was chosen, in words.
        comparison: The runs behind a grid; None for a proposal.
    """

    method: Method
    rounds: int
    metric: str
    rows: list[dict[str, Any]]
    reason: str
    comparison: Comparison | None = None

    def to_pandas(self) -> Any:
        """`rows` as a pandas DataFrame."""
        return data_frame(self.rows)

    def summary(self) -> str:
        """The choice and its reason in a few lines."""
        return plain("\n".join(textwrap.fill(line, WIDTH) for line in self.reason.splitlines()))

    def __repr__(self) -> str:
        return f"Tuned({self.method})\n{self.summary()}"


def propose(
    spec: Spec,
    budget: str | Sequence[str] | None,
    link: str | Link | None,
    vary: Mapping[str, Any] | None,
    console: Console,
) -> Tuned:
    """The best rank, bits, local steps and learning rate of the spec's method; `console` shows how far it is."""
    limits = Budget.parse(budget, Link.parse(link))
    if limits is None:
        raise SpecError("`budget` is empty; give one such as 'total=50MB'")
    grid = _grid(spec, vary)
    method, problem, cohort = built(spec)
    spec = dataclasses.replace(spec, method=method, epochs=None)
    rows, tries = list[Table](), list[Spec]()
    metric = ""

    def planned(point: Table) -> None:
        """A setting with its costs, its rounds and its learning rate, if it has enough rounds."""
        nonlocal metric
        setting = dataclasses.replace(spec, method=_method(method, point))
        up, down, seconds = limits.per_round(setting)
        try:
            rounds = limits.rounds(setting)
        except SpecError:  # less than one
            rounds = 0
        lr, why = math.nan, f"only {rounds} rounds within the budget"
        if rounds >= FEWEST:
            how = spec.search, spec.participation
            found = search(setting.method, problem, cohort, rounds, *how)
            lr, metric, why = found.lr, found.metric, ""
            tried: Any = dataclasses.replace(setting.method, lr=lr)  # type: ignore[type-var]
            setting = dataclasses.replace(setting, method=tried, rounds=rounds)
        costs = {"up_bytes_round": up, "down_bytes_round": down, "seconds": rounds * seconds}
        rows.append({**point, "lr": lr, "rounds": rounds, **costs, "share": 0.0, "why": why})
        tries.append(setting)

    def best_of(numbers: list[int]) -> int:
        """The tuner's choice; the others are told why they are not chosen."""
        some = [tries[n] for n in numbers]
        share = 1.0 if any(one.length_decides for one in some) else SHARE
        shortest = int(share * min(one.rounds for one in some))
        every = min(spec.eval_every, max(1, shortest // EVALUATIONS))
        base = dataclasses.replace(spec, metrics=(), eval_every=every)
        methods = [describe(one.method) for one in some]
        name = TRAIN_LOSS if metric == TRAINING_LOSS else metric
        part_of_it = {axis: share * most for axis, most in limits.limits.items()}
        part = Part(
            name="comparison",
            base=base.table(),
            variants=[Variant("settings", "settings", "", {}, {"method": methods})],
            seeds=1,
            metric=name,
            goal="min",
            tune_by=name,
            tail=0.2,
            budget=Budget(part_of_it, limits.link, share * limits.seconds),
            objects=objects_of(base),
        )
        study = Study("comparison", [part])
        (cell,) = make_runs(study, Path(place), jobs=1, console=console).cells
        ends = [(one.end, one.rounds, one.dropped) for one in cell.tried]
        for n, (end, rounds, dropped) in zip(
            numbers, ends or [(part.result(cell.curve), 0, False)], strict=True
        ):
            row = rows[n]
            row["share"] = rounds / tries[n].rounds if dropped else share
            row["why"] = f"behind at {row['share']:.0%} of the budget"
            row[metric] = end.mean if end.whole else math.inf
        return numbers[methods.index(cell.point["method"])]

    k = method.local_steps
    steps = grid.pop("local_steps", [k])
    for values in itertools.product(*grid.values(), steps):
        planned(dict(zip([*grid, "local_steps"], values, strict=True)))
    left = [n for n, row in enumerate(rows) if not row["why"]]
    if not left:
        raise SpecError(
            f"no setting has {FEWEST} rounds within the budget; give a larger one, or lower ranks"
        )
    with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
        number = best_of(left)
        if vary is None:
            for n in {max(1, k // 2), 2 * k} - {k}:
                planned(_point(rows[number]) | {"local_steps": n})
            number = best_of([number, *(n for n, row in enumerate(rows) if not row["why"])])
    best, others = rows[number], rows[:number] + rows[number + 1 :]
    for row in others:
        row.setdefault(metric, math.inf)
    others.sort(key=lambda row: (-row["share"], row[metric]))
    best["why"] = f"lowest {metric} at {best['share']:.0%} of the budget: {best[metric]:.4g}"
    if others and others[0]["share"]:
        best["why"] += f"; next {settings(_point(others[0]))} with {others[0][metric]:.4g}"
    time = f", {best['seconds']:.3g} s over the link" if best["seconds"] else ""
    reason = (
        f"{settings(_point(best))}, lr {best['lr']:.3g}: {best['rounds']} rounds within {limits.words()}{time}\n"
        f"{best['why']} ({len(rows)} settings)"
    )
    return Tuned(tries[number].method, best["rounds"], metric, [best, *others], reason)


def _point(row: Table) -> Table:
    """The settings of a row, which come before their learning rate."""
    return dict(itertools.takewhile(lambda pair: pair[0] != "lr", row.items()))


def _grid(spec: Spec, vary: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """What is varied; by default rank, and bits where what a code leaves out is remembered or already coded."""
    method: Any = spec.method
    fields = {field.name: field.default for field in dataclasses.fields(method)}
    axes = [key for key in ("uplink", "downlink") if key in fields]
    codes = [
        [getattr(axis, "compressor", None) for axis in (getattr(method, key), fields[key])]
        for key in axes
    ]
    coded = bool(axes) and all(own == usual for own, usual in codes)  # its own codes are kept
    known = {*fields, *["bits"] * coded}
    if vary is None:
        found = {"rank": list(RANKS)} if "rank" in known else {}
        if coded and (_remembers(method.uplink) or (method.controls and method.downlink.logs)):
            found["bits"] = list(BITS)
        return found
    if not isinstance(vary, Mapping):
        raise SpecError(
            f"`vary` must be a table such as {{'rank': [0.05, 0.1]}}, got {shown(vary)}"
        )
    for key in vary:
        one_of("vary", str(key).partition(".")[0], known)
    return {key: values_of("vary", key, values) for key, values in vary.items()}


def _method(method: Method, point: Table) -> Any:
    """The method with the settings of a point; `bits` stands for a code in both directions, but of x in full."""
    own = dict(point)
    bits = own.pop("bits", 32)
    if bits != 32:
        if type(bits) is not int or not 3 <= bits <= 16:
            raise SpecError(f"`bits` must be 32, or a whole number from 3 to 16, got {shown(bits)}")
        bucket = min(2048, max(1, (2 ** (bits - 1) - 1) ** 2 // 2))
        code = {"name": "qsgd", "bits": bits, "bucket": bucket}
        for key in ("uplink", "downlink"):
            axis: Any = getattr(method, key)
            if getattr(axis, "logs", True):
                own[key] = describe(axis) | {"compressor": code} if _remembers(axis) else code
    return as_method(with_values(describe(method), own))


def _remembers(axis: Any) -> bool:
    """Return whether a choice has a code of its own, and treats what it leaves out."""
    return any(field.name == "compressor" for field in dataclasses.fields(axis))


def method_table(found: Tuned) -> Table:
    """The method for a spec: what differs from its defaults, and every setting that was chosen, also as a default."""
    point, whole = _point(found.rows[0]), describe(found.method)
    coded = ("uplink", "downlink") if point.pop("bits", None) is not None else ()
    table = describe(found.method, changed=True) | {key: whole[key] for key in coded}
    return with_values(table, point)
