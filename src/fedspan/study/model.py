"""What a study is: parts, each a comparison of variants under the same seeds, which may be repeated over rows.

    study    a title and parts
    part     a base spec, variants of it with a grid each, seeds, a metric, and rows
    row      values for the `$names` in base and variants; a part without rows has one empty row
    point    one combination of a variant's grid

`fedspan.study.parse` reads a study from TOML and writes it; a plain comparison is a study with one part and one row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.callbacks.training_loss import TrainingLoss
from fedspan.core.errors import (
    SpecError,
    at_least,
    at_most,
    did_you_mean,
    not_negative,
    number,
    one_of,
)
from fedspan.core.method import Method
from fedspan.core.spec import Spec, with_values
from fedspan.engine.history import HELD_OUT, sign_of
from fedspan.study.budget import Budget

Table = dict[str, Any]
Point = dict[str, Any]  # dotted key of a spec → value
Goal = Literal["max", "min"]
# Okabe and Ito's colors, which color-blind readers can tell apart; without yellow, which is too faint for a line.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#D55E00", "#56B4E9")
# Top-level keys of a spec that a variant may change.
CHANGEABLE = tuple(
    f.name for f in dataclasses.fields(Spec) if f.name not in ("rounds", "seed", "eval_every")
)


NAMES = {  # what metrics are called in words, where their own name is none
    "loss": "test loss", "training_loss": "training loss", "rel_err": "relative error", "auroc": "AUROC",
    "c_index": "concordance index", "f1": "F1", "f1_macro": "macro F1", "mae": "mean absolute error",
    "mse": "mean squared error", "r2": "R²", "token_accuracy": "token accuracy",
    "average_precision": "average precision",
    "correction": "correction on", "correction_test": "test of the correction",
}  # fmt: skip


def name_of(metric: str) -> str:
    """A metric in words."""
    plain = metric.removeprefix("validation_")
    name = NAMES.get(plain, plain) if plain == metric or plain != "loss" else "loss"
    return name if plain == metric else f"validation {name}"


def in_percent(metric: str) -> bool:
    """Whether a metric is shown in percent."""
    return metric.removeprefix("validation_") in ("accuracy", "token_accuracy")


def goal_of(metric: str, given: Sequence[Any] = (), option: str = "goal") -> Goal:
    """Whether more or less of a metric is better, as it says; `given` and `option` are those of `sign_of`."""
    return "max" if sign_of(metric, given, option=option) > 0 else "min"


@dataclass(frozen=True)
class Variant:
    """One line of a comparison: a method with its settings, and the values it is tuned over."""

    name: str
    label: str
    color: str
    table: Table  # laid over the base spec
    grid: dict[str, list[Any]]  # dotted key → values
    method: Method[Any, Any, Any, Any] | None = (
        None  # the method as an object, in a part with a `given` spec
    )

    def points(self) -> list[Point]:
        """Every combination of the grid."""
        return [
            dict(zip(self.grid, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]


@dataclass(frozen=True)
class Row:
    """One repetition of a part's comparison."""

    values: Table = field(default_factory=dict)  # name → what `$name` stands for
    published: dict[str, Any] = field(
        default_factory=dict
    )  # variant → number, "nan", point, or [final, best]
    target: float | None = None  # a level of the metric whose cost is shown instead of the result
    variants: list[str] | None = None  # those that take part; None: all

    @property
    def label(self) -> str:
        """The row's values in words."""
        return ", ".join(setting(key, value) for key, value in self.values.items())


@dataclass(frozen=True, kw_only=True)
class Part:
    """Variants on one task under the same seeds, in every row."""

    name: str
    base: Table  # a spec
    variants: list[Variant]
    title: str = ""
    about: str = ""
    rows: list[Row] = field(default_factory=lambda: [Row()])
    set: Table = field(default_factory=dict)  # dotted key → value, for every variant
    seeds: int = 3
    tune_seeds: int | Literal["all"] = 1  # seeds that decide the tuning
    tune_rounds: int | None = None  # None: as long as the runs themselves
    tune_by: str = ""  # the metric that decides the tuning; empty: `metric`
    metric: str = "accuracy"
    goal: Goal = "max"
    tail: float = (
        1  # last evaluations whose mean is the result; below 1: as a share of all evaluations
    )
    budget: Budget | None = None  # None: all variants run for the base's rounds
    claims: list[list[str]] = field(default_factory=list)  # variants in a claimed order, best first
    within: float = 0.0  # a result this close to the published number, relative to it, reproduces it; 0: not judged
    tuned_in: str = (
        ""  # "part.variant" whose chosen point every variant takes, in the row with the same values
    )
    figure: Table = field(
        default_factory=dict
    )  # x: axes or a grid's key; rows: numbers of the rows to draw
    given: Spec | None = (
        None  # the base as an object, in place of its table; set by `fedspan.compare`
    )

    def __post_init__(self) -> None:
        at_least("seeds", self.seeds, 1)
        at_most("seeds", self.seeds, 10_000)
        if not isinstance(self.tune_seeds, str) or self.tune_seeds != "all":
            at_least("tune_seeds", self.tune_seeds, 1)
            at_most("tune_seeds", self.tune_seeds, 10_000)
        if self.tune_rounds is not None:
            at_least("tune_rounds", self.tune_rounds, 1)
        if not 0 < number("tail", self.tail) < 1:
            at_least("tail", self.tail, 1)
            at_most("tail", self.tail, 10**9)
        not_negative("within", self.within)
        one_of("goal", self.goal, ("max", "min"))
        if not self.variants:
            raise SpecError(f"comparison {self.name!r} has no variants")

    def variant(self, name: str) -> Variant:
        one_of("variant", name, [variant.name for variant in self.variants])
        return next(variant for variant in self.variants if variant.name == name)

    def cells(self) -> list[tuple[Row, Variant]]:
        """Every row with every variant that takes part in it."""
        return [
            (r, v)
            for r in self.rows
            for v in self.variants
            if r.variants is None or v.name in r.variants
        ]

    def spec(
        self, variant: Variant, point: Point, row: Row | None = None, rounds: int | None = None
    ) -> Spec:
        """The spec of one point of a variant's grid; by default it is as long as the budget allows."""
        if self.given is None:
            table = with_values(laid_over(self.base, variant.table), self.set | point)
            spec = Spec.from_table(filled(table, (row or self.rows[0]).values))
        else:
            spec = with_settings(self.given, {"method": variant.method} | point)
        if self.tune_by == TRAIN_LOSS:
            spec = dataclasses.replace(spec, callbacks=(*spec.callbacks, TrainingLoss()))
        if rounds is None and self.budget is not None:
            rounds = self.budget.rounds(spec)
        return spec if rounds is None else dataclasses.replace(spec, rounds=rounds)

    def tuning_spec(self, variant: Variant, point: Point, row: Row) -> Spec:
        """The same, as long as a run of the tuning."""
        spec = self.spec(variant, point, row)
        return (
            spec
            if self.tune_rounds is None
            else dataclasses.replace(spec, rounds=min(self.tune_rounds, spec.rounds))
        )

    @property
    def tune_metric(self) -> str:
        """The metric that decides the tuning."""
        return self.tune_by or self.metric

    @property
    def tune_goal(self) -> Goal:
        """Whether more or less of it is better."""
        held_out = self.tune_metric.removeprefix(HELD_OUT) == self.metric.removeprefix(HELD_OUT)
        return self.goal if held_out else goal_of(self.tune_metric, self.metrics)

    @property
    def metrics(self) -> Sequence[Any]:
        """The metrics of the base, as a user gives them or as its table has them."""
        return self.base.get("metrics", ()) if self.given is None else self.given.metrics

    @property
    def tuning_seeds(self) -> int:
        """How many of the seeds decide the tuning."""
        return self.seeds if self.tune_seeds == "all" else min(self.tune_seeds, self.seeds)

    def last(self, evaluations: int) -> int:
        """How many of the last evaluations make up a result."""
        return max(
            1, min(evaluations, int(self.tail if self.tail >= 1 else evaluations * self.tail))
        )


@dataclass(frozen=True)
class Study:
    """Parts that share their runs."""

    name: str
    parts: list[Part]
    title: str = ""
    about: str = ""

    def part(self, name: str) -> Part:
        one_of("part", name, [part.name for part in self.parts])
        return next(part for part in self.parts if part.name == name)


def laid_over(table: Table, changes: Mapping[str, Any]) -> Table:
    """The table with changes laid over it, nested tables as well; a table that has a `name` replaces the other."""
    out = dict(table)
    for key, value in changes.items():
        old = out.get(key)
        merge = isinstance(old, dict) and isinstance(value, dict) and "name" not in value
        out[key] = laid_over(old, value) if merge and isinstance(old, dict) else value
    return out


def with_settings(value: Any, settings: Mapping[str, Any]) -> Any:
    """A dataclass with values at dotted keys, such as `method.projector.rank`."""
    changes: Table = {}
    nested: dict[str, Table] = {}
    for path, inner in settings.items():
        key, _, rest = path.partition(".")
        fields = (
            [one.name for one in dataclasses.fields(value)]
            if dataclasses.is_dataclass(value)
            else []
        )
        if key not in fields:
            known = f"{did_you_mean(key, fields)}; it has {', '.join(fields)}" if fields else ""
            raise SpecError(f"{type(value).__name__} has no setting {key!r}{known}")
        if rest:
            nested.setdefault(key, {})[rest] = inner
        else:
            changes[key] = inner
    for key, more in nested.items():
        changes[key] = with_settings(changes.get(key, getattr(value, key)), more)
    return dataclasses.replace(value, **changes)


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """A table in which every `$name` is replaced by the value of that name."""
    if isinstance(value, dict):
        return {key: filled(inner, names) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith("$"):
        one_of("name of a row's value", value[1:], names)
        return names[value[1:]]
    return value


def setting(key: str, value: Any) -> str:
    """method.projector.rank = 20 → rank 20; a name stands for itself."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    last = key.rpartition(".")[2]
    return text if last == "name" else f"{last} {text}"


def settings(point: Mapping[str, Any]) -> str:
    """A point in words."""
    return ", ".join(setting(key, value) for key, value in point.items())
