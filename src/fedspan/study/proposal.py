"""Rank, bits, local steps and learning rate for a budget of bytes and a link: `fedspan.tune` without a grid.

     1  plan      the bytes of each setting from packed messages, and so its rounds within the budget
     2  search    the learning rate for that many rounds, once per rank and number of local steps
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

from fedspan.api.step_size import built
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
from fedspan.study.model import Part, Study, Variant, with_settings
from fedspan.study.request import values_of
from fedspan.theory.lr_search import TRAINING_LOSS, search

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
    rates: dict[str, float] = {}  # of settings that differ in more than their bits
    spent, metric = 0, ""

    def planned(point: Mapping[str, Any]) -> tuple[Table, Spec]:
        """A setting with its costs and its rounds."""
        setting = dataclasses.replace(spec, method=_method(method, point))
        up, down, seconds = limits.per_round(setting)
        try:
            rounds = limits.rounds(setting)
        except SpecError:  # less than one
            rounds = 0
        why = "" if rounds >= FEWEST else f"only {rounds} rounds within the budget"
        row = {
            **point,
            "lr": math.nan,
            "rounds": rounds,
            "up_bytes_round": up,
            "down_bytes_round": down,
            "seconds": rounds * seconds,
            "share": 0.0,
            "why": why,
        }
        return row, dataclasses.replace(setting, rounds=max(rounds, 1))

    def searched(row: Table, setting: Spec) -> Any:
        """The method of a setting with its learning rate; bits do not change it much, so that all share it."""
        nonlocal spent, metric
        key = str(_point(row) | {"bits": None})
        if key not in rates:
            found = search(
                setting.method,
                problem,
                cohort,
                setting.rounds,
                spec.search,
                participation=spec.participation,
            )
            rates[key], metric = found.lr, found.metric
            spent += found.rounds
        row["lr"] = rates[key]
        return dataclasses.replace(setting.method, lr=rates[key])  # type: ignore[type-var]

    def best_of(settings: list[tuple[Table, Spec]], place: Path) -> tuple[Table, Spec]:
        """The tuner's choice; the others are told why they are not chosen."""
        nonlocal spent
        left = [one for one in settings if not one[0]["why"]]
        if not left:
            raise SpecError(
                f"no setting has {FEWEST} rounds within the budget; give a larger one, or lower ranks"
            )
        methods = [searched(*one) for one in left]
        name = TRAIN_LOSS if metric == TRAINING_LOSS else metric
        share = 1.0 if any(setting.length_decides for _, setting in left) else SHARE
        part_of = {axis: share * most for axis, most in limits.limits.items()}
        trial = Budget(part_of, limits.link, share * limits.seconds)
        shortest = min(share * setting.rounds for _, setting in left)
        base = dataclasses.replace(
            spec, metrics=(), eval_every=min(spec.eval_every, max(1, int(shortest) // EVALUATIONS))
        )
        variant = Variant("settings", "settings", "", {}, {"method": methods}, method)
        part = Part(
            name="comparison",
            base={},
            variants=[variant],
            seeds=1,
            metric=name,
            goal="min",
            tune_by=name,
            tail=0.2,
            budget=trial,
            given=base,
        )
        runs = make_runs(Study("comparison", [part]), place, jobs=1, console=console)
        (cell,) = runs.cells
        tried = cell.tried
        chosen = cell.point["method"]
        best = methods.index(chosen)
        for (row, setting), one in zip(left, tried, strict=False):
            spent += 0 if row["share"] else one.rounds  # the best of before is not run again
            row["share"] = one.rounds / setting.rounds if one.dropped else share
            row["why"] = f"behind at {row['share']:.0%} of the budget"
            row[metric] = one.end.mean if one.end.whole else math.inf
        row = left[best][0]
        if not tried:
            row["share"], row[metric] = share, part.result(cell.curve).mean
            spent += cell.running()[0].spec.rounds
        row["why"] = ""
        return left[best]

    steps = grid.pop("local_steps", [method.local_steps])
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    settings = [planned(point | {"local_steps": n}) for point in points for n in steps]
    with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
        best, setting = best_of(settings, Path(place))
        if vary is None:
            k = method.local_steps
            near = [
                planned(_point(best) | {"local_steps": n}) for n in {max(1, k // 2), 2 * k} - {k}
            ]
            settings += near
            best, setting = best_of([(best, setting), *near], Path(place))
    others = [row for row, _ in settings if row is not best]
    others.sort(key=lambda row: (-row["share"], row.get(metric, math.inf)))
    why = f"lowest {metric} at {best['share']:.0%} of the budget: {best[metric]:.4g}"
    if others and others[0]["share"]:
        why += f"; next {named(others[0])} with {others[0][metric]:.4g}"
    best["why"] = why
    rows = [row | {metric: row.get(metric, math.inf)} for row in (best, *others)]
    time = f", {best['seconds']:.3g} s over the link" if best["seconds"] else ""
    reason = (
        f"{named(best)}, lr {best['lr']:.3g}: {best['rounds']} rounds within {limits.words()}{time}\n"
        f"{why} ({len(rows)} settings, {spent} rounds of trials)"
    )
    chosen: Any = dataclasses.replace(setting.method, lr=best["lr"])  # type: ignore[type-var]
    return Tuned(chosen, best["rounds"], metric, rows, reason)


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
    own = [key for key in axes if _code(getattr(method, key)) != _code(fields[key])]
    known = fields.keys() | ({"bits"} if axes and not own else set())
    if vary is None:
        unasked = {"rank"}
        if axes and (_takes_code(method.uplink) or (method.controls and method.downlink.logs)):
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
                own[key] = dataclasses.replace(axis, compressor=code) if _takes_code(axis) else code
    return with_settings(method, own)


def _takes_code(axis: Any) -> bool:
    return any(field.name == "compressor" for field in dataclasses.fields(axis))


def _code(axis: Any) -> Any:
    return axis.compressor if _takes_code(axis) else None


def method_table(found: Tuned) -> dict[str, Any]:
    """The method for a spec: what differs from its defaults, and every setting that was chosen, also as a default."""
    chosen = {key: value for key, value in _point(found.rows[0]).items() if key != "bits"}
    table = describe(found.method)
    codes = {
        key: table[key]
        for key in ("uplink", "downlink")
        if "bits" in _point(found.rows[0]) and key in table
    }
    return with_values(describe(found.method, changed=True) | codes, chosen)
