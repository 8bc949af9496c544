"""Config objects refuse bad values in one line that names the argument; a spec is the same as its table."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import pytest

from fedspan import Engine, Participation, Projection, Spec, Training
from fedspan.core.config import Search
from fedspan.core.errors import SpecError
from support.loops import RUN as TABLE

MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    (Training, {"weight_decay": -1}, "`weight_decay` must be a number of at least 0, got -1"),
    (Training, {"clip": 0}, "`clip` must be a positive number, got 0"),
    (
        Participation,
        {"weights": "example"},
        "`weights` must be one of examples, uniform, got 'example'",
    ),
    (Projection, {"full_modules": "head"}, "`full_modules` must be a list of names, got 'head'"),
    (Projection, {"min_numel": 0}, "`min_numel` must be a whole number of at least 1, got 0"),
    (
        Engine,
        {"simulate": "fast"},
        "`simulate` must be one of auto, batched, loop, pool, got 'fast'",
    ),
    (Engine, {"workers": 0}, "`workers` must be a whole number of at least 1, got 0"),
    (Search, {"share": 2.0}, "`share` must be above 0 and at most 1"),
]


@pytest.mark.parametrize(("kind", "values", "words"), MISTAKES)
def test_bad_values_are_named(kind: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as error:
        kind(**values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


IN_SPECS = {
    "rounds": 0,
    "eval_every": 0,
    "epochs": -1.0,
    "clients_per_round": 0,
    "seed": -1,
    "batch_size": 0,
    "dtype": "float16",
    "metrics": "accuracy",
}


@pytest.mark.parametrize("name", IN_SPECS)
def test_bad_values_of_a_spec_are_named(name: str) -> None:
    with pytest.raises(SpecError, match=name):
        Spec.from_table(TABLE | {name: IN_SPECS[name]})


FULL: dict[str, Any] = TABLE | {
    "epochs": 2.0,
    "seed": 7,
    "device": "cpu",
    "eval_every": 3,
    "method": {"name": "ssf", "rank": {"a.*": 0.5, "*": 8}, "lr": "auto"},
    "training": {"clip": 1.0, "weight_decay": 0.1},
    "participation": {"weights": "examples"},
    "projection": {"full_modules": ["head"], "frozen_modules": ["emb*"], "min_numel": 64},
    "engine": {"simulate": "loop", "states_dir": "s"},
    "callbacks": [{"name": "early_stopping", "metric": "loss"}, {"name": "keep_best"}],
    "search": {"share": 0.2},
}


@pytest.mark.parametrize("table", [TABLE, FULL], ids=["short", "full"])
def test_a_spec_is_its_table_and_its_toml(table: dict[str, Any]) -> None:
    spec = Spec.from_table(table)
    assert Spec.from_table(spec.table()) == spec
    assert Spec.from_table(tomllib.loads(spec.toml())) == spec
    assert Spec.from_table(spec.table()).identity() == spec.identity()


def test_identity_is_what_decides_the_numbers() -> None:
    spec = Spec.from_table(TABLE)
    others: list[dict[str, Any]] = [
        {"rounds": 99},
        {"seed": 5},
        {"device": "cpu"},
        {"engine": {"simulate": "batched"}},
        {"callbacks": [{"name": "keep_best"}]},
        {"training": {"weight_decay": 0.0}},
    ]
    for same in others:
        assert Spec.from_table(TABLE | same).identity() == spec.identity(), same
    for other in (
        {"batch_size": 5},
        {"training": {"clip": 1.0}},
        {"participation": {"weights": "uniform"}},
        {"clients_per_round": 4},
        {"callbacks": [{"name": "early_stopping"}]},
    ):
        assert Spec.from_table(TABLE | other).identity() != spec.identity(), other


def test_the_length_of_a_run_decides_its_numbers_only_under_a_schedule() -> None:
    for schedule, same in (("constant", True), ("cosine", False), ("linear", False)):
        table = TABLE | {"method": TABLE["method"] | {"schedule": schedule, "warmup": 2}}
        assert (
            Spec.from_table(table).identity() == Spec.from_table(table | {"rounds": 99}).identity()
        ) is same


def test_patterns_of_a_rank_are_tried_in_order() -> None:
    one, two = (
        Spec.from_table(TABLE | {"method": {"name": "ssf", "lr": 0.1, "rank": rank}})
        for rank in ({"a.*": 2, "*": 3}, {"*": 3, "a.*": 2})
    )
    assert one.identity() != two.identity()
    assert (
        one.decisions()["method"] == two.decisions()["method"]
    )  # the same patterns, in another order
    assert Spec.from_table(one.table()).identity() == one.identity()


def test_a_new_setting_at_its_default_changes_no_identity() -> None:
    """Only what differs from a default is part of it."""
    decisions = Spec.from_table(TABLE).decisions()
    assert set(decisions) == {"batch_size", "clients_per_round", "dtype", "method", "task"}
    assert decisions["method"] == {"name": "fedavg", "lr": 0.02, "local_steps": 3} | {
        key: value
        for key, value in decisions["method"].items()
        if key not in ("name", "lr", "local_steps")
    }
    defaults = {one.name: one.default for one in dataclasses.fields(Spec.from_table(TABLE).task)}  # type: ignore[arg-type]
    assert all(
        defaults[name] != value for name, value in decisions["task"].items() if name != "name"
    )
