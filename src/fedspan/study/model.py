"""What a study is, and how it is read from TOML and written.

    study    a title and parts
    part     a base spec, variants of it with a grid each, seeds, a metric, and rows
    row      a case: values for the `$names` in base and variants; a part without rows has one case without values
    point    one combination of a variant's grid

A plain comparison is a study with one part and one case. As TOML, settings have four levels, each laid over the one
before: study, part, scale, part of a scale.

    title = "…"                               # all keys but base and variants have defaults
    seeds = 3                                 # a setting of every part
    scale = "laptop"                          # the default of --scale
    [base]                                    # a spec
    [variants.ssf]                            # tables laid over the base
    label = "SSF"
    method = { rank = 0.1 }
    grid = { "method.lr" = [0.1, 0.3, 1.0] }
    [parts.rank]                              # without parts, the study is one comparison of all variants
    variants = ["ssf", "small"]               # names from above and of its own
    own.small = { method = { rank = 0.05 } }
    grid = { "method.lr" = [0.1, 0.3] }       # replaces the variants' own values
    rows = [{ het = 0.1 }, { het = 2.0 }]     # `$het` in base, variants and `set` stands for the row's value
    [scales.smoke]                            # changes to every part; parts.NAME to one
    points = 1                                # values kept of the middle of every grid
    base = { rounds = 2 }
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.callbacks.training_loss import TrainingLoss
from fedspan.core import tables
from fedspan.core.errors import (
    SpecError,
    at_least,
    at_most,
    not_negative,
    number,
    one_of,
    shown,
)
from fedspan.core.plugins import load_plugin
from fedspan.core.spec import Spec, read_toml, with_values
from fedspan.engine.history import HELD_OUT, sign_of
from fedspan.study.budget import Budget
from fedspan.study.curves import Goal, Series, Table, Tail, setting

SPECS = Path(__file__).parent / "specs"
Point = dict[str, Any]  # dotted key of a spec → value
Distance = Literal["relative", "absolute", "decades"]
# Okabe and Ito's colors, which color-blind readers can tell apart; without yellow, which is too faint for a line.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000", "#D55E00", "#56B4E9")
# Top-level keys of a spec that a variant may change.
CHANGEABLE = {one.name for one in dataclasses.fields(Spec)} - {"rounds", "seed", "eval_every"}


@dataclass(frozen=True)
class Variant:
    """One line of a comparison: a method with its settings, and the values it is tuned over."""

    name: str
    label: str
    color: str
    table: Table  # laid over the base spec
    grid: dict[str, list[Any]]  # dotted key → values

    def points(self) -> list[Point]:
        """Every combination of the grid."""
        every = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values, strict=True)) for values in every]


@dataclass(frozen=True)
class Case:
    """One repetition of a part's comparison: a row of its table."""

    values: Table = field(default_factory=dict)  # name → what `$name` stands for
    published: Table = field(
        default_factory=dict
    )  # variant → number, "0.73 ± 0.15", "nan", point, [final, best]
    target: float | None = None  # a level of the metric whose cost is shown instead of the result
    variants: list[str] | None = None  # those that take part; None: all

    @property
    def label(self) -> str:
        """The values in words."""
        return settings(self.values)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Variants on one task under the same seeds, in every case."""

    name: str
    base: Table  # a spec
    variants: list[Variant]
    title: str = ""
    about: str = ""
    rows: list[Case] = field(default_factory=lambda: [Case()])
    set: Table = field(default_factory=dict)  # dotted key → value, for every variant
    seeds: int = 3
    tune_seeds: int | Literal["all"] = 1  # seeds that decide the tuning
    tune_rounds: int | None = None  # None: as long as the runs themselves
    tune_by: str = ""  # the metric that decides the tuning; empty: `metric`
    metric: str = "accuracy"
    goal: Goal = "max"
    tail: float = 1  # last evaluations whose mean is the result; below 1: as a share of them
    budget: Budget | None = None  # None: all variants run for the base's rounds
    claims: list[list[str]] = field(default_factory=list)  # variants in a claimed order, best first
    within: float = 0.0  # distance that reproduces the published; 0: not judged
    distance: Distance = (
        "relative"  # what `within` is of: a share, the metric itself, or its logarithm
    )
    tuned_in: str = ""  # "part.variant" whose chosen point every variant takes, in the same case
    figure: Table = field(default_factory=dict)  # x: axes or a grid's key; rows: those to draw
    objects: Table = field(default_factory=dict)  # settings of the base that no table can hold

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
        not_negative("within", self.within)
        one_of("goal", self.goal, ("max", "min"))
        one_of("distance", self.distance, get_args(Distance))
        if not self.variants:
            raise SpecError(f"comparison {self.name!r} has no variants")

    def variant(self, name: str) -> Variant:
        known = {variant.name: variant for variant in self.variants}
        one_of("variant", name, known)
        return known[name]

    def cells(self) -> list[tuple[Case, Variant]]:
        """Every case with every variant that takes part in it."""
        pairs = itertools.product(self.rows, self.variants)
        return [(r, v) for r, v in pairs if r.variants is None or v.name in r.variants]

    def spec(
        self, variant: Variant, point: Point, row: Case | None = None, rounds: int | None = None
    ) -> Spec:
        """The spec of one point of a variant's grid; by default it is as long as the budget allows."""
        table = with_values(laid_over(self.base, variant.table), self.set | point)
        table = filled(table, (row or self.rows[0]).values) | self.objects
        # objects such as metrics that are functions stand in no table
        spec: Spec = tables.make(Spec, table) if self.objects else Spec.from_table(table)
        if self.tune_by == TRAIN_LOSS:
            spec = dataclasses.replace(spec, callbacks=(*spec.callbacks, TrainingLoss()))
        if rounds is None and self.budget is not None:
            rounds = self.budget.rounds(spec)
        return spec if rounds is None else dataclasses.replace(spec, rounds=rounds)

    def tuning_spec(self, variant: Variant, point: Point, row: Case) -> Spec:
        """The same, as long as a run of the tuning."""
        spec = self.spec(variant, point, row)
        return dataclasses.replace(spec, rounds=min(self.tune_rounds or spec.rounds, spec.rounds))

    @property
    def sign(self) -> int:
        """1 where more of the metric is better, else -1."""
        return 1 if self.goal == "max" else -1

    @property
    def tune_metric(self) -> str:
        """The metric that decides the tuning."""
        return self.tune_by or self.metric

    @property
    def tune_sign(self) -> int:
        """1 where more of it is better, else -1."""
        held_out = self.tune_metric.removeprefix(HELD_OUT) == self.metric.removeprefix(HELD_OUT)
        return self.sign if held_out else sign_of(self.tune_metric, self.metrics, option="goal")

    @property
    def metrics(self) -> Sequence[Any]:
        """The metrics of the base, as a user gives them or as its table has them."""
        found: Sequence[Any] = (self.base | self.objects).get("metrics", ())
        return found

    @property
    def tuning_seeds(self) -> int:
        """How many of the seeds decide the tuning."""
        return self.seeds if self.tune_seeds == "all" else min(self.tune_seeds, self.seeds)

    def last(self, evaluations: int) -> int:
        """How many of the last evaluations make up a result."""
        count = int(self.tail if self.tail >= 1 else evaluations * self.tail)
        return max(1, min(evaluations, count))

    def inside(self, curve: Series) -> Series:
        """The rows of a curve that the budget allows; all if there is none."""
        return curve if self.budget is None else curve.within(self.budget.limits)

    def rank(self, end: Tail) -> float:
        """Of a result in tuning, the higher the better; one that not every seed reached comes last."""
        return self.tune_sign * end.mean if end.whole else -math.inf

    def result(self, curve: Series) -> Tail:
        """The mean of the last evaluations within the budget."""
        curve = self.inside(curve)
        return curve.tail(self.last(len(curve.rounds)))


@dataclass(frozen=True)
class Study:
    """Parts that share their runs."""

    name: str
    parts: list[Part]
    title: str = ""
    about: str = ""


def objects_of(spec: Spec) -> Table:
    """The settings of a spec that all variants share, as objects."""
    return {
        key: one for key, one in vars(spec).items() if key not in ("method", "epochs", "rounds")
    }


def laid_over(table: Table, changes: Mapping[str, Any]) -> Table:
    """The table with changes laid over it, nested tables as well; a table that has a `name` replaces the other."""
    out = dict(table)
    for key, value in changes.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and "name" not in value:
            value = laid_over(old, value)
        out[key] = value
    return out


def filled(value: Any, names: Mapping[str, Any]) -> Any:
    """A table in which every `$name` is replaced by the value of that name."""
    if isinstance(value, dict):
        return {key: filled(inner, names) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith("$"):
        one_of("name of a row's value", value[1:], names)
        return names[value[1:]]
    return value


def settings(point: Mapping[str, Any]) -> str:
    """A point in words."""
    return ", ".join(setting(key, value) for key, value in point.items())


# ---- studies as TOML

# What a study's table may have: key → a type, a table of more of these, or a list of one; "*" is any other key.
GRID = {"*": list}
VARIANT = dict.fromkeys(CHANGEABLE, object) | {"label": str, "color": str, "grid": GRID}
WORDS = {"name": str, "title": str, "about": str}
OWN = {*WORDS, "variants", "objects"}  # are not handed down from a study to its parts
TYPES = {"Table": dict, "str": str, "list[list[str]]": list}
SETTINGS: dict[str, Any] = {
    one.name: TYPES.get(str(one.type), object)
    for one in dataclasses.fields(Part)
    if one.name not in OWN
} | {"rows": [{"published": dict, "variants": list, "*": object}]}
PART = SETTINGS | WORDS | {"variants": object, "own": {"*": VARIANT}, "grid": GRID}
SCALE = {"about": str, "only": list, "points": object, "parts": {"*": SETTINGS}} | SETTINGS
STUDY = {"variants": {"*": VARIANT}, "scale": str, "scales": {"*": SCALE}, "parts": {"*": PART}}
STUDY |= SETTINGS | WORDS | {"plugins": list}


def names() -> list[str]:
    """The studies that come with fedspan."""
    return sorted(file.stem for file in SPECS.glob("*.toml"))


def _file(name: str) -> Path:
    """The file of a study that comes with fedspan, or one of the user's own."""
    if name.endswith(".toml"):
        return Path(name)
    one_of("study", name, names())
    return SPECS / f"{name}.toml"


def plugins(name: str) -> tuple[Path, ...]:
    """The files beside the study NAME that have its own tasks and methods."""
    file = _file(name)
    return tuple(file.parent / one for one in read_toml(file).get("plugins", ()))


def committed(name: str, scale: str | None = None, seeds: int | None = None) -> Study:
    """The study NAME at a scale; by default at the one its file names. What its plugins register is loaded."""
    for path in plugins(name):
        if path.stem not in sys.modules:
            load_plugin(path)
    file = _file(name)
    return study_of({"name": file.stem} | read_toml(file), scale, seeds)


def study_of(table: Table, scale: str | None = None, seeds: int | None = None) -> Study:
    """A study from its table; `seeds` replaces the number of seeds of every part."""
    _check("", table, STUDY)
    scales, scale = table.get("scales", {}), scale or table.get("scale")
    if scale is not None:
        one_of("scale", scale, scales)
    size = {} if scale is None else scales[scale]
    parts = table.get("parts", {"comparison": {}})
    wanted: Any = size.get("only", parts)
    found = [_part(name, one, table, size, seeds) for name, one in parts.items() if name in wanted]
    if not found:
        raise SpecError("a comparison has no part; give [base] and [variants.NAME]")
    about = " ".join(one["about"].strip() for one in (table, size) if one.get("about"))
    return Study(table.get("name") or "comparison", found, table.get("title", ""), about)


def _check(where: str, value: Any, wanted: Any) -> None:
    """Refuse values of another type, and keys that are unknown."""
    kind = wanted if isinstance(wanted, type) else type(wanted)
    if not isinstance(value, kind):
        called = {"dict": "a table", "list": "a list", "str": "a text"}[kind.__name__]
        raise SpecError(f"`{where}` must be {called}, got {shown(value)}")
    inside: Any = value
    if isinstance(wanted, list):
        for number, one in enumerate(inside):
            _check(f"{where}[{number}]", one, wanted[0])
    elif isinstance(wanted, dict):
        for key, one in inside.items():
            if "*" not in wanted:
                one_of(f"key of [{where}]" if where else "key of a comparison", key, wanted)
            _check(f"{where}.{key}" if where else key, one, wanted.get(key, wanted.get("*")))


def _part(name: str, table: Table, shared: Table, size: Table, seeds: int | None) -> Part:
    where = f"parts.{name}"
    chosen: Table = {}
    for level in (shared, table, size, size.get("parts", {}).get(name, {})):
        chosen = laid_over(chosen, {k: v for k, v in level.items() if k in SETTINGS})
    # variants, with the part's own grid and as many values of it as the scale keeps
    known = _variants(shared.get("variants", {})) | _variants(table.get("own", {}))
    wanted = table.get("variants", list(known))
    if isinstance(wanted, dict):
        _check(f"{where}.variants", wanted, {"*": VARIANT})
        known, wanted = _variants(wanted), list(wanted)
    _check(f"{where}.variants", wanted, list)
    if "base" not in chosen or not known:
        raise SpecError("a comparison needs [base] and [variants.NAME]")
    points = size.get("points", 10**6)
    at_least("points", points, 1)
    variants = []
    for one in wanted:
        one_of(f"variant of [{where}]", one, known)
        grid = known[one].grid | table.get("grid", {})
        for key, values in grid.items():
            if not values:
                raise SpecError(
                    f"`variants.{one}.grid` has no values for {key!r}; give a list such as [0.03, 0.1, 0.3]"
                )
            start = max(0, (len(values) - points) // 2)
            grid[key] = values[start : start + points]
        variants.append(dataclasses.replace(known[one], grid=grid))
    # the metric and what is better
    metric = chosen.setdefault("metric", "accuracy")
    if "goal" in chosen and not metric:
        raise SpecError(f"`goal` {chosen['goal']!r} needs the `metric` that it is of; give both")
    if "goal" not in chosen and metric:
        sign = sign_of(metric, chosen["base"].get("metrics", ()), option="goal")
        chosen["goal"] = "max" if sign > 0 else "min"
    chosen["budget"] = Budget.parse(chosen.get("budget"))
    chosen["rows"] = [_case(one) for one in chosen.get("rows", [{}])]
    chosen |= {} if seeds is None else {"seeds": seeds}
    texts = {key: table.get(key, "") for key in ("title", "about")}
    return Part(name=name, variants=variants, **chosen, **texts)


def _variants(tables: Table) -> dict[str, Variant]:
    """Variants by name; label and color may be left out."""
    out = {}
    for (name, one), color in zip(tables.items(), itertools.cycle(COLORS), strict=False):
        own = {key: value for key, value in one.items() if key in CHANGEABLE}
        words = one.get("label", name), one.get("color", color)
        out[name] = Variant(name, *words, own, one.get("grid", {}))
    return out


def _case(table: Table) -> Case:
    if "target" in table:
        number("rows: target", table["target"])
    names = {one.name for one in dataclasses.fields(Case)[1:]}
    own = {key: one for key, one in table.items() if key in names}
    return Case({key: one for key, one in table.items() if key not in names}, **own)


def table_of(study: Study) -> Table:
    """What `study_of` reads this study from, with every level laid over; a study of one part has no [parts]."""
    parts = {}
    for part in study.parts:
        plain = _given(part, "name", "objects")
        plain["variants"] = {
            v.name: {"label": v.label, "color": v.color, "grid": v.grid} | v.table
            for v in part.variants
        }
        plain["rows"] = [row.values | _given(row, "values") for row in part.rows]
        if plain["rows"] == [{}]:
            del plain["rows"]
        if part.budget is not None:
            plain["budget"] = part.budget.texts()
        parts[part.name] = plain
    own = parts["comparison"] if list(parts) == ["comparison"] else {"parts": parts}
    return _given(study, "parts") | own


def _given(value: Any, *without: str) -> Table:
    """The fields of a dataclass that hold something."""
    held = ((key, one) for key, one in vars(value).items() if key not in without)
    return {key: one for key, one in held if one not in (None, "", [], {})}
