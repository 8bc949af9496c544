"""Clients' tables as training data, and rows of tables as predictions."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.errors import FedspanError
from fedspan.data.table_data import tables
from fedspan.engine.predictor import Predictor
from support.patients import TABLES

RNG = np.random.default_rng(5)
ILL = {
    who: table.assign(ill=np.where(RNG.random(len(table)) < 0.4, "yes", "no"))
    for who, table in TABLES.items()
}


def trained(data, kind="classes", **about):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(data.width, 8), nn.ReLU(), nn.Linear(8, data.outputs))
    return Predictor(module, kind, data.classes, data.schema, own=data.own, **about)


def test_tables_are_clients_that_fit_takes():
    data = tables(ILL, "ill", categories=["ward"])
    assert list(data) == ["h0", "h1", "h2"]
    assert data.classes == ["no", "yes"]
    assert [len(data[who]["train"][0]) for who in data] == [32, 38, 43]
    assert len(data.test[0]) == 8 + 9 + 11
    module = nn.Linear(data.width, data.outputs)
    result = fedspan.fit(module, data, test=data.test, method="fedavg", rounds=2, progress=False)
    assert "accuracy" in result.history[-1]


def test_one_table_with_a_column_of_clients_files_and_frames_are_the_same(tmp_path):
    for who, table in ILL.items():
        table.to_csv(tmp_path / f"{who}.csv", index=False)
    given = tables(ILL, "ill")
    together = tables(pd.concat(ILL.values()), "ill", client="hospital")
    files = tables(str(tmp_path / "*.csv"), "ill")
    assert [c for c in together.schema.columns if c.name != "hospital"] == [
        c for c in given.schema.columns if c.name != "hospital"
    ]
    for who in ILL:
        for part in ("train", "test"):
            assert torch.equal(together[who][part][0], given[who][part][0])
            assert torch.allclose(files[who][part][0], given[who][part][0])


def test_each_client_may_be_scaled_by_itself_and_the_pooled_test_by_all():
    data = tables(ILL, "ill", features=["age"], standardize="client")
    for who in data:
        assert abs(float(data[who]["train"][0].mean())) < 1e-6
    (_age,) = data.schema.used
    assert float(data.test[0][0, 0]) != float(data["h0"]["test"][0][0, 0])
    found = trained(data)
    table = ILL["h1"]
    assert not torch.equal(found.inputs(table), found.inputs(table, "h1"))
    with pytest.raises(FedspanError, match="'h9' has no means and deviations"):
        found.inputs(table, "h9")


def test_predictions_do_not_depend_on_the_form_or_the_order_of_columns(tmp_path):
    found = trained(tables(ILL, "ill"))
    table = ILL["h0"].drop(columns=["ill", "hospital"])
    p = found.predict_proba(table)
    assert np.allclose(p.sum(1), 1)
    assert set(found.predict(table)) <= {"no", "yes"}
    assert (found.classes_[p.argmax(1)] == found.predict(table)).all()
    assert (found.predict_proba(table[list(table)[::-1]]) == p).all()
    assert (found.predict_proba(table.to_dict("list")) == p).all()
    assert (found.predict_proba(table.to_dict("records")) == p).all()
    table.to_csv(tmp_path / "new.csv", index=False)
    assert np.allclose(found.predict_proba(tmp_path / "new.csv"), p, rtol=0, atol=1e-6)
    assert found.write(tmp_path / "new.csv", tmp_path / "out.csv") == len(table)
    out = pd.read_csv(tmp_path / "out.csv")
    assert list(out) == ["prediction", "probability of no", "probability of yes"]
    with pytest.raises(FedspanError, match="no column 'age'"):
        found.predict(table.drop(columns="age"))
    with pytest.raises(FedspanError, match="'height' that the model does not know"):
        found.predict(table.assign(height=1))


def test_a_pipeline_has_the_preprocessing_inside():
    data = tables(ILL, "ill", ignore=["seen"], categories=["ward"])
    found = trained(data)
    table = ILL["h2"]
    cells = []
    for column in data.schema.used:
        if column.kind == "category":
            places = {name: n for n, name in enumerate(column.categories)}
            cells.append([places[str(cell)] for cell in table[column.name]])
        elif column.kind == "boolean":
            cells.append([{"yes": 1.0, "no": 0.0, "": np.nan}[cell] for cell in table[column.name]])
        else:
            cells.append(pd.to_numeric(table[column.name], errors="coerce"))
    x = torch.tensor(np.column_stack(cells))
    assert np.allclose(found.pipeline()(x).detach(), found.predict_proba(table), atol=1e-6)


def test_names_of_classes_with_leading_zeros_stay_names():
    data = tables({who: t.assign(ill=t.ward.map("0{}".format)) for who, t in TABLES.items()}, "ill")
    assert data.classes == ["01", "02", "03", "04"]


def test_the_row_of_a_missing_target_is_that_of_the_table():
    gone = ILL | {"h1": ILL["h1"].assign(ill=["yes"] * 30 + [None] + ["no"] * 16)}
    with pytest.raises(FedspanError, match="h1: the target 'ill' is empty in row 31"):
        tables(gone, "ill")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"clients": ILL, "target": "il"}, "h0 has no column 'il' (did you mean 'ill'?)"),
        ({"clients": "nowhere/*.csv", "target": "ill"}, "no file is named 'nowhere/*.csv'"),
        ({"clients": pd.concat(ILL.values()), "target": "ill"}, "`client` is missing"),
        ({"clients": ILL, "target": "ill", "scale": "x"}, "has no key 'scale'"),
        ({"clients": ILL, "target": "sex", "kind": "numbers"}, "is text"),
        ({"clients": ILL, "target": "ill", "ignore": "id"}, ".ignore` must be a list"),
        ({"clients": {"a": 3}, "target": "ill"}, "a must be a table"),
        ({"clients": {w: t.assign(ill="no") for w, t in ILL.items()}, "target": "ill"}, "one class only, 'no'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(arguments, said):
    with pytest.raises(FedspanError) as caught:
        tables(**arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipeline_is_exported_and_takes_gaps_and_any_number_of_rows():
    more = {who: t.assign(sort=np.where(np.arange(len(t)) % 3, "a", "")) for who, t in ILL.items()}
    data = tables(more, "ill", ignore=["seen"])
    found = trained(data)
    table = more["h2"]
    cells = []
    for column in data.schema.used:
        places = {name: n for n, name in enumerate(column.categories)} | {"": np.nan}
        known = (
            places
            if column.kind == "category"
            else {"yes": 1.0, "no": 0.0, "": np.nan, "?": np.nan}
        )
        cells.append([known.get(cell, cell) for cell in table[column.name]])
    x = torch.tensor(np.column_stack(cells).astype(float))
    assert torch.isnan(x).any(0).sum() >= 3  # of a number, a boolean and a category
    exported = torch.export.export(
        found.pipeline().eval(), (x[:2],), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    p = exported.module()(x)
    assert np.allclose(p.detach(), found.predict_proba(table), atol=1e-6)


def test_a_category_that_training_did_not_have_is_told_once():
    data = tables(ILL, "ill", ignore=["seen"])
    found = trained(data)
    table = ILL["h2"].assign(sex="X")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found.predict(ILL["h2"])
        assert not caught
        for _ in range(2):
            found.predict(table)
            found.predict_proba(table)
    (one,) = caught
    assert str(one.message) == "column 'sex' has categories that training did not have: 'X'"
