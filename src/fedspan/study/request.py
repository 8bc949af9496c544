"""What a comparison is asked for: the grids of its variants, its metric, and the texts of a command line.

--methods fedavg,scaffold                               with the steps and the subspace of the base spec
--methods 'ssf:rank=0.05,drift.rule=paper as SSF small' with settings of its own, and a label
--grid lr=0.01,0.03,0.1                                 every method is tuned over these values
--grid ssf:lr=0.1,0.3 --grid ssf:space.refresh=1,5      SSF over these instead, and over these as well
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.callbacks.early_stopping import EarlyStopping
from fedspan.callbacks.keep_best import KeepBest
from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.core import registry
from fedspan.core.errors import SpecError, did_you_mean, one_of, shown
from fedspan.core.spec import Spec, flat, read_toml, toml_value, with_changes, with_values
from fedspan.costs import plan
from fedspan.engine.history import HELD_OUT, main_metric, sign_of
from fedspan.study.curves import Goal, Table, setting
from fedspan.study.model import Part, Study, laid_over, study_of

MOST_POINTS = 1000  # values of one key of a grid


def with_grids(part: Part, tune: Mapping[str, Any]) -> Part:
    """The part with its variants tuned over values.

    `{"lr": […]}` is for all, `{"SSF": {"lr": […]}}` for those of one label, name or method, for which it replaces the
    other. `lr` is short for method.lr.
    """
    if not isinstance(tune, Mapping) or not all(isinstance(key, str) for key in tune):
        raise SpecError(
            f"`tune` must be a table such as {{'lr': [0.03, 0.1, 0.3]}}, got {shown(tune)}"
        )
    owners = {key: own for key, own in tune.items() if isinstance(own, Mapping)}
    shared = {key: values for key, values in tune.items() if key not in owners}
    variants, names = [], list[str]()
    for variant in part.variants:
        method = laid_over(part.base, variant.table).get("method", {}).get("name", "")
        whose = (variant.label, variant.name, method)
        chosen = dict(shared)
        for owner in owners:
            chosen |= owners[owner] if owner in whose else {}
        grid = dict(variant.grid)
        for key, values in chosen.items():
            key = key.removeprefix("method.")
            top = key.partition(".")[0]
            cls = registry.choices("method")[registry.registered_name("method", method, "method")]
            known = ["epochs", *(one.name for one in registry.settings(cls))]
            if top not in known:
                raise SpecError(
                    f"`tune`: the method of {variant.label} has no setting {top!r}{did_you_mean(top, known)}; tune "
                    "settings of methods, each for those that have it"
                )
            grid[key if key == "epochs" else f"method.{key}"] = values_of(key, values)
        variants.append(dataclasses.replace(variant, grid=grid))
        names += whose
    for owner in owners:
        one_of("label of a grid", owner, {*names})
    return dataclasses.replace(part, variants=variants)


def values_of(key: str, values: Any) -> list[Any]:
    """The values of a grid's key as plain numbers and words."""
    if isinstance(values, str | int | float):
        return [values]
    values = values.tolist() if hasattr(values, "tolist") else values
    listed = hasattr(values, "__iter__") and not isinstance(values, bytes | Mapping)
    found = [one.item() if hasattr(one, "item") else one for one in values] if listed else []
    if not 0 < len(found) <= MOST_POINTS:
        raise SpecError(
            f"`tune` needs a list of 1 to {MOST_POINTS:,} values for {key!r}, such as [0.03, 0.1, 0.3], got "
            f"{shown(values)}"
        )
    return found


def prepared(part: Part, metric: str | None, goal: Goal | None) -> Part:
    """The part with its metrics chosen and every spec of it checked.

    Results are those of the test set where there is one. Tuning never goes by the test set: it goes by the validation
    set, or by the training loss where there is none. A task without data of its own is tuned by its metric.
    """
    if goal is not None:
        one_of("goal", goal, ("max", "min"))
    first = part.spec(part.variants[0], part.variants[0].points()[0], rounds=1)
    known, trains = plan.metrics(first)
    known = known or [TRAIN_LOSS] * trains  # without a test set the training loss is what there is
    if not known:
        raise SpecError("nothing is evaluated that methods could be compared by; give a `test` set")
    tested = [one for one in known if not one.startswith(HELD_OUT)]
    if metric is None:
        metric = part.metric or main_metric(tested or known, part.metrics)
    one_of("metric", metric, known)
    given = goal or (part.goal if metric == part.metric else None)
    sign = sign_of(metric, part.metrics, given, "goal")
    goal = "max" if sign > 0 else "min"
    for one in first.callbacks:  # must not choose models by the same metric in the other direction
        if isinstance(one, KeepBest | EarlyStopping):
            by = one.metric or main_metric(known, part.metrics)
            same = by.removeprefix(HELD_OUT) == metric.removeprefix(HELD_OUT)
            if same and sign_of(by, part.metrics, one.mode) != sign:
                other = "min" if goal == "max" else "max"
                raise SpecError(
                    f"`goal` of {metric!r} is {goal!r}, but {type(one).__name__} goes by {other!r}; give both the same"
                )
    held_out = HELD_OUT + metric.removeprefix(HELD_OUT)
    tune_by = part.tune_by or (held_out if held_out in known else TRAIN_LOSS if trains else metric)
    part = dataclasses.replace(part, metric=metric, goal=goal, tune_by=tune_by)
    for row, variant in part.cells():
        for point in variant.points():
            spec = part.spec(variant, point, row)
            plan.check(spec)
            trained = -(-spec.rounds // spec.eval_every)
            if part.tail > trained:
                raise SpecError(
                    f"`tail` is {part.tail:g}, but a run of {spec.rounds} rounds has "
                    f"{trained} evaluations after its start; give at most {trained}"
                )
    return part


def asked(
    table: Table,
    tune: Mapping[str, Any],
    metric: str | None,
    goal: Goal | None,
    *,
    objects: Table | None = None,
) -> Study:
    """The study of one comparison, with its grids and its metric chosen and every spec of it checked.

    Args:
        table: The study as a file has it.
        tune: Values to tune over, as in `with_grids`.
        metric: The metric to compare by; by default the table's, or else the main one.
        goal: Whether more of it is better; by default known from its name.
        objects: Settings of the base that no table can hold.
    """
    study = study_of(table)
    if len(study.parts) > 1:
        raise SpecError(
            f"{study.name!r} is a study of {len(study.parts)} parts; `fedspan compare` takes one"
        )
    part = dataclasses.replace(study.parts[0], objects=objects or {})
    part = prepared(with_grids(part, tune), metric, goal)
    return dataclasses.replace(study, parts=[part])


# ---- the command line


def requested(
    path: Path,
    *,
    methods: Sequence[str] = (),
    grids: Sequence[str] = (),
    budget: Sequence[str] = (),
    changes: Sequence[str] = (),
    metric: str | None = None,
    goal: Goal | None = None,
    **options: int | None,
) -> Study:
    """The comparison that a command line asks for; `options` are settings of a study."""
    table: Table = read_toml(path)
    if {"variants", "parts"} & table.keys():
        if methods:
            raise SpecError(f"{str(path)!r} is a complete comparison; give it without --methods")
        table = with_changes(table, tuple(f"base.{change}" for change in changes))
        table = {"name": path.stem, "metric": ""} | table
        values = flat(table)
        if values.get("base.task.name") == "custom" and "base.task.module" not in values:
            raise SpecError(
                f"{str(path)!r} compares on a model and data in Python; continue it there, with "
                f"fedspan.compare(…, run_dir={str(path.parent)!r}, resume=True)"
            )
    else:
        base = Spec.from_table(with_changes(table, tuple(changes)))
        texts = [entry for one in methods for entry in entries(one)]
        pairs = [_variant(base, text) for text in texts or [registry.name_of(base.method)]]
        label, count = Counter(label for label, _ in pairs).most_common(1)[0]
        if count > 1:
            raise SpecError(
                f"two methods have the label {label!r}; give one of them another with `… as LABEL`"
            )
        table = {"name": "comparison", "metric": "", "base": base.table(), "variants": dict(pairs)}
    table |= {key: value for key, value in options.items() if value is not None}
    table |= {"budget": list(budget)} if budget else {}
    return asked(table, grids_of(grids), metric, goal)


def grids_of(texts: Sequence[str]) -> Table:
    """The values to tune over of texts such as `lr=0.1,0.3` and `ssf:lr=0.1,0.3`."""
    tune: Table = {}
    for text in texts:
        left, sign, values = text.partition("=")
        owner, _, key = (part.strip() for part in left.rpartition(":"))
        if not sign or not key or not values.strip():
            raise SpecError(
                f"--grid needs key=value,value,… or method:key=value,value,…, got {text!r}"
            )
        grid = tune.setdefault(owner, {}) if owner else tune
        grid[key] = [toml_value(value) for value in split(values)]
    return tune


def _variant(base: Spec, text: str) -> tuple[str, Table]:
    """(label, table) of a method as --methods has it: `ssf:rank=0.05,drift.rule=paper as SSF small`."""
    rest, _, label = (part.strip() for part in text.partition(" as "))
    name, _, settings = (part.strip() for part in rest.partition(":"))
    pairs = [[piece.strip() for piece in part.split("=", 1)] for part in split(settings)]
    if any(len(pair) < 2 or "" in pair or pair[0] == "name" for pair in pairs):
        raise SpecError(f"a method's settings are written name:key=value,key=value, got {text!r}")
    values = {key: toml_value(value) for key, value in pairs}
    if len(values) < len(pairs):
        raise SpecError(f"{text!r} sets a key twice; set it once")
    table = plan.sibling(base, name)
    label = label or ", ".join([name, *(setting(key, value) for key, value in values.items())])
    return label, {"method": with_values(table, values)}


def entries(text: str) -> list[str]:
    """`a,b:k=1,l=2,c` → a | b:k=1,l=2 | c: a piece `key=value` belongs to the method before it."""
    out: list[str] = []
    for part in split(text):
        if out and re.match(r"[\w.]+\s*=", part):
            out[-1] += f",{part}"
        else:
            out.append(part)
    return out


def split(text: str) -> list[str]:
    """Split at commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        quote = "" if char == quote else char if char in "\"'" and not quote else quote
        depth += 0 if quote else (char in "[{") - (char in "]}")
        if char == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]
