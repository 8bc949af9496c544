"""All settings of a spec as factors with levels, from the fields and choices that there are; and the specs of rows."""

from __future__ import annotations

import functools
import json
import types
import typing
from pathlib import Path
from typing import Any

from covering.problems import TASKS, Variant, jitter, task_table
from fedspan.core import registry
from fedspan.core.config import Engine, Participation, Projection, Search, Training
from fedspan.core.errors import SpecError
from fedspan.core.privacy import Privacy
from fedspan.core.spec import Spec, with_values

ROUNDS = 5
DIR, JITTER = "@dir", "@jitter"  # a directory of the row's own, and a function
# What a number, a path or a name is set to; a setting that is none of a few choices needs an entry.
# Settings that fit one kind of targets alone; tests/api/test_weights_of_examples.py has them.
OF_TARGETS = {"class_weights", "pos_weight"}
VALUES: dict[str, list[Any]] = {
    "method.lr": ["auto", "search"],
    "method.local_steps": [1, 3],
    "method.server_lr": [0.7],
    "method.warmup": [2],
    "method.rank": [3, {"*": 0.5}],
    "method.alpha": [0.5],
    "method.beta1": [0.5],
    "method.beta2": [0.8],
    "method.eps": [0.1],
    "method.owners": [None, 3],
    "federation": [{"preset": "hospitals"}, {"preset": "phones", "step_seconds": 0.5}],
    "batch_size": [3, "full"],
    "epochs": [1.0],
    "clients_per_round": [3],
    "seed": [7],
    "device": ["cpu"],
    "dtype": ["float32"],
    "eval_every": [2],
    "eval_clients_every": [2],
    "training.weight_decay": [0.1],
    "training.clip": [0.5],
    "training.augment": [JITTER],
    "participation.screen": [None, 1000.0],
    "projection.project_modules": [["2.bias"]],
    "projection.full_modules": [["0"]],
    "projection.frozen_modules": [["0.bias"]],
    "projection.min_numel": [20],
    "engine.workers": [2],
    "engine.states_dir": [DIR],
    "privacy.clip": [0.5],
    "privacy.noise": [0.0],
    "privacy.epsilon": [2.0],
    "privacy.delta": [1e-3],
    "privacy.quantile": [0.5],
    "privacy.leak": [0.1],
    "privacy.secure_threshold": [0.9],
    "privacy.secure_scale": [2.0**24],
    "privacy.secure_range": [16.0],
    "search.share": [0.5],
    "search.start": [0.1],
}
TOPK, SIGN = {"name": "topk", "k": 0.3}, {"name": "sign"}
SIX_BITS = {"name": "qsgd", "bits": 6}
# What the settings of a choice are where its defaults do not do.
NEEDED: dict[str, dict[str, Any]] = {
    "projector": {"rank": 0.4},
    "compressor.topk": TOPK | {"chunk": 7},
    "compressor.randk": {"k": 0.3},
    "compressor.compose": {
        "outer": SIX_BITS,
        "inner": {"name": "topk", "k": 0.5},
    },
    "optimizer.adamw": {"beta1": 0.5, "beta2": 0.8, "eps": 1e-3, "decay": 0.1},
    "optimizer.preconditioned": {"beta2": 0.8, "eps": 0.3},
    "optimizer.sgd": {"momentum": 0.5},
    "drift.dynamic": {"alpha": 1.0},
    "drift.proximal": {"mu": 1.0},
    "uplink.code": {"compressor": SIX_BITS, "alpha": 0.5},
    "uplink.ef21": {"compressor": TOPK},
    "uplink.feedback": {"compressor": TOPK, "decay": 0.9},
    "uplink.sign_momentum": {"beta1": 0.5, "beta2": 0.8},
    "uplink.running_mean": {"beta": 0.5, "compressor": SIGN},
    "server.adagrad": {"lr": 0.05, "beta1": 0.5, "tau": 0.1},
    "server.adam": {"lr": 0.05, "beta1": 0.5, "beta2": 0.8, "tau": 0.1},
    "server.yogi": {"lr": 0.05, "beta1": 0.5, "beta2": 0.8, "tau": 0.1},
    "server.decay": {"lr": 0.05, "decay": 0.1},
    "server.fedexp": {"lr": 0.7},
    "server.mean": {"lr": 0.7},
    "server.momentum": {"beta": 0.5, "lr": 0.7},
    "downlink.coded": {"compressor": SIGN, "control": SIX_BITS},
    "callback.checkpoint": {"every": 2, "keep": 1, "log_dir": DIR},
    "callback.csv": {"log_dir": DIR},
    "callback.early_stopping": {"metric": "loss", "mode": "min", "patience": 1, "min_delta": 1e9},
    "callback.keep_best": {"metric": "loss", "mode": "min"},
    "callback.progress": {"rounds": ROUNDS, "lines": False, "lr_rule": "search"},
}
EXTRA = ("tensorboard", "wandb")  # callbacks whose packages the tests do without
# Choices besides those that follow from true and false and from names.
MORE: dict[str, list[dict[str, Any]]] = {
    "compressor": [
        SIX_BITS | {"bucket": 5},
        {"name": "sign", "bucket": 5},
    ],
    "optimizer": [{"name": "sgd"}],
    "projector": [
        {"name": name, "rank": 0.4, "refresh": 2}
        for name in ("coordinate", "cycle", "gaussian", "hadamard", "identity")
    ],
    "drift": [{"name": "controls", "correction": "tested", "rule": "paper"}],
    "uplink": [
        {"name": "code", "compressor": {"name": "randk", "k": 0.3}, "alpha": "unbiased"},
        {"name": "running_mean", "beta": 0.5},
    ],
    "downlink": [SIX_BITS, TOPK, SIX_BITS | {"unbiased": False}],
    "aggregator": [
        {"name": "centered_clipping", "radius": 0.5, "steps": 2},
        {"name": "krum", "hostile": 0.3, "keep": 0.5},
        {"name": "norm_bound", "bound": 0.5},
        {"name": "norm_bound", "factor": 2.0},
        {"name": "trimmed_mean", "share": 0.4},
    ],
}
GROUPS = {
    "training": Training,
    "participation": Participation,
    "projection": Projection,
    "engine": Engine,
    "search": Search,
}
# Kinds of privacy, each of which is tried again with every other setting that it takes.
PRIVATE: list[dict[str, Any]] = [
    {"clip": 1.0, "noise": 1.0, "delta": 1e-4},
    {"secure": True},
    {"level": "example", "clip": 1.0, "noise": 1.0, "delta": 1e-4},
    {"secure": True, "clip": 1.0, "noise": 1.0, "delta": 1e-4},
]
BASE: dict[str, Any] = {"rounds": ROUNDS, "batch_size": 4, "dtype": "float64"}
STEPS: dict[str, Any] = {"lr": 0.02, "local_steps": 2}


@functools.cache
def factors() -> dict[str, tuple[str, ...]]:
    """Every setting, and the levels that it is set to, as JSON."""
    found: dict[str, list[Any]] = {
        "method.name": list(registry.choices("method")),
        "task": list(TASKS),
    }
    for cls in registry.choices("method").values():
        found |= {key: found.get(key, []) + new for key, new in _of_class("method", cls).items()}
    found["privacy"] = _privacy()
    skip = {"rounds", "method", "task", "privacy", "callbacks", "metrics", *GROUPS}
    found |= _of_class("", Spec, skip)
    for name, group in GROUPS.items():
        found |= _of_class(name, group, OF_TARGETS)
    found["callbacks"] = [[one] for one in _choices("callback") if one["name"] not in EXTRA]
    found["metrics"] = [[name] for name in registry.choices("metric")]
    found["lost"] = [True]  # whether replies are lost on their way
    found["seeds"] = [2]
    return {
        key: tuple(dict.fromkeys(json.dumps(level) for level in levels))
        for key, levels in found.items()
    }


def fits(name: str, method: str) -> bool:
    """Whether a setting is one of a method, or of none."""
    group, _, field = name.partition(".")
    return group != "method" or field in ("name", *_fields(json.loads(method)))


def _fields(method: str) -> set[str]:
    return {field.name for field in registry.settings(registry.choices("method")[method])}


def _of_class(where: str, cls: type, without: set[str] = frozenset()) -> dict[str, list[Any]]:
    """The levels of every field of a class besides its default."""
    hints, found = typing.get_type_hints(cls), {}
    for field in registry.settings(cls):
        if field.name not in without:
            key = f"{where}.{field.name}".removeprefix(".")
            found[key] = [
                one
                for one in _levels(key, hints[field.name])
                if key in VALUES or one != field.default
            ]
    return found


def _levels(key: str, hint: Any) -> list[Any]:
    if key in VALUES:
        return VALUES[key]
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )
    for option in options:
        if option is bool:
            return [False, True]
        if typing.get_origin(option) is typing.Literal:
            return list(typing.get_args(option))
        if (kind := registry.kind_of(option)) is not None:
            return _choices(kind)
    raise AssertionError(f"{key!r} is a setting that no row sets; give it a value in VALUES")


def _choices(kind: str) -> list[dict[str, Any]]:
    """Every registered choice, again with each of its switches turned."""
    found = []
    for name, cls in registry.choices(kind).items():
        base = {"name": name} | NEEDED.get(kind, {}) | NEEDED.get(f"{kind}.{name}", {})
        found.append(base)
        hints = typing.get_type_hints(cls) if kind != "callback" else {}
        for field in registry.settings(cls) if hints else ():
            hint = hints[field.name]
            if hint is bool or typing.get_origin(hint) is typing.Literal:
                found += [
                    base | {field.name: one} for one in _levels("", hint) if one != field.default
                ]
    found += MORE.get(kind, [])
    if kind == "uplink":
        found += _choices("compressor")
    for name, cls in registry.choices(kind).items():
        there = {field for one in found if one["name"] == name for field in one}
        missing = {field.name for field in registry.settings(cls)} - there
        if missing and name not in EXTRA:
            raise AssertionError(
                f"no row sets {missing} of {kind} {name!r}; give it a value in NEEDED or MORE"
            )
    return found


def _privacy() -> list[dict[str, Any]]:
    """Every kind of privacy, and each other setting beside the first kind that takes it."""
    found = list(PRIVATE)
    for key, levels in _of_class("privacy", Privacy, {"clip", "level", "secure"}).items():
        field = key.removeprefix("privacy.")
        for level in levels:
            other = {"epsilon": "noise"}.get(field)
            made = (
                {k: v for k, v in kind.items() if k != other} | {field: level} for kind in PRIVATE
            )
            found.append(next(table for table in made if _taken(table)))
    return found


def _taken(table: dict[str, Any]) -> bool:
    try:
        Privacy(**table)
    except SpecError:
        return False
    return not any(name.startswith("secure_") for name in table) or "secure" in table


def spec_table(row: dict[str, str], folder: Path, variant: Variant = "") -> dict[str, Any]:
    """The spec of a row as a table."""
    values = {
        name: json.loads(level) for name, level in row.items() if name not in ("lost", "seeds")
    }
    task = values.pop("task", TASKS[0])
    table = BASE | {"task": task_table(task, variant), "method": STEPS}
    if "regression" not in task:
        table["projection"] = {"min_numel": 16}
    table = with_values(
        table, {key: value for key, value in values.items() if key != "training.augment"}
    )
    table = _filled(table, folder)
    if "training.augment" in values:
        table.setdefault("training", {})["augment"] = jitter
    return table


def _filled(value: Any, folder: Path) -> Any:
    """A table with a directory in the place of DIR."""
    if isinstance(value, dict):
        return {key: _filled(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, folder) for inner in value]
    if value == DIR:
        (folder / "own").mkdir(exist_ok=True)
        return str(folder / "own")
    return value
