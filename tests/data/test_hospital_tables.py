"""Tables as hospitals have them: spellings, codes for empty cells, typing errors, and what is said of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.errors import FedspanError
from fedspan.data.schema import Features, agreed
from fedspan.data.table_data import shared_out, tables
from fedspan.engine.predictor import Predictor

RNG = np.random.default_rng(1)


def hospital(rows: int = 30, **others: Any) -> pd.DataFrame:
    """The patients of a hospital; `others` are further columns, or these with other values."""
    own = {"age": RNG.integers(20, 90, rows), "sex": RNG.choice(["F", "M"], rows)}
    own |= {"pressure": RNG.normal(120, 9, rows), "ill": np.resize(["no", "yes", "no"], rows)}
    return pd.DataFrame(own | others)


def lines(*given: pd.DataFrame, **asked: Any) -> list[str]:
    found = {f"h{number}": table for number, table in enumerate(given)}
    return tables(found, "ill", **asked).schema.lines()


def predictor(data: Any) -> Predictor:
    module = nn.Linear(data.width, data.outputs)
    return Predictor(module, "classes", data.classes, data.schema)


# --- The target ---


@pytest.mark.parametrize("spelled", [[0, 1], ["No", "Yes"], ["n", "y"], [False, True], ["0", "1"]])
def test_yes_and_no_of_the_target_are_two_classes_however_they_are_spelled(spelled):
    data = tables({"a": hospital(), "b": hospital(ill=np.resize(spelled, 30))}, "ill")
    assert data.classes in (["no", "yes"], [0, 1])
    for who in data:
        part = data[who]["train"][1].bincount() + data[who]["test"][1].bincount()
        assert part.tolist() == ([20, 10] if who == "a" else [15, 15])
    counts = sum(data[who]["train"][1].bincount() for who in data).tolist()
    assert f"classes: no {counts[0]}, yes {counts[1]}" in data.schema.lines()


def test_classes_keep_their_names_where_all_spell_them_alike():
    for spelled in (["N", "Y"], [0, 1], ["T", "F"]):
        data = tables({who: hospital(ill=np.resize(spelled, 30)) for who in "ab"}, "ill")
        assert data.classes == sorted(spelled)


@pytest.mark.parametrize(
    ("ill", "words"),
    [
        (["neg", "pos"], "'h0' has the classes 'no', 'yes', and .*'h1' has 'neg', 'pos'"),
        (["no", "yes", "unknown"], "'no', 'yes', and .*'h1' has 'no', 'unknown', 'yes'; write"),
        ([0, 1, -9], "'h0' has the classes 'no', 'yes', and .*'h1' has '-9', '0', '1'"),
    ],
)
def test_classes_of_one_client_alone_are_refused(ill, words, tmp_path):
    given = {"h0": hospital(), "h1": hospital(ill=np.resize(ill, 30))}
    with pytest.raises(FedspanError, match=words.replace("'h0'", "h0.*").replace("'h1'", "h1.*")):
        tables(given, "ill")
    for who, table in given.items():
        table.to_csv(tmp_path / f"{who}.csv", index=False)
    with pytest.raises(FedspanError, match=words):
        fedspan.run(spec_of(tmp_path), progress=False)


def test_rare_classes_and_clients_with_some_of_them_are_fine():
    more = {"a": hospital(ill=np.resize([0, 1], 30)), "b": hospital(ill=np.resize([0, 1, 2], 30))}
    assert tables(more, "ill").classes == [0, 1, 2]
    some = {
        who: hospital(ill=np.resize(list(own), 30))
        for who, own in {"x": "pq", "y": "qr", "z": "rs"}.items()
    }
    assert tables(some, "ill").classes == ["p", "q", "r", "s"]
    both = {"a": hospital(ill="no"), "b": hospital(ill="yes")}
    assert tables(both, "ill").classes == ["no", "yes"]
    codes = {who: hospital(ill=np.resize([0, 1, -9], 30)) for who in "ab"}
    assert "classes: -9 20, 0 20, 1 20" in tables(codes, "ill", test_share=0.0).schema.lines()


# --- The split ---

NUMBERED = [1, 4, 9]  # test rows of client 3 of 12, as in earlier results


def test_the_test_rows_of_a_client_depend_on_its_name_alone():
    b, c = hospital(40), hospital(35)
    one = tables({"b": b, "c": c}, "ill", features=["age"], standardize="none")
    two = tables({"c": c, "a": hospital(), "b": b}, "ill", features=["age"], standardize="none")
    for who in "bc":
        for part in ("train", "test"):
            assert torch.equal(one[who][part][0], two[who][part][0])
    other = tables({"b": b, "c": c}, "ill", features=["age"], standardize="none", seed=1)
    assert not torch.equal(one["b"]["test"][0], other["b"]["test"][0])


def test_the_split_of_numbered_clients_is_what_it_was():
    rows = np.arange(12)
    assert shared_out(rows, 0.25, 0, "3")[1].tolist() == NUMBERED
    assert shared_out(rows, 0.25, 0, "north")[1].tolist() != NUMBERED


# --- Columns ---


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"ignore": ["prssure"]}, r"`ignore` names 'prssure', .*\(did you mean 'pressure'\?\)"),
        ({"gaps": {"agee": [-9]}}, r"`gaps` names 'agee', .*\(did you mean 'age'\?\)"),
        ({"features": ["age", "ill"]}, "`features` has the target 'ill'"),
        ({"features": ["age", "age"]}, "`features` names 'age' twice"),
    ],
)
def test_names_that_cannot_be_are_refused(asked, words):
    with pytest.raises(FedspanError, match=words):
        lines(hospital(), **asked)


def test_no_far_name_is_offered():
    table = hospital(triage=1).drop(columns="age")
    with pytest.raises(FedspanError, match="has no column 'age'; "):
        lines(table, features=["age"])


def test_a_name_that_one_client_has_may_be_ignored():
    assert lines(hospital(note="x"), hospital(), ignore=["note"])[0] == "4 features of 3 columns"


@pytest.mark.parametrize("own", [["yes", "no", ""], [1.0, 0.0, np.nan]])
def test_an_empty_yes_or_no_becomes_the_mean_of_the_known_ones(own):
    data = tables({"a": hospital(smokes=np.resize(own, 30))}, "ill", test_share=0.0)
    x = data["a"]["train"][0][:, data.schema.names.index("smokes")]
    assert x.tolist() == np.resize([1, 0, 0.5], 30).tolist()
    assert "smokes is empty" in data.schema.names
    found = predictor(data)
    rows = pd.DataFrame({"age": [50.0], "sex": ["F"], "pressure": [120.0], "smokes": [np.nan]})
    category = next(c for c in data.schema.used if c.name == "sex").categories.index("F")
    cells = torch.tensor([[50.0, category, 120.0, torch.nan]])
    assert np.allclose(found.pipeline()(cells).detach(), found.predict_proba(rows), atol=1e-6)


@pytest.mark.parametrize("gaps", [[-9, 999, "n/k"], {"age": [-9], "sex": ["n/k"]}])
def test_codes_of_empty_cells_are_gaps_in_training_and_in_predictions(gaps, tmp_path):
    coded = hospital(age=np.resize([-9, 30, 40], 30), sex=np.resize(["n/k", "F", "M"], 30))
    empty = coded.assign(age=coded["age"].replace(-9, np.nan), sex=coded["sex"].replace("n/k", ""))
    one, two = tables({"a": coded}, "ill", gaps=gaps), tables({"a": empty}, "ill")
    assert torch.equal(one["a"]["train"][0], two["a"]["train"][0])
    assert "age (30 to 40)" in " ".join(one.schema.lines())
    rows = coded.drop(columns="ill")
    assert torch.equal(
        predictor(one).inputs(rows), predictor(two).inputs(empty.drop(columns="ill"))
    )
    cells = torch.tensor([[-9.0, 0.0, 120.0], [torch.nan, 0.0, 120.0]])
    a, b = predictor(one).pipeline()(cells)
    assert torch.equal(a, b)
    coded.to_csv(tmp_path / "h0.csv", index=False)
    run = fedspan.run(spec_of(tmp_path, gaps=gaps), tmp_path / "run", progress=False)
    assert "age is empty" in run.predictor.schema.names
    assert fedspan.load(tmp_path / "run").predictor.schema == run.predictor.schema


def test_ranges_hints_and_categories_are_printed():
    a = hospital(triage=np.resize([1, 2, 3], 30), code=np.resize([0, 1], 30), ward="A")
    b = hospital(triage=np.resize([3, 4, 5], 30), code=np.resize([1, 2], 30))
    b["ward"], a["sex"] = np.resize(list("BCDEFG"), 30), np.resize(["female", "male"], 30)
    said = lines(a, b)
    assert any("triage (1 to 5)" in line for line in said)
    for name, count in (("triage", 5), ("code", 3)):
        hint = f"{name} has {count} whole values: name it in `categories` if they are codes"
        assert hint in said
    assert "categories: sex (F, M, female, male), ward (7)" in said
    assert not any(line.startswith("age has") for line in said)
    assert not any("whole values" in line for line in lines(a, b, categories=["triage", "code"]))
    assert lines(hospital(), features=["age"])[0] == "1 feature of 1 column"
    assert "rows count by their weight 'age' in training" in lines(hospital(), weight="age")


def test_dates_without_times_have_no_hour():
    days = pd.date_range("2024-01-01", periods=30)
    for seen in (days, days.strftime("%Y-%m-%d")):
        assert "seen (year, month, day, weekday)" in lines(hospital(seen=seen))[2]
    with_hours = hospital(seen=days + pd.Timedelta(hours=5))
    assert "weekday, hour)" in lines(hospital(seen=days), with_hours)[2]


# --- Errors ---


def test_errors_name_the_row_of_the_file():
    odd = hospital(400)
    odd["w"] = 1.0
    odd.loc[399, "w"] = -1.0
    with pytest.raises(FedspanError, match="a: column 'w' is '-1' in row 400, not a weight"):
        tables({"a": odd}, "ill", weight="w", test_share=0.5, seed=seed_that_trains(399))
    odd["w"], odd["pressure"] = 1.0, odd["pressure"].astype(object)
    odd.loc[399, "pressure"] = "high"
    with pytest.raises(
        FedspanError, match="a: column 'pressure' has numbers but 'high' in row 400"
    ):
        tables({"a": odd}, "ill")
    odd.loc[399, "pressure"] = np.inf
    odd["pressure"] = odd["pressure"].astype(float)
    with pytest.raises(
        FedspanError, match="a: column 'pressure' is 'inf' in row 400, not a finite"
    ):
        tables({"b": hospital(), "a": odd}, "ill")


def seed_that_trains(row: int) -> int:
    return next(s for s in range(9) if row in shared_out(np.arange(400), 0.5, s, "a")[0])


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (
            np.resize(["low", "high"], 30),
            r"'age' is numbers at h0 and text at h1 \('(low|high)' in row [1-9]\)",
        ),
        (
            ["2013-01-31"] * 29 + ["31.01.13"],
            r"numbers at h0 and text at h1 \('31.01.13' in row 30\)",
        ),
        (
            np.resize(["1,5", "2"], 30),
            "h1: column 'age' is '1,5' in row 1, a number with a decimal",
        ),
    ],
)
def test_columns_of_two_types_name_a_cell_and_its_row(cells, words):
    with pytest.raises(FedspanError, match=words):
        lines(hospital(), hospital(age=cells))


def test_dates_at_one_client_and_numbers_at_another_get_fitting_advice():
    with pytest.raises(FedspanError, match="dates at h1 and numbers at h0; write all as dates"):
        lines(hospital(), hospital(age=np.resize(["2013-01-31", "2014-01-31"], 30)))


# --- Files ---


def spec_of(folder: Path, **data: Any) -> dict[str, Any]:
    own = {"path": str(folder / "h*.csv"), "target": "ill"} | data
    task = {"name": "classification", "model": "linear", "data": own}
    method = {"name": "fedavg", "lr": 0.1, "local_steps": 1}
    return {"rounds": 1, "batch_size": 8, "method": method, "task": task}


@pytest.mark.parametrize(("separator", "decimal"), [(";", ","), (";", "."), ("\t", ".")])
def test_files_with_other_separators_are_read_alike(separator, decimal, tmp_path):
    table = hospital()
    table.to_csv(tmp_path / "plain.csv", index=False)
    table.to_csv(tmp_path / "other.csv", index=False, sep=separator, decimal=decimal)
    one, two = (tables({"a": tmp_path / f"{name}.csv"}, "ill") for name in ("plain", "other"))
    assert torch.equal(one["a"]["train"][0], two["a"]["train"][0])
    assert (predictor(two).predict(tmp_path / "other.csv") != "").all()


def test_predictions_say_what_is_new_and_keep_an_id(tmp_path):
    data = tables({"a": hospital(patient=np.arange(30))}, "ill")
    table = hospital(3, patient=[7, 8, 9]).drop(columns="ill")
    table.loc[1, "pressure"] = np.nan
    said = "'pressure' has empty cells (1) and had none in training; they count as the mean"
    found = predictor(data)
    with pytest.warns(UserWarning, match=re.escape(said)):
        found.write(table, tmp_path / "out.csv", keep="patient")
    written = pd.read_csv(tmp_path / "out.csv")
    assert written["patient"].tolist() == [7, 8, 9]
    assert list(written)[1] == "prediction"
    with pytest.raises(FedspanError, match=r"has no column 'patiant' .*'patient'"):
        found.write(table[:1], tmp_path / "out.csv", keep="patiant")


def test_ranges_are_of_all_clients():
    said = {"a": {"age": np.array([3.0, 4.5])}, "b": {"age": np.array([-1.0, 2.0])}}
    assert agreed(said, Features()).columns[0].range == (-1.0, 4.5)


def test_a_run_prints_that_rows_and_classes_have_weights(tmp_path, capsys):
    for who in ("h0", "h1"):
        hospital(w=1.0).to_csv(tmp_path / f"{who}.csv", index=False)
    weights = {"training": {"class_weights": "balanced"}}
    fedspan.run(spec_of(tmp_path, weight="w") | weights, progress=True)
    said = capsys.readouterr().err
    assert "rows count by their weight 'w' in training" in said
    assert "classes are weighted in training (balanced), which shifts probabilities" in said
