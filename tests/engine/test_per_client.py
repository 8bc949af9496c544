"""Metrics of each client: on what data, in what table, after an interruption, and who is worst."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.errors import FedspanError, SpecError
from fedspan.engine.loop import Loop, Row
from fedspan.engine.provenance import CLIENTS as NAME
from fedspan.methods import FedAvg
from support.files import damage

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)
CLIENTS = {
    "Bern": {"train": (X[:20], Y[:20]), "test": (X[40:50], Y[40:50])},
    "Graz": (X[20:35], Y[20:35]),
    "Lyon": (X[35:], (Y[35:] + 1) % 4),
}


def fit(**settings: Any) -> fedspan.Result:
    torch.manual_seed(0)
    settings = {"method": FedAvg(lr=0.3), "rounds": 5, "progress": False, "test": (X, Y)} | settings
    return fedspan.fit(nn.Linear(8, 4), CLIENTS, **settings)


def test_clients_are_evaluated_on_their_own_test_data_or_their_training_data() -> None:
    result = fit(eval_clients_every=2)
    table = result.per_client
    assert [row["round"] for row in table[::3]] == [0, 2, 4, 5]
    assert [(row["client"], row["data"], row["examples"]) for row in table.last] == [
        ("Bern", "test", 10),
        ("Graz", "train", 15),
        ("Lyon", "train", 25),
    ]
    assert repr(table) == "PerClient(3 clients, 4 evaluations of loss, accuracy)"
    model = result.model.eval()
    with torch.no_grad():
        right = (model(X[40:50]).argmax(1) == Y[40:50]).double().mean()
    assert table.last[0]["accuracy"] == pytest.approx(float(right))


def test_the_worst_client_and_the_spread() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    table = fit(eval_clients_every=5).per_client
    values = {row["client"]: row["accuracy"] for row in table.last}
    assert table.worst()["accuracy"] == min(values.values()) < max(values.values())
    assert table.worst("loss")["loss"] == max(row["loss"] for row in table.last)
    spread = table.spread()
    assert spread["min"] == min(values.values())
    assert spread["median"] == sorted(values.values())[1]
    assert spread["std"] > 0
    frame = table.to_pandas()
    assert list(frame.columns) == ["round", "client", "data", "examples", "loss", "accuracy"]
    axis = table.plot("loss")
    assert axis.get_ylabel() == "loss of each client"
    assert "worst: client" in axis.get_legend().get_texts()[0].get_text()


class StopAt(fedspan.Callback):
    def on_evaluate(self, run: Loop, row: Row) -> None:
        if row.round == 3:
            run.stop = True  # as Ctrl-C does


def test_the_table_survives_an_interruption_and_the_disk(tmp_path: Path) -> None:
    whole = fit(eval_clients_every=1)
    fit(eval_clients_every=1, run_dir=tmp_path / "run", callbacks=[StopAt()])
    again = fit(eval_clients_every=1, run_dir=tmp_path / "run", resume=True)
    assert (
        list(again.per_client)
        == list(whole.per_client)
        == list(fedspan.load(tmp_path / "run").per_client)
    )
    whole.save(tmp_path / "saved")
    assert list(fedspan.load(tmp_path / "saved").per_client) == list(whole.per_client)


def test_seeds_are_told_apart(tmp_path: Path) -> None:
    result = fit(eval_clients_every=5, seeds=2, run_dir=tmp_path)
    assert {row["seed"] for row in result.per_client} == {0, 1}
    assert list(fedspan.load(tmp_path).per_client) == list(result.per_client)


def test_it_is_a_setting_of_a_spec_and_changes_no_numbers() -> None:
    task = {"name": "classification", "data": "digits", "partition": {"name": "iid", "clients": 3}}
    spec = {"rounds": 2, "method": {"name": "fedavg", "lr": 0.1}, "task": task}
    with_clients = fedspan.run(spec | {"eval_clients_every": 2}, progress=False)
    assert [row["client"] for row in with_clients.per_client.last] == ["0", "1", "2"]
    plain = fedspan.run(spec, progress=False)
    assert [row["loss"] for row in plain.history] == [row["loss"] for row in with_clients.history]


def test_mistakes_are_named() -> None:
    with pytest.raises(SpecError, match="set `eval_clients_every`"):
        fit().per_client.worst()
    with pytest.raises(
        SpecError, match="`eval_clients_every` must be a multiple of `eval_every`, 2, got 3"
    ):
        fit(eval_every=2, eval_clients_every=3)
    with pytest.raises(
        SpecError, match="`eval_clients_every` must be a whole number of at least 1, got 0"
    ):
        fit(eval_clients_every=0)
    table = {"rounds": 1, "method": {"name": "fedavg", "lr": 0.1}, "task": {"name": "regression"}}
    with pytest.raises(SpecError, match="`eval_clients_every` needs a task with a torch model"):
        fedspan.run(table | {"eval_clients_every": 1})


def test_a_run_that_is_stopped_early_ends_with_its_clients() -> None:
    stopping = fedspan.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)
    result = fit(eval_clients_every=10, rounds=9, callbacks=[stopping])
    assert result.status.startswith("stopped")
    assert {row["round"] for row in result.per_client.last} == {result.history[-1]["round"]} != {0}


def test_clients_with_test_data_of_their_own_need_no_other() -> None:
    table = fit(test=None, eval_clients_every=5, metrics=["accuracy", "f1_macro"]).per_client
    assert 0 <= table.last[0]["f1_macro"] <= 1


@pytest.mark.parametrize("how", ["delete", "cut", "empty", "zeros", "double", "flip", "other run"])
def test_a_damaged_table_is_refused(how: str, tmp_path: Path) -> None:
    """Whether the run goes on or is read again; a table that is cut after its checkpoint's rows does no harm."""
    for name in ("run", "other"):
        fit(
            eval_clients_every=1,
            run_dir=tmp_path / name,
            callbacks=[StopAt()],
            method=FedAvg(lr=0.3 if name == "run" else 0.2),
        )
    file = tmp_path / "run" / NAME
    if how == "other run":
        file.write_bytes((tmp_path / "other" / NAME).read_bytes())
    else:
        damage(file, how)
    if how == "double":  # lines after those of the checkpoint do no harm
        whole = fit(eval_clients_every=1)
        again = fit(eval_clients_every=1, run_dir=tmp_path / "run", resume=True)
        assert list(again.per_client) == list(whole.per_client)
        return
    with pytest.raises(
        FedspanError, match=r"per_client.jsonl' is (missing|of another|damaged)"
    ) as refused:
        fit(eval_clients_every=1, run_dir=tmp_path / "run", resume=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [NAME, "lr.json"])
def test_a_finished_run_whose_small_files_changed_is_not_loaded(name: str, tmp_path: Path) -> None:
    result = fit(
        eval_clients_every=5, run_dir=tmp_path / "run", method=FedAvg(lr="search"), rounds=3
    )
    assert fedspan.load(tmp_path / "run").lr_search == result.lr_search
    damage(tmp_path / "run" / name, "flip")
    with pytest.raises(FedspanError) as refused:
        fedspan.load(tmp_path / "run")
    assert "\n" not in str(refused.value)
