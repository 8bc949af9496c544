"""What `compare` and `tune` are given, as a spec that all methods share and one variant per method."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import nn

from fedspan.api.fit import as_method, as_setting, check_names, spec_of
from fedspan.api.run import as_spec
from fedspan.core import building, registry
from fedspan.core.errors import SpecError, did_you_mean, shown
from fedspan.core.method import Method
from fedspan.core.spec import Spec, changed
from fedspan.study.model import COLORS, Variant

MethodLike = Method | str | Mapping[str, Any]
Grid = Mapping[str, Any]
MOST_POINTS = 1000  # values of one key of a grid
DATA = ("test", "validation", "callbacks")  # arguments that the page names and does not write out
FIELDS = {one.name for one in dataclasses.fields(Spec)}
RESERVED = {"method", "task", "settings"}  # names in a spec that are no arguments of `compare`


def call_as_text(named: Mapping[str, Method], model: Any, settings: Mapping[str, Any]) -> str:
    """The call of `compare` as the page shows it; a model and data are named, other values are written out."""
    problem = (
        "model, clients"
        if isinstance(model, nn.Module)
        else repr(str(model))
        if isinstance(model, str | PathLike)
        else "spec"
    )
    plain = (str, int, float, bool, list, tuple, dict)
    told = {key: value for key, value in settings.items() if value is not None}
    words = [
        f"{key}={value!r}"
        if isinstance(value, plain) and len(repr(value)) < 200 and key not in DATA
        else f"{key}={key}"
        for key, value in told.items()
    ]
    methods = {label: changed(method) for label, method in named.items()}
    return f"fedspan.compare({', '.join([repr(methods), problem, *words])})"


def named_methods(methods: Mapping[str, MethodLike] | Sequence[MethodLike]) -> dict[str, Method]:
    """Label → method; methods without labels have their names, numbered where one occurs twice."""
    if isinstance(methods, str) or not isinstance(methods, Mapping | Sequence):
        raise SpecError(
            f"`methods` must be a dictionary of label → method or a list of methods, got {shown(methods)}"
        )
    if not methods:
        raise SpecError("`methods` is empty; give at least one method")
    if isinstance(methods, Mapping):
        for label in map(str, methods):
            if not label.strip() or not label.isprintable() or len(label) > 100:
                raise SpecError(
                    f"a label of `methods` must be up to 100 characters on one line, got {shown(label)}"
                )
        return {str(label): as_method(one) for label, one in methods.items()}
    found: dict[str, Method] = {}
    for one in map(as_method, methods):
        name = registry.name_of(one)
        count = sum(registry.name_of(other) == name for other in found.values())
        found[f"{name}-{count + 1}" if count else name] = one
    return found


def shared_spec(
    model: Any, clients: Any, loss: Any, method: Any, settings: Mapping[str, Any]
) -> Spec:
    """The spec that all methods share."""
    if isinstance(model, nn.Module):
        if clients is None:
            raise SpecError("`clients` is missing; give the data of each client")
        check_names(settings, {*inspect.signature(spec_of).parameters, *FIELDS} - RESERVED, method)
        return spec_of(model, clients, loss, method=method, **settings)
    if clients is not None or loss is not None:
        raise SpecError(
            f"`model` must be a torch.nn.Module where `clients` are given, got {type(model).__name__}"
        )
    if not isinstance(model, Spec | Mapping | str | PathLike):
        raise SpecError(f"`model` must be a torch.nn.Module or a spec, got {shown(model)}")
    check_names(settings, FIELDS - RESERVED, method)
    given = {name: as_setting(name, value) for name, value in settings.items() if value is not None}
    return dataclasses.replace(as_spec(model), method=method, **given)


def variants_of(named: Mapping[str, Method], tune: Grid) -> list[Variant]:
    """One variant per method with its grid."""
    grids = _grids(named, tune)
    return [
        Variant(
            label,
            label,
            COLORS[n % len(COLORS)],
            {"method": building.describe(one)},
            grids[label],
            one,
        )
        for n, (label, one) in enumerate(named.items())
    ]


def _grids(named: Mapping[str, Method], tune: Grid) -> dict[str, dict[str, list[Any]]]:
    """Label → dotted key → values; a grid of one label replaces that for all."""
    if not isinstance(tune, Mapping) or not all(isinstance(key, str) for key in tune):
        raise SpecError(
            f"`tune` must be a table such as {{'lr': [0.03, 0.1, 0.3]}}, got {shown(tune)}"
        )
    shared = {key: value for key, value in tune.items() if not isinstance(value, Mapping)}
    for label in tune:
        if label in shared and label in named:
            raise SpecError(
                f"`tune` needs a table for {label!r}, such as {{'lr': [0.1, 0.3]}}, got {shown(tune[label])}"
            )
        if label not in shared and label not in named:
            near = did_you_mean(label, named)
            raise SpecError(
                f"`tune` has a grid for {label!r}, which is no label; one of {', '.join(named)}{near}"
            )
    grids = {}
    for label, method in named.items():
        known = [one.name for one in dataclasses.fields(method)] + ["epochs"]  # type: ignore[arg-type]
        grid = {}
        for key, values in (shared | dict(tune.get(label, {}))).items():
            top = key.partition(".")[0]
            if top not in known:
                near = (
                    did_you_mean(top, known)
                    or f"; give {{'LABEL': {{{top!r}: […]}}}} for the methods that have it"
                )
                raise SpecError(f"`tune`: {label} has no setting {top!r}{near}")
            values = [values] if isinstance(values, str | int | float) else _values(key, values)
            if not values:
                raise SpecError(
                    f"`tune` has no values for {key!r}; give a list such as [0.03, 0.1, 0.3]"
                )
            grid[key if key == "epochs" else f"method.{key}"] = values
        grids[label] = grid
    return grids


def _values(key: str, values: Any) -> list[Any]:
    """The values of a grid's key as plain numbers and words."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, bytes | Mapping) or not hasattr(values, "__iter__"):
        raise SpecError(
            f"`tune` needs a list of values for {key!r}, such as [0.03, 0.1, 0.3], got {shown(values)}"
        )
    found = [one.item() if hasattr(one, "item") else one for one in values]
    if len(found) > MOST_POINTS:
        raise SpecError(
            f"`tune` has {len(found):,} values for {key!r}; give at most {MOST_POINTS:,}"
        )
    return found
