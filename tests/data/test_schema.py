"""What tables' columns become, agreed by clients from counts and sums."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from fedspan.core.errors import DataError
from fedspan.data.schema import (
    PARTS,
    Features,
    Schema,
    agree,
    agreed,
    describe,
    scaled,
    shared,
    summed,
    sums,
    tally,
    with_scale,
)
from support.patients import TABLES

ASKED = Features(categories=("ward",))


def test_every_column_is_used_or_left_out_with_a_reason():
    schema = agreed(TABLES, ASKED)
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {
        "id": "unused", "age": "number", "sex": "category", "smoker": "boolean", "pressure": "number",
        "ward": "category", "seen": "date", "hospital": "unused", "note": "unused", "one": "unused",
    }  # fmt: skip
    why = {column.name: column.why for column in schema.columns if column.why}
    assert "id" in why["id"]
    assert "one value per client" in why["hospital"]
    assert "one value in all rows" in why["one"]
    said = "\n".join(schema.lines())
    assert all(name in said for name in TABLES["h0"])
    expected = [
        "age",
        "sex=F",
        "sex=M",
        "smoker",
        "smoker is empty",
        "pressure",
        "pressure is empty",
    ]
    expected += [f"ward={n}" for n in range(1, 5)] + [f"seen.{part}" for part in PARTS]
    assert schema.names == expected
    assert schema.features(TABLES["h1"]).shape == (47, schema.width)


def test_agreed_means_and_deviations_are_those_of_all_rows_together():
    schema = agreed(TABLES, ASKED)
    together = pd.concat(TABLES.values())
    pressure = pd.to_numeric(together["pressure"], errors="coerce")
    for name, values in (("age", together["age"]), ("pressure", pressure)):
        (column,) = (one for one in schema.used if one.name == name)
        assert column.mean[0] == pytest.approx(values.mean(), rel=1e-12)
        assert column.deviation[0] == pytest.approx(values.std(ddof=0), rel=1e-12)
    x = np.concatenate([schema.features(table) for table in TABLES.values()])
    assert abs(x[:, 0].mean()) < 1e-6
    assert x[:, 0].std() == pytest.approx(1)


def test_sums_alone_give_the_same_schema_in_any_grouping():
    told = {who: describe(table, ASKED) for who, table in TABLES.items()}
    told = json.loads(json.dumps(told))  # as it travels
    columns = shared(told, ASKED)
    others = [*TABLES.values()][::-1]
    counts = summed(tally(table, columns, ASKED) for table in others)
    schema = agree(told, counts, ASKED)
    for about in (False, True):
        parts = [sums(schema, table, "a table", about) for table in others]
        schema = scaled(schema, summed(parts), about)
    assert schema == agreed(TABLES, ASKED)


def test_the_order_of_columns_and_saving_change_nothing():
    schema = agreed(TABLES, ASKED)
    again = Schema.of(json.loads(json.dumps(schema.table())))
    assert again == schema
    table = TABLES["h2"]
    assert (again.features(table[list(table)[::-1]]) == schema.features(table)).all()
    columns = {name: table[name].tolist() for name in table}
    assert (again.features(columns) == schema.features(table)).all()


def test_an_empty_cell_becomes_the_mean_and_a_feature():
    schema = agreed(TABLES, ASKED)
    table = TABLES["h0"].assign(pressure="")
    x = schema.features(table)
    at = schema.names.index("pressure")
    assert (x[:, at] == 0).all()
    assert (x[:, at + 1] == 1).all()
    plain = agreed(TABLES, Features(categories=("ward",), standardize="none"))
    (column,) = (one for one in plain.used if one.name == "pressure")
    assert (plain.features(table)[:, at] == column.mean[0]).all()


def test_an_unknown_category_has_no_feature_and_an_index_of_its_own():
    schema = agreed(TABLES, ASKED)
    table = TABLES["h0"].assign(sex="X")
    assert (schema.features(table)[:, 1:3] == 0).all()
    assert list(schema.news(table)) == [
        "column 'sex' has categories that training did not have: 'X'"
    ]
    index = agreed(TABLES, Features(categories=("ward",), encode="index"))
    at = index.names.index("sex")
    assert set(index.features(TABLES["h0"])[:, at]) == {1.0, 2.0}
    assert set(index.features(table)[:, at]) == {0.0}


def test_each_client_may_have_its_own_scale():
    schema = agreed(TABLES, Features(features=("age",), standardize="client"))
    for who, table in TABLES.items():
        x = with_scale(schema, {who: table}).features(table, who)
        assert abs(x.mean()) < 1e-6
        assert x.std() == pytest.approx(1)
    assert not math.isclose(schema.features(TABLES["h0"]).std(), 1)


def test_a_client_with_a_few_of_the_values_decides_nothing_alone():
    tables = {
        "a": {"sort": ["t", "f"] * 9, "flag": [0, 1] * 9, "gone": ["no", "yes"] * 9},
        "b": {"sort": ["u", "v"] * 9, "flag": ["yes", "no"] * 9, "gone": [""] * 18},
        "c": {"sort": ["u", "v"] * 9, "flag": [""] * 18, "gone": [0, 1] * 9},
    }
    schema = agreed(tables, Features())
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds == {"sort": "category", "flag": "boolean", "gone": "boolean"}
    assert schema.columns[0].categories == ("f", "t", "u", "v")


@pytest.mark.parametrize(
    ("change", "asked", "said"),
    [
        ({"age": "old"}, {}, "'age' is numbers at h0 and text at h1"),
        ({}, {"features": ("agee",)}, "h0 has no column 'agee' (did you mean 'age'?)"),
        ({}, {"missing": "refuse"}, "column 'smoker' has 59 empty cells; fill them"),
        ({}, {"features": ("hospital",)}, None),
        ({}, {"features": ("note",)}, "'note' of `features` has more than 100 different texts"),
        ({}, {"features": ("note",), "categories": ("note",)}, None),
        ({}, {"features": ("id",)}, None),
    ],
)
def test_what_cannot_be_agreed_is_refused(change, asked, said):
    tables = TABLES | {"h1": TABLES["h1"].assign(**change)}
    if said is None:
        agreed(tables, Features(**asked))
        return
    with pytest.raises(DataError) as caught:
        agreed(tables, Features(**asked))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLES["h0"].drop(columns="age"), "no column 'age'"),
        (TABLES["h0"].rename(columns={"age": "Age"}), "did you mean 'Age'?"),
        (TABLES["h0"].assign(height=1), "a column 'height' that the model does not know"),
        (TABLES["h0"].assign(age="x"), "column 'age' is 'x' in row 1, not a number"),
        (
            TABLES["h0"].assign(smoker="perhaps"),
            "column 'smoker' is 'perhaps' in row 1, not yes or no",
        ),
        (TABLES["h0"].assign(seen="soon"), "column 'seen' is 'soon' in row 1, not a date"),
    ],
)
def test_rows_that_do_not_fit_are_refused(table, said):
    with pytest.raises(DataError) as caught:
        agreed(TABLES, ASKED).features(table, "new.csv")
    assert said in str(caught.value)
    assert "new.csv" in str(caught.value)
