"""Hospitals on Flower with tables of their own: features, numbers of examples, evaluation where the data are."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import Message
from sklearn.metrics import roc_auc_score

import fedspan
from fedspan.cli import audit
from fedspan.core.errors import FedspanError
from fedspan.core.spec import Spec
from support.flower import events_of, inside_a_task, serve  # noqa: F401
from support.sites import ILL, Sites, spec_of


def both(tmp_path: Path, **others: Any) -> tuple[Any, Any, Sites]:
    spec = spec_of(tmp_path, **others)
    here = fedspan.run(spec, tmp_path / "here", progress=False)
    grid = Sites(spec, tmp_path, tmp_path / "states")
    return here, serve(spec, grid, tmp_path / "there"), grid


def test_sites_give_the_simulators_numbers(tmp_path):
    here, there, grid = both(tmp_path)
    assert grid.statuses.count("describe") == 3
    assert grid.statuses.count("sums") == 9
    for name in ("clients_auroc", "clients_accuracy", "worst_auroc", "clients_loss"):
        assert there.history[-1][name] == pytest.approx(here.history[-1][name], rel=1e-5)
    assert [row["client"] for row in there.per_client if row["round"] == 4] == ["h0", "h1", "h2"]
    for one, other in zip(here.per_client, there.per_client, strict=True):
        assert one["examples"] == other["examples"]
        assert one["auroc"] == pytest.approx(other["auroc"], rel=1e-5)
    a, b = (json.loads((tmp_path / one / "model.json").read_text()) for one in ("here", "there"))
    for one, other in zip(a["schema"]["columns"], b["schema"]["columns"], strict=True):
        assert one["kind"] == other["kind"]
        assert one["mean"] == other["mean"]
        assert one["deviation"] == other["deviation"]
    assert a["classes"] == b["classes"]


def test_clients_count_by_the_examples_that_they_say_they_have(tmp_path):
    both(tmp_path)
    agreed = json.loads((tmp_path / "there" / "agreed.json").read_text())
    assert agreed["examples"] == [len(t) - round(0.2 * len(t)) for t in ILL.values()]
    x, y = (fedspan.load(tmp_path / one).weights[0] for one in ("here", "there"))
    for name in x:
        assert np.allclose(x[name], y[name], rtol=0, atol=1e-5)
    other = spec_of(tmp_path, participation={"weights": "uniform"})
    grid = Sites(other, tmp_path, tmp_path / "states-2")
    z = serve(other, grid, tmp_path / "uniform").weights[0]
    assert any(not np.allclose(x[name], z[name], rtol=0, atol=1e-4) for name in x)


def test_a_finished_run_goes_on_with_another_step_size_and_clients_keep_their_states(tmp_path):
    spec = spec_of(tmp_path, rounds=2)
    serve(spec, Sites(spec, tmp_path, tmp_path / "states"), tmp_path / "there", backup=False)
    method = {"name": "ssf", "lr": 0.03, "local_steps": 2}
    longer = spec_of(tmp_path, method=method)
    grid = Sites(longer, tmp_path, tmp_path / "states")
    there = serve(longer, grid, tmp_path / "there", resume=True, backup=False)
    assert events_of(there) == ["round 2: lr is 0.03 from here on, and was 0.1"]
    fedspan.run(spec, tmp_path / "here", progress=False)
    here = fedspan.run(longer, tmp_path / "here", resume=True, progress=False)
    for name, value in here.weights[0].items():
        assert np.allclose(value, there.weights[0][name], rtol=0, atol=1e-5)


def test_weights_of_rows_and_balanced_classes_are_those_of_the_simulator(tmp_path):
    training = {"class_weights": "balanced"}
    both(tmp_path, data={"weight": "age", "ignore": ["id"]}, training=training)
    x, y = (fedspan.load(tmp_path / one).weights[0] for one in ("here", "there"))
    for name in x:
        assert np.allclose(x[name], y[name], rtol=0, atol=1e-5)
    plain = fedspan.run(spec_of(tmp_path, data={"ignore": ["id", "age"]}), progress=False)
    assert any(not np.allclose(x[name], plain.weights[0][name], atol=1e-4) for name in x)


def test_a_model_trained_on_flower_predicts_and_each_sites_auroc_is_scikit_learns(tmp_path):
    _, there, _ = both(tmp_path)
    found = fedspan.load(tmp_path / "there")
    for i, who in enumerate(("h0", "h1", "h2")):
        table = ILL[who].drop(columns="hospital")
        spec = spec_of(tmp_path, data={"own_file": str(tmp_path / f"{who}.csv"), "own_name": who})
        _, test = spec.task.data.own_rows(i, spec.seed)
        p = found.predict_proba({name: test[name] for name in test})[:, 1]
        (row,) = (r for r in there.per_client if r["round"] == 4 and r["client"] == who)
        assert row["auroc"] == pytest.approx(roc_auc_score(test["ill"] == "yes", p), abs=1e-12)
        assert len(found.predict(table)) == len(table)


def test_a_site_decides_which_metrics_it_tells(tmp_path):
    spec = spec_of(tmp_path)
    grid = Sites(spec, tmp_path, tmp_path / "states", metrics="accuracy")
    found = serve(spec, grid, tmp_path / "out")
    assert set(found.per_client[0]) == {"round", "client", "data", "examples", "accuracy"}
    assert "clients_accuracy" in found.history[-1]
    assert "clients_auroc" not in found.history[-1]
    grid = Sites(spec, tmp_path, tmp_path / "states-2", metrics="none")
    told = events_of(serve(spec, grid, tmp_path / "none"))
    assert any(
        "not evaluated: failed: this client's config allows the metrics 'none'" in one
        for one in told
    )


def test_a_run_is_resumed_and_a_client_that_lost_its_disk_is_told_again(tmp_path):
    spec = spec_of(tmp_path)
    whole = serve(spec, Sites(spec, tmp_path, tmp_path / "s1"), tmp_path / "whole")

    class Failing(Sites):
        def answer(self, message: Message) -> Message | None:
            header = message.content.get("header")
            if header is not None and header["t"] == 2 and header["status"] == "train":
                raise KeyboardInterrupt
            return super().answer(message)

    with pytest.raises(KeyboardInterrupt):
        serve(spec, Failing(spec, tmp_path, tmp_path / "s3"), tmp_path / "part")
    for file in (tmp_path / "s3").rglob("h1.*"):
        file.unlink()
    grid = Sites(spec, tmp_path, tmp_path / "s3")
    found = serve(spec, grid, tmp_path / "part", resume=True)
    assert "describe" not in grid.statuses
    assert any("state restored" in one for one in events_of(found))
    for name, value in whole.weights[0].items():
        assert np.allclose(value, found.weights[0][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"data": ""}, "the node's config needs data"),
        ({"data": "nowhere.csv"}, "its file does not exist"),
        ({"data": 3}, "the node's config has data = 3"),
    ],
)
def test_a_node_without_its_file_is_named(own, said, tmp_path):
    spec = spec_of(tmp_path)
    grid = Sites(spec, tmp_path, tmp_path / "states", **own)
    with pytest.raises(FedspanError) as caught:
        serve(spec, grid, tmp_path / "out")
    assert "client 'h0' refuses 'describe'" in str(caught.value)
    assert said in str(caught.value)
    assert not (tmp_path / "out" / "history.jsonl").exists()


def test_the_split_of_a_client_follows_its_name_and_not_its_number(tmp_path):
    spec = spec_of(tmp_path, data={"standardize": "none"})
    here = spec.task.tables(spec.seed, torch.float64)
    for who in ILL:
        for number in (0, 5):
            own = {"own_file": str(tmp_path / f"{who}.csv"), "own_name": who}
            task = spec_of(tmp_path, data={"standardize": "none"} | own).task
            _, test = task.data.own_rows(number, spec.seed)
            assert torch.equal(torch.from_numpy(here.schema.features(test)), here[who]["test"][0])


def test_a_run_with_partition_ids_in_another_order_is_the_rehearsal(tmp_path):
    spec = spec_of(tmp_path)
    here = fedspan.run(spec, tmp_path / "here", progress=False)
    grid = Sites(spec, tmp_path, tmp_path / "states")
    grid.order = (2, 0, 1)
    there = serve(spec, grid, tmp_path / "there")
    for one in (row for row in here.per_client if row["round"] == 0):
        (other,) = [
            row for row in there.per_client if row["client"] == one["client"] and row["round"] == 0
        ]
        assert one["examples"] == other["examples"]
        assert one["auroc"] == pytest.approx(other["auroc"], rel=1e-5)


def test_the_server_logs_what_the_simulator_prints_of_columns(tmp_path, caplog):
    caplog.set_level("INFO")
    log = logging.getLogger("flwr")
    log.addHandler(caplog.handler)
    try:
        here, _, _ = both(tmp_path)
    finally:
        log.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records]
    lines = here.predictor.schema.lines()
    assert any(line.startswith("classes: no ") for line in lines)
    for line in lines:
        assert f"fedspan {line}" in said


@pytest.mark.parametrize(
    ("column", "cell", "told"),
    [
        ("pressure", "secret", "column 'pressure' has numbers but text in row 5; correct it"),
        ("pressure", "inf", "column 'pressure' in row 5 is not a finite number"),
        ("ill", "", "is empty in row 5"),
    ],
)
def test_a_client_that_refuses_ends_the_wait_and_no_cell_leaves_it(column, cell, told, tmp_path):
    spec = spec_of(tmp_path)
    table = ILL["h1"].drop(columns="hospital").astype({column: object})
    table.loc[4, column] = cell
    table.to_csv(tmp_path / "h1.csv", index=False)
    began = time.monotonic()
    with pytest.raises(FedspanError, match=f"client 'h1' refuses 'describe': .*{told}") as caught:
        serve(spec, Sites(spec, tmp_path, tmp_path / "states"), tmp_path / "there")
    assert time.monotonic() - began < 20
    assert "secret" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_columns_of_two_types_name_the_row_and_no_cell(tmp_path):
    spec = spec_of(tmp_path)
    table = ILL["h1"].drop(columns="hospital").assign(age="secret")
    table.to_csv(tmp_path / "h1.csv", index=False)
    words = r"'age' is numbers at client 'h0' and text at client 'h1' \(row \d\); clean it"
    with pytest.raises(FedspanError, match=words):
        serve(spec, Sites(spec, tmp_path, tmp_path / "states"), tmp_path / "there")


def test_noise_and_an_unknown_number_of_clients_are_refused(tmp_path):
    table = spec_of(tmp_path).table()
    table["task"]["partition"] = {"name": "natural"}
    spec = Spec.from_table(table)
    with pytest.raises(FedspanError, match="how many clients there are"):
        serve(spec, Sites(spec, tmp_path, tmp_path / "s"), tmp_path / "out")


def test_hostile_answers_are_refused(tmp_path):
    from fedspan.remote.sites import to_text

    spec = spec_of(tmp_path)
    honest = {"examples": 5, "classes": [], "others": []}
    for lie in (
        {"examples": -3},
        [],
        honest | {"facts": {"age": 3}},
        honest | {"facts": {"age": {"type": "text"}}},
        honest | {"facts": {"age": {"type": "stranger", "texts": []}}},
    ):

        class Lying(Sites):
            def answer(self, message: Message, lie: Any = lie) -> Message | None:
                found = super().answer(message)
                header = message.content.get("header")
                if header is None or header["status"] != "describe":
                    return found
                from fedspan.remote.flower.records import read_message, write_message

                reply = read_message(found.content, 1 << 24)
                reply.arrays["text"] = to_text(lie)
                return Message(write_message(reply), reply_to=message)

        with pytest.raises(FedspanError, match="does not have its form"):
            serve(spec, Lying(spec, tmp_path, tmp_path / "s"), tmp_path / "out")


def test_a_model_is_chosen_by_the_sites_own_metrics(tmp_path):
    """Clients are evaluated every two rounds, the server's columns every round: every second row has no such metric."""
    chosen: dict[str, Any] = {
        "rounds": 8,
        "eval_every": 1,
        "method": {"name": "ssf", "lr": 0.5, "local_steps": 8},
        "callbacks": [{"name": "keep_best", "metric": "clients_auroc"}],
    }
    for found in both(tmp_path, **chosen)[:2]:
        rows = {row["round"]: row for row in found.history}
        assert [t for t in rows if "clients_auroc" in rows[t]] == [0, 2, 4, 6, 8]
        best = max(rows[t]["clients_auroc"] for t in (0, 2, 4, 6, 8))
        t = found.model_rounds[0]
        assert rows[t]["clients_auroc"] == best
        assert {row["round"] for row in found.per_client.last} == {t}


@pytest.mark.parametrize("metric", ["clients_auroc", "worst_auroc", "clients_loss"])
def test_a_run_stops_by_the_sites_own_metrics(metric, tmp_path):
    """Patience counts evaluations of clients, and none of the rows between them."""
    stopping = {"name": "early_stopping", "metric": metric, "patience": 2, "min_delta": 100.0}
    others = {"rounds": 9, "eval_every": 1, "callbacks": [stopping]}
    for found in both(tmp_path, **others)[:2]:
        assert [row["round"] for row in found.history] == [0, 1, 2, 3, 4]
        assert found.status == f"stopped at round 4: no better {metric} in 2 evaluations"


def test_the_log_of_flower_has_every_site_and_all_of_them(tmp_path, caplog):
    caplog.set_level("INFO", "flwr")
    _, there, _ = both(tmp_path)
    said = "\n".join(record.getMessage() for record in caplog.records)
    for row in there.per_client.last:
        about = f"auroc {row['auroc']:.4g}  accuracy {row['accuracy']:.4g}"
        assert f"  {row['client']}: " in said
        assert f"{about}  ({row['examples']} test examples)" in said
    last, worst = there.history[-1], there.per_client.worst("auroc")
    spread = there.per_client.spread("auroc")["std"]
    assert (
        f"auroc {last['clients_auroc']:.4g} (worst {last['worst_auroc']:.4g} at {worst['client']}, "
        f"standard deviation {spread:.2g})"
    ) in said


class Silent(Sites):
    """Node h1 does not answer in round 1."""

    def answer(self, message: Message) -> Message | None:
        header = message.content.get("header")
        silent = header is not None and (header["t"], header["client"]) == (1, 1)
        return None if silent else super().answer(message)


def test_events_log_and_audit_call_a_site_by_its_name(tmp_path, caplog, capsys):
    spec = spec_of(tmp_path)
    caplog.set_level("INFO", "flwr")
    found = serve(spec, Silent(spec, tmp_path, tmp_path / "s"), tmp_path / "out")
    (event,) = events_of(found)
    assert event == "round 1: client 'h1': no reply in time"
    assert f"fedspan {event}" in [record.getMessage() for record in caplog.records]
    assert audit.command(tmp_path / "out") == 0
    assert re.search(r"^ *h1 +3 ", capsys.readouterr().out, re.M)


def test_a_name_in_use_is_refused_to_another_client(tmp_path, caplog):
    class Twice(Sites):
        def answer(self, message: Message) -> Message | None:
            found = super().answer(message)
            if (
                found is not None
                and message.metadata.dst_node_id == 102
                and self.statuses[-1] == "query"
            ):
                found.content["identity"]["name"] = "h1"
            return found

    spec = spec_of(tmp_path)
    with pytest.raises(FedspanError, match=r"client 2 has not answered .*not connected"):
        serve(spec, Twice(spec, tmp_path, tmp_path / "s"), tmp_path / "out")
    told = [one.getMessage() for one in caplog.records if "ignores a node" in one.getMessage()]
    assert told == [
        "fedspan ignores a node: client 2 is to be called 'h1', which is the name of client 1; give its node another "
        "client-id"
    ]


def test_the_roster_shows_names_beside_numbers(tmp_path, capsys):
    from fedspan.cli import roster

    spec = spec_of(tmp_path, rounds=2)
    serve(spec, Sites(spec, tmp_path, tmp_path / "s"), tmp_path / "out", bind_clients=True)
    roster.command(tmp_path / "out")
    assert capsys.readouterr().out.splitlines() == [
        f"client {i}  h{i}  node {100 + i}" for i in range(3)
    ]
    (tmp_path / "out" / "audit.jsonl").unlink()
    roster.command(tmp_path / "out")
    assert capsys.readouterr().out.splitlines()[0] == "client 0  node 100"
