"""Callbacks end runs, keep the best model and add columns, also where a run is interrupted and resumed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedspan
from fedspan.callbacks import CSV, Checkpoint, Diagnostics, EarlyStopping, KeepBest
from fedspan.core.callback import Callback
from fedspan.core.errors import CheckpointError, SpecError
from support.loops import RUN as TABLE
from support.loops import Interrupt


class Zigzag(Callback):
    """A metric that is best in one round."""

    def __init__(self, best: int) -> None:
        self.best = best

    def measure(self, run: Any) -> Any:
        return {"score": np.full(len(run.seeds), -abs(run.t - self.best), float)}


class EndAt(Callback):
    def __init__(self, t: int) -> None:
        self.t = t

    def on_round_end(self, run: Any) -> None:
        if run.t == self.t:
            run.end("enough")


def clean(result: fedspan.Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in result.history]


def test_early_stopping_counts_on_after_an_interruption(tmp_path: Path) -> None:
    callbacks = [Zigzag(4), EarlyStopping("score", patience=5)]
    whole = fedspan.run(TABLE, callbacks=callbacks)
    assert whole.status == "stopped at round 9: no better score in 5 evaluations"
    assert whole.finished
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(TABLE, tmp_path / "o", callbacks=[*callbacks, Interrupt(7)])
    assert clean(fedspan.run(TABLE, tmp_path / "o", resume=True, callbacks=callbacks)) == clean(
        whole
    )
    again = fedspan.run(TABLE | {"rounds": 60}, tmp_path / "o", resume=True, callbacks=callbacks)
    assert (again.status, clean(again)) == (
        whole.status,
        clean(whole),
    )  # a run that was stopped stays so


def test_early_stopping_does_not_wait_for_a_seed_that_diverged() -> None:
    class Run:
        lines: ClassVar[Any] = [
            [{"score": 0.0, "diverged": True}],
            [{"score": 1.0}, {"score": 0.5}, {"score": 0.4}],
        ]
        metrics = ()
        reason = ""

        def end(self, reason: str) -> None:
            self.reason = reason

    run: Any = Run()
    EarlyStopping("score", patience=2).on_evaluate(run, None)  # type: ignore[arg-type]
    assert run.reason == "no better score in 2 evaluations"


def test_the_best_model_survives_an_interruption(tmp_path: Path) -> None:
    callbacks = [Zigzag(4), KeepBest("score")]
    best = fedspan.run(TABLE | {"rounds": 4})
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(TABLE, tmp_path / "o", callbacks=[*callbacks, Interrupt(9)])
    result = fedspan.run(TABLE, tmp_path / "o", resume=True, callbacks=callbacks)
    assert torch.equal(result.weights[0]["X"], best.weights[0]["X"])
    assert torch.equal(fedspan.load(tmp_path / "o").weights[0]["X"], best.weights[0]["X"])
    assert not (tmp_path / "o" / "best.safetensors").exists()


def test_the_best_model_survives_a_longer_run(tmp_path: Path) -> None:
    callbacks = [Zigzag(4), KeepBest("score")]
    best = fedspan.run(TABLE | {"rounds": 4})
    fedspan.run(TABLE, tmp_path / "o", callbacks=callbacks)
    longer = fedspan.run(TABLE | {"rounds": 35}, tmp_path / "o", resume=True, callbacks=callbacks)
    assert torch.equal(longer.weights[0]["X"], best.weights[0]["X"])


def test_a_callback_that_ends_a_run_between_evaluations_gets_a_last_one() -> None:
    result = fedspan.run(TABLE | {"eval_every": 10}, callbacks=[EndAt(13)])
    assert result.status == "stopped at round 13: enough"
    assert [line["round"] for line in result.history] == [0, 10, 13]
    assert torch.equal(result.weights[0]["X"], fedspan.run(TABLE | {"rounds": 13}).weights[0]["X"])


def test_hooks_come_in_order() -> None:
    told: list[str] = []

    class Told(Callback):
        def on_run_start(self, run: Any) -> None:
            told.append(f"start {run.t}")

        def on_round_end(self, run: Any) -> None:
            told.append(f"round {run.t}")

        def on_evaluate(self, run: Any, row: Any) -> None:
            told.append(f"row {row.round}")

        def on_run_end(self, run: Any, result: Any) -> None:
            told.append(result.status)

    fedspan.run(TABLE | {"rounds": 2, "eval_every": 2}, callbacks=[Told()])
    assert told == ["start 0", "row 0", "round 1", "round 2", "row 2", "finished"]


def test_diagnostics_add_columns_and_change_nothing_else(tmp_path: Path) -> None:
    table = TABLE | {
        "rounds": 3,
        "method": {"name": "ssf", "lr": 0.02, "local_steps": 3, "rank": 0.5},
    }
    plain = fedspan.run(table)
    watched = fedspan.run(table | {"callbacks": [{"name": "diagnostics"}]}, tmp_path / "o")
    added = {"grad_sq", "drift", "control_error", "control_gap", "correction_cos"}
    assert added <= set(watched.metrics)
    assert [{k: v for k, v in line.items() if k not in added} for line in clean(watched)] == clean(
        plain
    )
    with pytest.raises(CheckpointError, match="callbacks"):
        fedspan.run(table | {"rounds": 5}, tmp_path / "o", resume=True)
    assert isinstance(fedspan.Spec.from_table(watched.spec).callbacks[0], Diagnostics)


def test_models_are_kept_every_so_many_rounds(tmp_path: Path) -> None:
    kept = [{"name": "checkpoint", "every": 2, "keep": 2}]
    result = fedspan.run(TABLE | {"rounds": 7, "callbacks": kept}, tmp_path)
    files = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert files == ["round-000004.safetensors", "round-000006.safetensors"]
    at_six = fedspan.run(TABLE | {"rounds": 6}).weights[0]["X"]
    assert torch.equal(load_file(tmp_path / "models" / files[-1])["X"], at_six)
    assert not torch.equal(at_six, result.weights[0]["X"])


def test_a_table_of_the_evaluations(tmp_path: Path) -> None:
    fedspan.run(
        TABLE | {"rounds": 4, "callbacks": [{"name": "csv"}]},
        tmp_path / "run",
        callbacks=[EndAt(2)],
        seeds=2,
    )
    rows = list(csv.DictReader((tmp_path / "run" / "history.csv").read_text().splitlines()))
    assert [(row["seed"], row["round"]) for row in rows] == [(s, r) for s in "01" for r in "012"]
    history = fedspan.load(tmp_path / "run").history
    assert [float(row["rel_err"]) for row in rows] == [line["rel_err"] for line in history]
    with pytest.raises(SpecError, match="CSV needs `log_dir` where the run has no `run_dir`"):
        fedspan.run(TABLE, callbacks=[CSV()])


def test_a_run_that_fails_closes_what_is_open() -> None:
    told: list[str] = []

    class Told(Callback):
        def on_evaluate(self, run: Any, row: Any) -> None:
            raise ValueError("mine")

        def on_run_error(self, run: Any) -> None:
            told.append("closed")

    with pytest.raises(ValueError, match="mine"):
        fedspan.run(TABLE, callbacks=[Told()])
    assert told == ["closed"]


def test_without_test_data_callbacks_go_by_the_training_loss() -> None:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    settings: Any = {"method": "fedavg", "rounds": 3, "progress": False, "callbacks": [KeepBest()]}
    result = fedspan.fit(torch.nn.Linear(4, 2), [(x, (x[:, 0] > 0).long())], **settings)
    assert result.metrics == ["training_loss"]
    assert result.best is not None
    assert result.best["training_loss"] == min(line["training_loss"] for line in result.history)


def test_mistakes_are_named() -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(
            SpecError, match=f"`every` must be a whole number of at least 1, got {wrong}"
        ):
            Checkpoint(every=wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="`patience` must be a whole number of at least 1, got -1"):
        EarlyStopping(patience=-1)
    with pytest.raises(SpecError, match="`patience` must be a whole number of at least 1, got 0"):
        EarlyStopping(patience=0)
    with pytest.raises(SpecError, match="`min_delta` must be a number of at least 0, got -1"):
        EarlyStopping(min_delta=-1)
    with pytest.raises(
        SpecError, match=r"`metric` must be one of loss, rel_err, got 'los'.*did you mean 'loss'"
    ):
        fedspan.run(TABLE, callbacks=[KeepBest("los")])
    with pytest.raises(SpecError, match="did you mean 'early_stopping'"):
        fedspan.Spec.from_table(TABLE | {"callbacks": [{"name": "early_stoping"}]})
    with pytest.raises(SpecError, match=r"must be a list"):
        fedspan.Spec.from_table(TABLE | {"callbacks": {"name": "keep_best"}})
