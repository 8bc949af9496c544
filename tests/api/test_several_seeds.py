"""Several seeds of `fit`: each begins with the weights that were given, and is the run of that seed alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan.callbacks import EarlyStopping, KeepBest
from fedspan.methods import FedAvg, Scaffold

X = torch.randn(90, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
CLIENTS = [(X[i:60:3], Y[i:60:3]) for i in range(3)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


def fit(model: nn.Module | None = None, **settings: Any) -> fedspan.Result:
    defaults = {
        "method": FedAvg(lr=0.1),
        "rounds": 3,
        "batch_size": 8,
        "test": (X[60:], Y[60:]),
        "progress": False,
    }
    return fedspan.fit(model or network(), CLIENTS, **(defaults | settings))


def values(result: fedspan.Result, run: int = 0) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key != "seconds"} for line in result.runs[run]
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"method": Scaffold(lr=0.1)},
        {"callbacks": [KeepBest()]},
        {"callbacks": [EarlyStopping(patience=1), KeepBest("accuracy")], "rounds": 8},
    ],
    ids=["fedavg", "scaffold", "keep_best", "early_stopping"],
)
@pytest.mark.parametrize("kept", [False, True], ids=["in_memory", "run_dir"])
def test_each_seed_is_the_run_of_that_seed_alone(
    settings: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    model = network()
    together = fit(model, seeds=3, run_dir=tmp_path / "o" if kept else None, **settings)
    for number in range(3):
        alone = fit(seed=number, **settings)
        assert values(together, number) == values(alone)
        assert all(
            torch.equal(together.weights[number][name], value)
            for name, value in alone.weights[0].items()
        )
    assert together.model is model
    assert all(
        torch.equal(together.weights[0][name], value) for name, value in model.state_dict().items()
    )


def test_each_seed_has_states_on_disk_of_its_own(tmp_path: Path) -> None:
    scaffold = {"method": Scaffold(lr=0.1), "clients_per_round": 2, "seeds": 2}
    disk, memory = fit(engine=fedspan.Engine(states_dir=tmp_path), **scaffold), fit(**scaffold)
    for one, other in zip(disk.weights, memory.weights, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def test_a_search_of_the_step_size_leaves_the_start_as_it_was() -> None:
    plain, searched = fit(seeds=2), fit(seeds=2, method=FedAvg(lr="search"), rounds=12)
    starts = [line[0]["loss"] for result in (plain, searched) for line in result.runs]
    assert len(set(starts)) == 1


def test_the_model_holds_the_first_seeds_weights_when_a_later_seed_fails() -> None:
    class Fail(fedspan.Callback):
        def on_evaluate(self, run: Any, row: Any) -> None:
            if run.seeds == (1,) and row.round == 2:
                raise ZeroDivisionError

    model = network()
    with pytest.raises(ZeroDivisionError):
        fit(model, seeds=3, callbacks=[Fail()])
    first = fit().weights[0]
    assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())
