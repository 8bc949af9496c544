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
from fedspan.core.tables import build, describe
from fedspan.core.terminal import plain
from fedspan.study.budget import Budget, Link
from fedspan.study.conduct import make_runs
from fedspan.study.curves import Table
from fedspan.study.model import Part, Study, Variant, objects_of
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
    rows, settings = list[Table](), list[Spec]()
    spent, metric = 0, ""

    def planned(point: Mapping[str, Any]) -> None:
        """A setting with its costs, its rounds and its learning rate, if it has enough rounds."""
        nonlocal spent, metric
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
            spent += found.rounds
            tried: Any = dataclasses.replace(setting.method, lr=lr)  # type: ignore[type-var]
            setting = dataclasses.replace(setting, method=tried, rounds=rounds)
        costs = {"up_bytes_round": up, "down_bytes_round": down, "seconds": rounds * seconds}
        rows.append({**point, "lr": lr, "rounds": rounds, **costs, "share": 0.0, "why": why})
        settings.append(setting)

    def best_of(numbers: list[int], place: Path) -> int:
        """The tuner's choice; the others are told why they are not chosen."""
        nonlocal spent
        some = [settings[n] for n in numbers]
        share = 1.0 if any(setting.length_decides for setting in some) else SHARE
        part_of_it = {axis: share * most for axis, most in limits.limits.items()}
        shortest = int(min(share * setting.rounds for setting in some))
        every = min(spec.eval_every, max(1, shortest // EVALUATIONS))
        base = dataclasses.replace(spec, metrics=(), eval_every=every)
        methods = [describe(setting.method) for setting in some]
        name = TRAIN_LOSS if metric == TRAINING_LOSS else metric
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
        runs = make_runs(Study("comparison", [part]), place, jobs=1, console=console)
        (cell,) = runs.cells
        chosen = numbers[methods.index(cell.point["method"])]
        for n, one in zip(numbers, cell.tried, strict=False):
            row = rows[n]
            spent += 0 if row["share"] else one.rounds  # the best of before is not run again
            row["share"] = one.rounds / settings[n].rounds if one.dropped else share
            row["why"] = f"behind at {row['share']:.0%} of the budget"
            row[metric] = one.end.mean if one.end.whole else math.inf
        if not cell.tried:
            rows[chosen] |= {"share": share, metric: part.result(cell.curve).mean}
            spent += cell.running()[0].spec.rounds
        return chosen

    k = method.local_steps
    steps = grid.pop("local_steps", [k])
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for point, n in itertools.product(points, steps):
        planned(point | {"local_steps": n})
    left = [n for n, row in enumerate(rows) if not row["why"]]
    if not left:
        raise SpecError(
            f"no setting has {FEWEST} rounds within the budget; give a larger one, or lower ranks"
        )
    with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
        number = best_of(left, Path(place))
        if vary is None:
            before = len(rows)
            for n in {max(1, k // 2), 2 * k} - {k}:
                planned(_point(rows[number]) | {"local_steps": n})
            near = [n for n in range(before, len(rows)) if not rows[n]["why"]]
            number = best_of([number, *near], Path(place))
    best = rows.pop(number)
    rows.sort(key=lambda row: (-row["share"], row.get(metric, math.inf)))
    why = f"lowest {metric} at {best['share']:.0%} of the budget: {best[metric]:.4g}"
    if rows and rows[0]["share"]:
        why += f"; next {named(rows[0])} with {rows[0][metric]:.4g}"
    best["why"] = why
    rows = [row | {metric: row.get(metric, math.inf)} for row in (best, *rows)]
    time = f", {best['seconds']:.3g} s over the link" if best["seconds"] else ""
    reason = (
        f"{named(best)}, lr {best['lr']:.3g}: {best['rounds']} rounds within {limits.words()}{time}\n"
        f"{why} ({len(rows)} settings, {spent} rounds of trials)"
    )
    return Tuned(settings[number].method, best["rounds"], metric, rows, reason)


def named(row: Mapping[str, Any]) -> str:
    """A setting in words, such as: rank 0.1, 8 bits, 10 local steps."""
    words = {"rank": "rank {}", "bits": "{} bits", "local_steps": "{} local steps"}
    return ", ".join(words.get(k, k + " {}").format(v) for k, v in _point(row).items())


def _point(row: Mapping[str, Any]) -> Table:
    """The settings of a row, which come before their learning rate."""
    return {key: row[key] for key in list(row)[: list(row).index("lr")]}


def _grid(spec: Spec, vary: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """What is varied; by default rank, and bits where what a code leaves out is remembered or already coded."""
    method: Any = spec.method
    fields = {field.name: field.default for field in dataclasses.fields(method)}
    axes = [key for key in ("uplink", "downlink") if key in fields]
    codes = {key: getattr(getattr(method, key), "compressor", None) for key in axes}
    own = [key for key in axes if codes[key] != getattr(fields[key], "compressor", None)]
    known = fields.keys() | ({"bits"} if axes and not own else set())
    if vary is None:
        unasked = {"rank"}
        if axes and (_remembers(method.uplink) or (method.controls and method.downlink.logs)):
            unasked.add("bits")
        usual = {"rank": RANKS, "bits": BITS}
        return {key: list(values) for key, values in usual.items() if key in known & unasked}
    if not isinstance(vary, Mapping):
        raise SpecError(
            f"`vary` must be a table such as {{'rank': [0.05, 0.1]}}, got {shown(vary)}"
        )
    if own and "bits" in vary:
        raise SpecError(
            f"`vary` of 'bits' would replace `{own[0]}` of the method; leave one of them out"
        )
    for key in vary:
        one_of("vary", key.partition(".")[0] if isinstance(key, str) else key, sorted(known))
    return {key: values_of("vary", key, values) for key, values in vary.items()}


def _method(method: Method, point: Mapping[str, Any]) -> Any:
    """The method with the settings of a point; `bits` stands for a code in both directions, but of x in full."""
    own = {key: value for key, value in point.items() if key != "bits"}
    bits = point.get("bits", 32)
    if bits != 32:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 3 <= bits <= 16:
            raise SpecError(f"`bits` must be 32, or a whole number from 3 to 16, got {shown(bits)}")
        bucket = min(2048, max(1, (2 ** (bits - 1) - 1) ** 2 // 2))
        code = build("compressor", {"name": "qsgd", "bits": bits, "bucket": bucket})
        for key in ("uplink", "downlink"):
            axis: Any = getattr(method, key)
            if getattr(axis, "logs", True):
                own[key] = dataclasses.replace(axis, compressor=code) if _remembers(axis) else code
    plain = {key: describe(value) for key, value in own.items()}
    return as_method(with_values(describe(method), plain))


def _remembers(axis: Any) -> bool:
    """Return whether a choice has a code of its own, and treats what it leaves out."""
    return any(field.name == "compressor" for field in dataclasses.fields(axis))


def method_table(found: Tuned) -> dict[str, Any]:
    """The method for a spec: what differs from its defaults, and every setting that was chosen, also as a default."""
    point = _point(found.rows[0])
    table = describe(found.method, changed=True)
    if point.pop("bits", None) is not None:
        whole = describe(found.method)
        table |= {key: whole[key] for key in ("uplink", "downlink") if key in whole}
    return with_values(table, point)
