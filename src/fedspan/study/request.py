"""A comparison as it is given on the command line: spec files, or one spec and the names of methods, with grids.

--methods fedavg,scaffold                               with the steps and the subspace of the base spec
--methods 'ssf:rank=0.05,control=paper as SSF small'    with settings of its own, and a label
--grid lr=0.01,0.03,0.1                                 every method is tuned over these values
--grid ssf:lr=0.1,0.3 --grid ssf:refresh=1,5            SSF over these instead, and over these as well
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedspan.callbacks import EarlyStopping, KeepBest
from fedspan.callbacks.training_loss import NAME as TRAIN_LOSS
from fedspan.core.errors import SpecError, one_of, shown
from fedspan.core.spec import Spec, flat, read_toml, toml_value, with_changes, with_values
from fedspan.costs import outline
from fedspan.engine.history import main_metric, sign_of
from fedspan.study.budget import Budget
from fedspan.study.model import COLORS, Goal, Part, Study, Variant, setting
from fedspan.study.parse import study_of
from fedspan.study.series import labels

VALIDATION = "validation_"
OWN = ("method", "epochs")  # what each spec file has of its own


def requested(
    specs: Sequence[Path],
    *,
    methods: Sequence[str] = (),
    grids: Sequence[str] = (),
    budget: Sequence[str] = (),
    changes: Sequence[str] = (),
    seeds: int | None = None,
    tune_seeds: int | None = None,
    tune_rounds: int | None = None,
    metric: str | None = None,
    goal: Goal | None = None,
    tail: int | None = None,
) -> Study:
    """The comparison that a command line asks for, with every spec of it checked."""
    study = _study(specs, methods, budget, changes)
    if len(study.parts) > 1:
        raise SpecError(
            f"{str(specs[0])!r} is a study of {len(study.parts)} parts; `fedspan compare` takes one"
        )
    part = study.parts[0]
    options = {"seeds": seeds, "tune_seeds": tune_seeds, "tune_rounds": tune_rounds, "tail": tail}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if budget:
        given["budget"] = Budget.parse(budget)
    part = dataclasses.replace(part, variants=with_grids(part.variants, grids), **given)
    return dataclasses.replace(study, parts=[prepared(part, metric, goal, "--metric")])


def prepared(part: Part, metric: str | None, goal: Goal | None, option: str = "metric") -> Part:
    """The part with its metrics chosen and every spec of it checked; `option` is what a user calls the metric.

    Results are those of the test set where there is one. Tuning never goes by the test set: it goes by the validation
    set, or by the training loss where there is none. A task without data of its own is tuned by its metric.
    """
    if goal is not None:
        one_of("goal", goal, ("max", "min"))
    first = part.variants[0]
    known, trains = outline.metrics(part.spec(first, first.points()[0], rounds=1))
    known = known or [TRAIN_LOSS] * trains  # without a test set the training loss is what there is
    if not known:
        raise SpecError("nothing is evaluated that methods could be compared by; give a `test` set")
    tested = [one for one in known if not one.startswith(VALIDATION)]
    metric = metric or part.metric or main_metric(tested or known, part.metrics)
    one_of(option, metric, known)
    given = goal or (part.goal if metric == part.metric else None)
    sign = sign_of(metric, part.metrics, given, option.replace("metric", "goal"))
    goal = "max" if sign > 0 else "min"
    _check_callbacks(part, known, metric, goal)
    held_out = VALIDATION + metric.removeprefix(VALIDATION)
    tune_by = part.tune_by or (held_out if held_out in known else TRAIN_LOSS if trains else metric)
    part = dataclasses.replace(part, metric=metric, goal=goal, tune_by=tune_by)
    for row, variant in part.cells():
        for point in variant.points():
            spec = part.spec(variant, point, row)
            outline.check(spec)
            _check_tail(part.tail, spec, option.replace("metric", "tail"))
    return part


def _check_tail(tail: float, spec: Spec, option: str) -> None:
    """Refuses a mean of more evaluations than a run has after its start."""
    trained = -(-spec.rounds // spec.eval_every)
    if tail > trained:
        raise SpecError(
            f"`{option}` is {tail:g}, but a run of {spec.rounds} rounds has {trained} evaluations after its start; "
            f"give at most {trained}"
        )


def _check_callbacks(part: Part, known: Sequence[str], metric: str, goal: Goal) -> None:
    """Refuses callbacks that would choose models by a metric of which they do not know what is better, or otherwise."""
    for one in part.spec(part.variants[0], part.variants[0].points()[0], rounds=1).callbacks:
        if not isinstance(one, KeepBest | EarlyStopping):
            continue
        by = one.metric or main_metric(known, part.metrics)
        found = "max" if sign_of(by, part.metrics, one.mode) > 0 else "min"
        if by.removeprefix(VALIDATION) == metric.removeprefix(VALIDATION) and found != goal:
            raise SpecError(
                f"`goal` of {metric!r} is {goal!r}, but {type(one).__name__} goes by {found!r}; give both the same"
            )


def _study(
    specs: Sequence[Path], methods: Sequence[str], budget: Sequence[str], changes: Sequence[str]
) -> Study:
    """Base and variants; the metric is empty if it is not given."""
    tables = [(path, read_toml(path)) for path in specs]
    for path, table in tables:
        if "variants" in table or "parts" in table:
            if len(specs) > 1 or methods:
                raise SpecError(
                    f"{str(path)!r} is a complete comparison; give it without other specs and --methods"
                )
            base = table.get("base", {})
            if not isinstance(base, dict):
                raise SpecError(f"`base` must be a table, got {shown(base)}")
            base = with_changes(base, tuple(changes))
            task = base.get("task", {})
            if isinstance(task, dict) and task.get("name") == "custom" and "module" not in task:
                raise SpecError(
                    f"{str(path)!r} compares on a model and data in Python; continue it there, with "
                    f"fedspan.compare(…, run_dir={str(path.parent)!r}, resume=True)"
                )
            return study_of({"name": path.stem, "metric": ""} | table | {"base": base})
    found = [
        (str(path), Spec.from_table(with_changes(table, tuple(changes)))) for path, table in tables
    ]
    if methods:
        if len(found) > 1:
            raise SpecError(f"--methods needs one spec to start from, got {len(found)}")
        base, variants = found[0][1].table(), _of_methods(found[0][1], methods)
    else:
        _agree(
            found,
            {*OWN, "callbacks", "search", "engine", "device", *(["rounds"] if budget else [])},
        )
        base = {key: value for key, value in found[0][1].table().items() if key not in OWN}
        variants = _of_specs([spec for _, spec in found])
    return Study("comparison", [Part(name="comparison", base=base, variants=variants, metric="")])


def _agree(found: Sequence[tuple[str, Spec]], free: set[str]) -> None:
    (first, one), *others = found
    for name, other in others:
        a, b = (
            flat({k: v for k, v in spec.table().items() if k not in free}) for spec in (one, other)
        )
        for key in dict.fromkeys([*a, *b]):
            if a.get(key) != b.get(key):
                raise SpecError(
                    f"specs differ in more than the method: {key} is {a.get(key)!r} in {first!r} "
                    f"and {b.get(key)!r} in {name!r}; make them equal or give --set {key}=…"
                )


def _of_specs(specs: Sequence[Spec]) -> list[Variant]:
    tables = [{k: v for k, v in spec.table().items() if k in OWN} for spec in specs]
    named = zip(labels(tables), tables, strict=True)
    return _variants([(table["method"]["name"], label, table) for label, table in named])


def _of_methods(base: Spec, texts: Sequence[str]) -> list[Variant]:
    found = []
    for text in (entry for one in texts for entry in entries(one)):
        rest, _, label = (part.strip() for part in text.partition(" as "))
        name, _, settings = (part.strip() for part in rest.partition(":"))
        values = _settings(split(settings), text)
        table = outline.sibling(base, name)
        table = without_projector(table) if "rank" in values else table
        label = label or ", ".join([name, *(setting(key, value) for key, value in values.items())])
        found.append((name, label, {"method": with_values(table, values)}))
    return _variants(found)


def _variants(found: Sequence[tuple[str, str, dict[str, Any]]]) -> list[Variant]:
    """Variants from (method, label, table), named by their methods and numbered if a method occurs twice."""
    names: list[str] = []
    for method, _, _ in found:
        count = sum(re.sub(r"-\d+$", "", name) == method for name in names)
        names.append(f"{method}-{count + 1}" if count else method)
    same = [
        label
        for n, (_, label, _) in enumerate(found)
        if label in [other for _, other, _ in found[:n]]
    ]
    if same:
        raise SpecError(
            f"two methods have the label {same[0]!r}; give one of them another with `… as LABEL`"
        )
    return [
        Variant(name, label, COLORS[n % len(COLORS)], table, {})
        for n, (name, (_, label, table)) in enumerate(zip(names, found, strict=True))
    ]


def with_grids(variants: Sequence[Variant], texts: Sequence[str]) -> list[Variant]:
    """The variants with grids such as `lr=0.1,0.3`, for all, or `ssf:lr=0.1,0.3`, for those of one method or label."""
    grids = {variant.name: dict(variant.grid) for variant in variants}
    own: set[tuple[str, str]] = set()  # a grid of one method overrides a grid for all, in any order
    for text in texts:
        left, sign, values = text.partition("=")
        owner, colon, key = left.rpartition(":")
        if not sign or not key.strip() or not values.strip():
            raise SpecError(
                f"--grid needs key=value,value,… or method:key=value,value,…, got {text!r}"
            )
        key = _grid_key(key.strip())
        chosen = [
            v for v in variants if not colon or owner.strip() in (v.name, v.label, _method(v))
        ]
        if not chosen:
            raise SpecError(
                f"--grid {text!r} is for {owner!r}, which is not compared; one of {_names(variants)}"
            )
        for variant in chosen:
            if colon or (variant.name, key) not in own:
                grids[variant.name][key] = [toml_value(value) for value in split(values)]
            if colon:
                own.add((variant.name, key))
    return [
        dataclasses.replace(v, grid=grids[v.name], table=_for_grid(v.table, grids[v.name]))
        for v in variants
    ]


def _for_grid(table: dict[str, Any], grid: Mapping[str, list[Any]]) -> dict[str, Any]:
    ranked = "method.rank" in grid and "method" in table
    return table | {"method": without_projector(table["method"])} if ranked else table


def without_projector(method: dict[str, Any]) -> dict[str, Any]:
    """A method's table without its projector, so that `rank`, which is short for one, may be set."""
    return {key: value for key, value in method.items() if key != "projector"}


def _grid_key(key: str) -> str:
    """`lr` is short for method.lr; settings of the task are not tuned."""
    top = key.partition(".")[0]
    fields = {field.name for field in dataclasses.fields(Spec)} - {"method", "epochs"}
    if top in fields:
        raise SpecError(
            f"--grid tunes the method, and {key!r} is not a setting of it; change it for all with --set"
        )
    return key if top in ("method", "epochs") else f"method.{key}"


def _method(variant: Variant) -> str | None:
    name: str | None = variant.table.get("method", {}).get("name")
    return name


def _names(variants: Sequence[Variant]) -> str:
    return ", ".join(variant.name for variant in variants)


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


def _settings(parts: Sequence[str], text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        key, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or not key or not value or key == "name":
            raise SpecError(
                f"a method's settings are written name:key=value,key=value, got {text!r}"
            )
        if key in found:
            raise SpecError(f"{text!r} sets {key!r} twice; set it once")
        found[key] = toml_value(value)
    return found
