"""Loggers: every row of every seed reaches the tracker under its round; where one is missing nothing is written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedspan
from fedspan import Spec
from fedspan.callbacks import TensorBoard, WandB
from fedspan.core.errors import FedspanError, SpecError
from fedspan.engine import history
from fedspan.methods import FedAvg
from fedspan.nn.models import mlp
from support.loops import SMALL

TABLE: dict[str, Any] = {
    "rounds": 6,
    "eval_every": 2,
    "seed": 3,
    "method": {"name": "fedavg", "lr": 0.02, "local_steps": 2},
    "task": SMALL,
}


class Run:
    """What `wandb.init` gives, here a list of what it was told."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.logged, self.finished = options, [], False  # type: ignore[var-annotated]

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.finished
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """A stand-in for the library that remembers its runs."""
    runs: list[Run] = []
    module: Any = ModuleType("wandb")
    module.init = lambda **options: runs.append(Run(options)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return runs


def rows(place: Path) -> list[tuple[int, dict[str, float]]]:
    return [(row.pop("round"), row) for row in history.read(place / "history.jsonl")[1]]


def test_wandb_hears_every_row_of_every_seed(wandb: list[Run], tmp_path: Path) -> None:
    fedspan.run(Spec.from_table(TABLE), tmp_path / "o", seeds=2, callbacks=[WandB()])
    assert [run.logged for run in wandb] == [
        rows(tmp_path / "o" / f"seed-{seed}") for seed in (3, 4)
    ]
    assert [step for step, _ in wandb[0].logged] == [0, 2, 4, 6]
    assert [run.options["name"] for run in wandb] == ["o/seed-3", "o/seed-4"]
    assert [run.options["config"]["seed"] for run in wandb] == [3, 4]
    assert wandb[0].options["config"]["method"]["name"] == "fedavg"
    assert (wandb[0].options["mode"], wandb[0].options["dir"]) == ("offline", str(tmp_path / "o"))
    assert all(run.finished for run in wandb)


def test_the_environment_may_ask_for_another_mode(
    wandb: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    fedspan.run(Spec.from_table(TABLE), tmp_path / "o", callbacks=[WandB()])
    assert wandb[0].options["mode"] == "disabled"


def test_a_run_that_diverges_is_closed_with_its_last_row(wandb: list[Run], tmp_path: Path) -> None:
    table = TABLE | {"method": TABLE["method"] | {"lr": 50.0}}
    with pytest.warns(UserWarning, match="diverged"):
        fedspan.run(Spec.from_table(table), tmp_path / "o", callbacks=[WandB()])
    ((step, values),) = wandb[0].logged[-1:]
    assert step == history.read(tmp_path / "o" / "history.jsonl")[1][-1]["round"]
    assert "diverged" not in values
    assert wandb[0].finished


def test_fit_without_a_run_directory_needs_a_place_to_log_to(
    wandb: list[Run], tmp_path: Path
) -> None:
    x, y = torch.randn(12, 1, 8, 8), torch.arange(12) % 3
    settings: dict[str, Any] = {
        "method": FedAvg(lr=0.1, local_steps=1),
        "rounds": 2,
        "test": (x, y),
    }
    clients = [(x[:6], y[:6]), (x[6:], y[6:])]
    with pytest.raises(SpecError, match="WandB needs `log_dir` where the run has no `run_dir`"):
        fedspan.fit(mlp((1, 8, 8), 3), clients, callbacks=[WandB()], **settings)
    result = fedspan.fit(
        mlp((1, 8, 8), 3), clients, callbacks=[WandB(log_dir=tmp_path)], **settings
    )
    assert [(step, values["accuracy"]) for step, values in wandb[0].logged] == [
        (line["round"], line["accuracy"]) for line in result.history
    ]


@pytest.mark.parametrize(("name", "kind"), [("tensorboard", TensorBoard), ("wandb", WandB)])
def test_what_is_missing_is_named(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        FedspanError, match=rf"{name} is not installed; pip install 'fedspan\[{name}\]'"
    ):
        kind()
    with pytest.raises(FedspanError, match="is not installed"):
        Spec.from_table(TABLE | {"callbacks": [{"name": name}]})


def test_a_spec_that_is_refused_logs_nothing(wandb: list[Run], tmp_path: Path) -> None:
    fedspan.run(Spec.from_table(TABLE), tmp_path / "o")
    with pytest.raises(SpecError, match="already holds a run"):
        fedspan.run(Spec.from_table(TABLE), tmp_path / "o", callbacks=[WandB()])
    assert wandb == []


def test_tensorboard_keeps_every_row(tmp_path: Path) -> None:
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install 'fedspan[tensorboard]'"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    short, whole = (Spec.from_table(TABLE | {"rounds": rounds}) for rounds in (4, 8))
    fedspan.run(short, tmp_path / "o", seeds=2, callbacks=[TensorBoard()])
    fedspan.run(whole, tmp_path / "o", seeds=2, callbacks=[TensorBoard()], resume=True)
    for seed in (3, 4):
        found = EventAccumulator(str(tmp_path / "o" / "tensorboard" / f"seed-{seed}"))
        found.Reload()
        wanted = rows(tmp_path / "o" / f"seed-{seed}")
        assert set(found.Tags()["scalars"]) == set(wanted[0][1])
        for name in ("rel_err", "up_bytes"):
            events = [(event.step, event.value) for event in found.Scalars(name)]
            assert [step for step, _ in events] == [0, 2, 4, 6, 8]
            assert [value for _, value in events] == pytest.approx(
                [values[name] for _, values in wanted], rel=1e-6
            )
