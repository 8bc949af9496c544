"""Data that cannot be used is refused in one line that names the file, the column or the value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.core.errors import DataError, FedspanError, SpecError
from fedspan.data import columns
from fedspan.data.partitions.iid import IID
from fedspan.data.user_tables import OwnData
from fedspan.nn.client_data import as_client_data


def read(own: OwnData) -> Any:
    """The clients' data, as a task reads them."""
    if own.tabular:
        return own.tables("classes", IID(clients=2), 0, torch.float32)
    return own.divide("classes", IID(clients=2), 0)


def refused(own: OwnData, *words: str) -> None:
    """Reading the data fails in one line with these words."""
    with pytest.raises(FedspanError) as error:
        read(own)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits(kind: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((4, 4), 1000, kind)).save(tmp_path / "deep.tif")
    with pytest.raises(DataError, match=r"deep\.tif.*8 bits per channel"):
        columns.images([tmp_path / "deep.tif"])


def test_an_image_that_would_fill_the_memory(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("1", (20_000, 10_000)).save(tmp_path / "bomb.png")
    with pytest.raises(DataError, match=r"bomb\.png.*decompression bomb") as error:
        columns.images([tmp_path / "bomb.png"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.7, 0.95])
def test_a_damaged_file_of_a_regression(cut: float, tmp_path: Path) -> None:
    path = tmp_path / "ab.npz"
    np.savez(path, A=np.ones((2, 3, 4)), B=np.ones((2, 3, 1)))
    whole = path.read_bytes()
    spec = {
        "rounds": 1,
        "method": {"name": "fedavg", "lr": 0.1},
        "task": {"name": "regression", "data": str(path)},
    }
    wrong = [whole[: int(cut * len(whole))], b"\x93NUMPY" + whole[:50]]
    for data in wrong:
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"ab\.npz") as error:
            fedspan.run(spec, progress=False)
        assert "\n" not in str(error.value)
    for bad in (np.array([[["a"]]]), np.ones((0, 3, 4)), np.ones((2, 3, 4), complex)):
        np.savez(path, A=bad, B=np.ones((*bad.shape[:2], 1)))
        with pytest.raises(DataError, match=r"ab\.npz"):
            fedspan.run(spec, progress=False)


def test_a_word_among_many_numbers(tmp_path: Path) -> None:
    cells = [str(i) for i in range(1500)]
    cells[1200] = "high"
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "\n".join(f"{cell},{i % 2}" for i, cell in enumerate(cells)))
    refused(OwnData(path=str(path), target="y"), "'x'", "'high' in row 1201", "`ignore`")


def test_numbers_written_as_text_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(f'{{"x": "{i}.5", "y": {i % 2}}}' for i in range(8)))
    own = OwnData(path=str(path), target="y", test_share=0)
    data = own.tables("classes", IID(clients=2), 0, torch.float32)
    assert [column.kind for column in data.schema.columns] == ["number"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"y": {"a": 1}}, ("`task.data.target`", "'y'", "lists or tables")),
        ({"who": {"a": 1}}, ("`task.data.client`", "'who'", "lists or tables")),
        ({"who": [1]}, ("`task.data.client`", "'who'", "lists or tables")),
        ({"x": 10**400}, ("cannot be read", "too large")),
    ],
)
def test_values_of_json_that_are_no_cells(
    row: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"x": i, "who": i % 2, "y": i % 2} | row) for i in range(8))
    )
    refused(OwnData(path=str(path), target="y", client="who"), *words)


def test_a_whole_number_of_many_digits_stays_a_feature(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"x": 2**70 + i, "y": i % 2}) for i in range(8)))
    assert columns.read(path)["x"].dtype == np.float64


@pytest.mark.parametrize("ending", ["npz", "safetensors", "parquet", "csv.gz"])
def test_damaged_files(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for number, content in enumerate(
        (b"", b"PK\x03\x04 no archive", b"\xff" * 64, b"\x1f\x8b\x08" + bytes(40))
    ):
        path = tmp_path / f"{number}.{ending}"
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name) as error:
            columns.read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_with_any_byte_changed(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    (np.savez_compressed if packed else np.savez)(path, x=np.arange(12.0), y=np.arange(12) % 2)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            columns.read(path)
        except DataError as error:
            assert "a.npz" in str(error)  # noqa: PT017 - many changes do no harm


@pytest.mark.parametrize("wrong", [np.array(3.0), np.empty(0), np.empty((8, 0))])
@pytest.mark.parametrize("name", ["x", "y"])
def test_arrays_without_rows(wrong: Any, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **({"x": np.ones((8, 2)), "y": np.arange(8) % 2} | {name: wrong}))
    refused(OwnData(path=str(path)), repr(name), "a.npz", "one row per example")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"features": ()}, "`features` is empty"),
        ({"features": ("a", "b", "a")}, "'a' twice"),
        ({"features": ("a", "y"), "target": "y"}, "the target 'y'"),
        ({"image_size": 1_000_000}, "at most 4,096, got 1000000"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        OwnData(path="a.csv", **settings)


def test_the_usual_target_among_the_features(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((8, 2)), y=np.arange(8) % 2)
    refused(OwnData(path=str(tmp_path / "a.npz"), features=("x", "y")), "the target 'y'")


def test_two_columns_of_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,label\nhi,there,0\nho,you,1\n")
    own = OwnData(path=str(tmp_path / "a.csv"), features=("a", "b"))
    with pytest.raises(SpecError, match="one column of texts, got a, b"):
        own.divide("texts", IID(clients=2), 0)


ONES, LABELS = np.ones((6, 2)), np.arange(6) % 2


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({}, "client 0 has no columns"),
        ((np.ma.masked_equal(np.eye(6), 1), LABELS), "masked values"),
        ({"x": np.ma.masked_equal(np.eye(6), 1), "y": LABELS}, "'x' has masked values"),
        ((torch.eye(6).to_sparse(), LABELS), "sparse_coo.*to_dense"),
        ((torch.empty(6, 2, device="meta"), LABELS), "'meta'"),
        ((torch.tensor(1.0), torch.tensor(0)), "one row per example"),
    ],
)
def test_client_data_that_would_be_misread(data: Any, word: str) -> None:
    with pytest.raises(DataError, match=word) as error:
        as_client_data(data, "client 0")
    assert "\n" not in str(error.value)


def test_a_masked_array_without_masked_values_is_data() -> None:
    read = as_client_data((np.ma.array(ONES), LABELS), "client 0")
    assert torch.equal(read.take(torch.tensor([1]))[0], torch.ones(1, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("groups", "word"),
    [
        ([1.0, float("nan")], "nan in place 1"),
        (np.array([1.0, np.nan]), "nan in place 1"),
        (["a", None], "None in place 1"),
        (["a", float("nan")], "nan in place 1"),
        ([1, "a"], "1 and has 'a' in place 1"),
        (np.array(["a", 1], object), "'a' and has 1 in place 1"),
    ],
)
def test_groups_without_a_name(groups: Any, word: str) -> None:
    for divide in (fedspan.data.natural, fedspan.data.dirichlet, fedspan.data.classes):
        with pytest.raises(SpecError, match=word):
            divide(groups)


@pytest.mark.parametrize("alpha", [10**20, 10**400, 1e300, float("nan"), float("inf"), "1", None])
@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_alpha_out_of_range(name: str, alpha: Any) -> None:
    with pytest.raises(SpecError, match="`alpha` must be"):
        getattr(fedspan.data, name)(LABELS, 2, alpha)


@pytest.mark.parametrize("seed", ["0", 1.5, None, True, [1]])
@pytest.mark.parametrize("name", ["iid", "dirichlet", "classes", "quantity"])
def test_a_seed_is_a_whole_number(name: str, seed: Any) -> None:
    divide = getattr(fedspan.data, name)
    with pytest.raises(SpecError, match="`seed` must be a whole number"):
        divide(LABELS, 2, seed=seed)
    pairs = zip(divide(LABELS, 2, seed=3), divide(LABELS, 2, seed=np.int64(3)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("most", [columns.MOST_BYTES, 0])
@pytest.mark.parametrize("table", [False, True])
def test_a_changed_image_of_the_same_size_is_noticed(
    table: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "MOST_BYTES", most)
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "1.png").write_bytes(b"one")
    (tmp_path / "a.csv").write_text("file,y\nin/cat/1.png,0\nin/dog/1.png,1\n")
    own = (
        OwnData(path=str(tmp_path / "a.csv"), images="file")
        if table
        else OwnData(path=str(tmp_path / "in"))
    )
    before = own.digest()
    assert own.digest() == before
    image = tmp_path / "in" / "dog" / "1.png"
    image.write_bytes(b"two")
    os.utime(image, ns=(10**18, 10**18))
    changed = own.digest()
    assert changed != before
    image.unlink()
    assert own.digest() not in (before, changed)


@pytest.mark.parametrize("cell", ["1_000", "٣", "１２", "1_0.5"])
def test_cells_that_only_python_reads_as_numbers(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cells = enumerate(["1", "2", cell, "4"])
    path.write_text("x,y\n" + "\n".join(f"{one},{i % 2}" for i, one in cells))
    refused(OwnData(path=str(path), target="y"), "'x'", f"{cell!r} in row 3")


def fitted(clients: Any, model: torch.nn.Module | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    usual: dict[str, Any] = {
        "method": {"name": "fedavg", "lr": 0.1},
        "rounds": 1,
        "progress": False,
    }
    return fedspan.fit(model or torch.nn.Linear(2, 2), clients, **usual | settings)


@pytest.mark.filterwarnings("ignore:the run of seed")
@pytest.mark.parametrize("part", [0, 1])
def test_a_value_beyond_float32_is_for_models_in_float64(part: int) -> None:
    data, loss = [ONES * 1e300, np.ones((6, 2))], torch.nn.L1Loss()
    client = (data[part], data[1 - part])
    with pytest.raises(DataError, match=r"1e\+300, which float32 cannot hold"):
        fitted([client], loss=loss)
    assert (
        fitted([client], torch.nn.Linear(2, 2).double(), loss=loss).runs[0][0]["training_loss"]
        > 1e299
    )


def tables(kind: str, first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
    if kind == "dict":
        return [first, second]
    if kind == "pandas":
        return [pytest.importorskip("pandas").DataFrame(one) for one in (first, second)]
    if kind == "arrow":
        return [pytest.importorskip("pyarrow").table(one) for one in (first, second)]
    return [pytest.importorskip("datasets").Dataset.from_dict(one) for one in (first, second)]


@pytest.mark.parametrize("kind", ["dict", "pandas", "arrow", "datasets"])
def test_columns_of_tables_are_matched_by_name(kind: str) -> None:
    a, b, y = np.linspace(-1, 1, 6), np.linspace(3, 0, 6), LABELS
    same = fitted(tables(kind, {"a": a, "b": b, "y": y}, {"a": a, "b": b, "y": y}))
    other = fitted(tables(kind, {"a": a, "b": b, "y": y}, {"y": y, "b": b, "a": a}))
    assert torch.equal(same.weights[0]["weight"], other.weights[0]["weight"])
    with pytest.raises(
        DataError, match="client 1 has the columns c, b, y, the first client a, b, y"
    ):
        fitted(tables(kind, {"a": a, "b": b, "y": y}, {"c": a, "b": b, "y": y}))


@pytest.mark.parametrize("kind", ["pandas", "arrow", "datasets"])
def test_one_table_in_place_of_clients(kind: str) -> None:
    one = tables(kind, {"a": LABELS, "y": LABELS}, {})[0]
    with pytest.raises(
        DataError, match="`clients` is one table; give a list with a table per client"
    ):
        fitted(one)


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: torch.utils.data.DataLoader(d, batch_size=2), list, str]
)
def test_one_data_set_in_place_of_clients(wrap: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(6, 2), torch.arange(6) % 2)
    with pytest.raises(DataError, match="client"):
        fitted(wrap(data))


def test_pandas_rows_with_different_indexes() -> None:
    table = pytest.importorskip("pandas").DataFrame(
        {"a": np.arange(6.0), "b": np.ones(6), "label": LABELS}
    )
    inputs = table[["a", "b"]].iloc[::-1]
    with pytest.raises(
        DataError,
        match=r"client 'north' has .* different indexes.*; .* reset_index\(drop=True\) on bo",
    ):
        fitted({"north": (inputs, table.label)})
    assert fitted({"north": (inputs, table.label.iloc[::-1])}).finished
    assert fitted({"north": (inputs.reset_index(drop=True), table.label)}).finished


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("x", "inputs, first in row 3, column 1;"),
        ("y", "targets, first in row 3;"),
        ("named", "'b', first in row 3;"),
    ],
)
def test_values_that_are_not_finite_are_named_by_place(part: str, words: str) -> None:
    x, y = ONES.copy(), LABELS.astype(float)
    if part == "y":
        y[3:] = np.nan
    else:
        x[3:, 1] = np.inf
    data = {"a": x[:, 0], "b": x[:, 1], "y": y} if part == "named" else (x, y)
    with pytest.raises(
        DataError,
        match=f"client 'north' has values that are not finite: {words} remove or fill them",
    ):
        fitted({"north": data}, loss=torch.nn.L1Loss())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "age;class\n1;0\n2;1;1\n", "3 cells in line 3, but 2 columns, separated by ';'"),
        ("a.csv", "age|class\n1|0\n2|1\n", "has no column 'class' .*; it has age|class"),
        ("a.csv", 'age,class\n"1,5",0\n"2,5",1\n', "'1,5' in row 1, a number with a decimal comma"),
        ("a.csv", ",age,class\n0,1,0\n1,2,1\n", "has no name for column 1; name or remove it"),
        ("a.csv", "age,class\n1,0\ninf,1\n", "'inf' in row 2, not a finite number"),
        ("a.csv", "größe,class\n1,0\n2,1\n", "cannot be read: .*; write the file again as UTF-8"),
    ],
)
def test_csv_files_of_other_dialects(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, "latin-1")
    task = {"name": "classification", "data": {"path": str(tmp_path / name), "target": "class"}}
    task |= {"partition": {"name": "iid", "clients": 2}}
    table = {"rounds": 1, "method": {"name": "fedavg", "lr": 0.1}, "task": task}
    with pytest.raises(DataError, match=words):
        fedspan.run(table, progress=False)
