"""A finished run goes on: to more rounds, with the same bits as a longer run, and with another step size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedspan
from conftest import Interrupt
from fedspan.callbacks import KeepBest
from fedspan.cli import audit as audit_command
from fedspan.core.errors import CheckpointError
from fedspan.methods import SSF, FedAvg, Scaffold

DRAW = torch.Generator().manual_seed(0)
CLIENTS = [
    (torch.randn(n, 6, generator=DRAW), torch.randint(0, 3, (n,), generator=DRAW))
    for n in (12, 20, 9, 16)
]
SETTINGS: dict[str, Any] = {
    "method": SSF(lr=0.1, local_steps=3), "test": CLIENTS[0], "eval_every": 5, "batch_size": 8, "clients_per_round": 2,
    "progress": False,
}  # fmt: skip


def network(norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(1)
    middle = torch.nn.BatchNorm1d(96) if norm else torch.nn.Identity()
    return torch.nn.Sequential(
        torch.nn.Linear(6, 96), middle, torch.nn.ReLU(), torch.nn.Linear(96, 3)
    )


def fit(out: Path | None, rounds: int, model: torch.nn.Module | None = None, **more: Any) -> Any:
    return fedspan.fit(
        model or network(), CLIENTS, rounds=rounds, run_dir=out, **{**SETTINGS, **more}
    )


def numbers(result: Any, **_: Any) -> list[dict[str, Any]]:
    """The evaluations without the time they took."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in result.history]


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.weights[0], other.weights[0]
    return numbers(one) == numbers(other) and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize("method", ["ssf", "scaffold", "fedavg"])
def test_a_finished_run_goes_on_as_if_it_had_not_stopped(method: str, tmp_path: Path) -> None:
    how = {"ssf": SSF, "scaffold": Scaffold, "fedavg": FedAvg}[method](lr=0.1, local_steps=3)
    more = {"method": how, "callbacks": [KeepBest()], "participation": {"weights": "uniform"}}
    whole = fit(tmp_path / "whole", 20, **more)
    for rounds in (5, 10, 20):
        found = fit(tmp_path / "run", rounds, resume=rounds > 5, **more)
        assert found.history[-1]["round"] == rounds
    assert same(found, whole)
    assert found.model_rounds == whole.model_rounds
    assert same(fedspan.load(tmp_path / "run"), whole)


@pytest.mark.filterwarnings("error")
def test_the_model_that_was_trained_may_be_given_again(tmp_path: Path) -> None:
    """In a notebook the same object is trained on, also with running statistics: nothing is to be warned of."""
    model = network(norm=True)
    fit(tmp_path / "run", 5, model)
    found = fit(tmp_path / "run", 10, model, resume=True)
    assert same(found, fit(None, 10, network(norm=True)))


def test_several_seeds_go_on(tmp_path: Path) -> None:
    whole = fit(None, 10, seeds=2)
    fit(tmp_path / "run", 5, seeds=2)
    found = fit(tmp_path / "run", 10, seeds=2, resume=True)
    assert [line[-1]["loss"] for line in found.runs] == [line[-1]["loss"] for line in whole.runs]


def test_fewer_rounds_than_were_run_are_refused_in_one_line(tmp_path: Path) -> None:
    fit(tmp_path / "run", 10)
    with pytest.raises(CheckpointError, match=r"`rounds` is 5, but the run in .* is at round 10"):
        fit(tmp_path / "run", 5, resume=True)
    assert fit(tmp_path / "run", 10, resume=True).history[-1]["round"] == 10


def test_another_step_size_is_recorded_everywhere(tmp_path: Path) -> None:
    fit(tmp_path / "run", 10)
    with pytest.raises(CheckpointError, match=r"method.lr = 0.1, not 0.03; give more `rounds`"):
        fit(tmp_path / "run", 10, method=SSF(lr=0.03, local_steps=3), resume=True)
    found = fit(tmp_path / "run", 20, method=SSF(lr=0.03, local_steps=3), resume=True)
    said = "round 10: lr is 0.03 from here on, and was 0.1"
    assert [line["round"] for line in found.history if said in line.get("events", ())] == [15]
    lines = [
        json.loads(one) for one in (tmp_path / "run" / "history.jsonl").read_text().split("\n")[:-1]
    ]
    headers = [line for line in lines if "spec" in line]
    assert [line["spec"]["method"]["lr"] for line in headers] == [0.1, 0.03]
    assert [line.get("lr") for line in headers] == [None, [[0, 0.1], [10, 0.03]]]
    card = json.loads((tmp_path / "run" / "result.json").read_text())
    assert card["lr"] == [[0, 0.1], [10, 0.03]]
    assert card["spec"]["method"]["lr"] == 0.03
    trail = (tmp_path / "run" / "audit.jsonl").read_text()
    assert "lr is 0.03 from here on" in trail
    assert audit_command.command(tmp_path / "run") == 0
    assert found.history[-1]["loss"] != fit(None, 20).history[-1]["loss"]
    fit(tmp_path / "run", 25, method=SSF(lr=0.01, local_steps=3), resume=True)
    card = json.loads((tmp_path / "run" / "result.json").read_text())
    assert card["lr"] == [[0, 0.1], [10, 0.03], [20, 0.01]]


def test_an_unfinished_run_goes_on_with_another_step_size(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", 10, callbacks=[Interrupt(4)])
    found = fit(tmp_path / "run", 10, method=SSF(lr=0.03, local_steps=3), resume=True)
    assert "round 4: lr is 0.03 from here on, and was 0.1" in found.history[1]["events"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SSF(lr=0.03, local_steps=4), "made with method.local_steps = 3, not 4"),
        (SSF(lr=0.03, local_steps=3, rank=0.3), "made with method.space"),
        (FedAvg(lr=0.03, local_steps=3), "made with method.name"),
    ],
)
def test_nothing_else_may_change(method: Any, words: str, tmp_path: Path) -> None:
    fit(tmp_path / "run", 5)
    with pytest.raises(CheckpointError, match=words):
        fit(tmp_path / "run", 10, method=method, resume=True)


def test_a_schedule_that_spans_the_run_keeps_no_checkpoint(tmp_path: Path) -> None:
    method = SSF(lr=0.1, local_steps=3, schedule="cosine")
    fit(tmp_path / "run", 5, method=method)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()
    with pytest.raises(CheckpointError, match="its schedule spans the run"):
        fit(tmp_path / "run", 10, method=method, resume=True)


def test_a_rule_for_the_step_size_is_refused_where_a_number_began_the_run(tmp_path: Path) -> None:
    fit(tmp_path / "run", 5)
    with pytest.raises(fedspan.FedspanError, match="was begun with a number; give a number"):
        fit(tmp_path / "run", 10, method="ssf", resume=True)
