"""What is asked of a comparison: lists of methods, grids and a file, and mistakes before anything runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedspan.core.errors import SpecError
from fedspan.core.spec import Spec
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.study.model import Part, table_of
from fedspan.study.request import entries, requested, split
from support.comparisons import BASE, spec_file


def asked(*specs: Any, **options: Any) -> Part:
    """The one part of a comparison."""
    (part,) = requested(*specs, **options).parts
    return part


def test_a_list_of_methods_with_settings() -> None:
    assert entries("fedavg,ssf:rank=0.05,drift.rule=paper as SSF small,scaffold") == [
        "fedavg",
        "ssf:rank=0.05,drift.rule=paper as SSF small",
        "scaffold",
    ]
    assert split('a=[1, 2], b={x = "p,q", y = 3},c') == ["a=[1, 2]", 'b={x = "p,q", y = 3}', "c"]


def test_methods_take_steps_and_subspace_of_the_base(tmp_path: Path) -> None:
    plan = asked(
        spec_file(tmp_path),
        methods=["fedavg, ssf, ssf:rank=0.25,drift.rule=paper as Small, fedsub:space.rank=5"],
    )
    assert [v.name for v in plan.variants] == [v.label for v in plan.variants]
    assert [v.label for v in plan.variants] == ["fedavg", "ssf", "Small", "fedsub, rank 5"]
    fedavg, ssf, small, fedsub = (plan.spec(v, {}).table()["method"] for v in plan.variants)
    assert (fedavg["lr"], fedavg["local_steps"]) == (0.02, 2)
    assert fedavg["local"]["momentum"] == 0.5
    assert ssf == Spec.from_table(BASE).table()["method"]
    assert small["space"] == {"name": "gaussian", "rank": 0.25, "refresh": 1}
    assert small["drift"]["rule"] == "paper"
    assert fedsub["space"] == {"name": "gaussian", "rank": 5, "refresh": 5}  # as often as its own
    assert (plan.metric, plan.goal, plan.seeds, plan.tail) == ("rel_err", "min", 3, 1)


def test_grids_for_all_and_for_one(tmp_path: Path) -> None:
    plan = asked(
        spec_file(tmp_path),
        methods=["fedavg,ssf,ssf:drift.rule=paper as Paper"],
        grids=["ssf:space.refresh=1,5", "Paper:lr=0.5", "method.lr=0.01,0.1"],
    )
    assert [v.grid for v in plan.variants] == [
        {"method.lr": [0.01, 0.1]},
        {"method.space.refresh": [1, 5], "method.lr": [0.01, 0.1]},
        {"method.space.refresh": [1, 5], "method.lr": [0.5]},
    ]


def test_a_grid_of_ranks_keeps_the_kind_of_subspace(tmp_path: Path) -> None:
    plan = asked(spec_file(tmp_path), methods=["ssf,fedavg"], grids=["ssf:rank=0.25,0.5"])
    ssf = plan.variants[0]
    found = [plan.spec(ssf, point).table()["method"]["space"] for point in ssf.points()]
    assert found == [{"name": "gaussian", "rank": rank, "refresh": 1} for rank in (0.25, 0.5)]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown method": ({"methods": ["fedavgg"]}, "did you mean 'fedavg'?"),
    "unknown setting": ({"methods": ["ssf:drft=none"]}, "did you mean 'drift'?"),
    "unknown part": ({"methods": ["ssf:drift.rul=paper"]}, "did you mean 'rule'?"),
    "two of one label": ({"methods": ["ssf,ssf"]}, "two methods have the label 'ssf'"),
    "no value": ({"methods": ["ssf:drift"]}, "written name:key=value,key=value"),
    "another name": ({"methods": ["ssf:name=fedavg"]}, "written name:key=value,key=value"),
    "two values": ({"methods": ["ssf:lr=0.1,lr=0.2"]}, "sets a key twice"),
    "grid without values": ({"grids": ["lr"]}, "--grid needs key=value"),
    "grid of nobody": (
        {"grids": ["fedavg:lr=1"]},
        "`label of a grid` must be one of ssf, got 'fedavg'",
    ),
    "grid of the task": ({"grids": ["task.het=1,2"]}, "the method of ssf has no setting 'task'"),
    "grid of another's key": (
        {"methods": ["ssf,fedavg"], "grids": ["rank=1,2"]},
        "the method of fedavg has no setting 'rank'; tune settings of methods, each for those",
    ),
    "bad value": ({"grids": ["lr=0.1,-1"]}, "lr` must be a positive number, got -1"),
    "metric": ({"metric": "accuracy"}, "`metric` must be one of loss, rel_err, got 'accuracy'"),
    "seeds": ({"seeds": 0}, "`seeds` must be a whole number of at least 1"),
    "rank over d": (
        {"grids": ["space.rank=3,20"]},
        "`rank` 20 is larger than the 12 inputs of block 'X'",
    ),
    "small budget": ({"budget": ["up=10B"]}, "less than one round of 'ssf'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(name: str, tmp_path: Path) -> None:
    options, words = MISTAKES[name]
    with pytest.raises(SpecError) as error:
        requested(spec_file(tmp_path), **options)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_comparison_is_a_file(tmp_path: Path) -> None:
    study = requested(
        spec_file(tmp_path),
        methods=["fedavg,ssf:rank=0.5"],
        grids=["lr=0.01,0.02"],
        budget=["up=2kB", "rounds=30"],
        tune_rounds=4,
        metric="loss",
    )
    path = tmp_path / "comparison.toml"
    path.write_text(tomli_w.dumps(table_of(study)))
    assert requested(path) == study
    assert asked(path, metric="rel_err", goal="max", seeds=1).goal == "max"
    assert asked(path, changes=["task.het=0.0"]).base["task"]["het"] == 0.0
    with pytest.raises(SpecError, match="is a complete comparison"):
        requested(path, methods=["fedavg"])
    for broken, words in (
        ("seed = 1\n", "did you mean 'seeds'"),
        ("[variants.a]\nlable = 'x'\n", "did you mean 'label'"),
    ):
        path.write_text(broken + "[variants.b]\n[base]\n")
        with pytest.raises(SpecError, match=words):
            requested(path)


def test_with_a_budget_every_methods_schedule_spans_its_own_rounds(tmp_path: Path) -> None:
    """A schedule of the base's length would leave a method with more rounds at a thousandth of its step."""
    part = asked(
        spec_file(tmp_path),
        methods=["fedavg, ssf:rank=0.25"],
        budget=["up=100kB"],
        changes=["method.schedule=cosine", "method.lr=0.1"],
    )
    fedavg, ssf = (part.spec(variant, {}) for variant in part.variants)
    assert ssf.rounds == 2 * fedavg.rounds
    for spec in (fedavg, ssf):
        problem = spec.task.build((0,), spec)
        loop = Loop(
            spec.method, problem, Simulator(spec.method, problem), (0,), 2, rounds=spec.rounds
        )
        middle = replace(loop._round(), t=spec.rounds // 2)
        assert spec.method.rate(middle) == pytest.approx(0.05, rel=0.1)  # type: ignore[attr-defined]
