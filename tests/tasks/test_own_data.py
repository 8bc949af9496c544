"""Own data in a spec file: every format gives the same run, tests are held out as said, mistakes are one line."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from typer.testing import CliRunner

import fedspan
from fedspan.cli import app
from fedspan.core.errors import FedspanError
from fedspan.core.spec import Spec

CITIES = ("Bergen", "Oslo", "Tromsø")
NAMES = ("age", "size", "dose")


def rows(n: int = 120, seed: int = 0) -> dict[str, Any]:
    """A table with a learnable class, a number and a client column."""
    rng = np.random.default_rng(seed)
    x = rng.normal([60, 2, 0.1], [10, 1, 0.05], (n, 3))
    score = (x[:, 0] - 60) / 10 + (x[:, 1] - 2)
    kind = np.where(score > 0, "ill", "healthy")
    city = np.array(CITIES)[np.arange(n) % 3]
    split = np.where(np.arange(n) % 5 == 0, "test", "train")
    return dict(zip(NAMES, x.T, strict=True)) | {
        "kind": kind,
        "city": city,
        "cost": 3 * score + 1,
        "split": split,
    }


def write(path: Path, table: dict[str, Any]) -> Path:
    """The table in the format of the file's ending."""
    if path.suffix == ".npz":
        np.savez(path, **table)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        numbers = {
            "kind": (table["kind"] == "ill").astype(np.int64),
            "city": np.unique(table["city"], return_inverse=True)[1],
        }
        save_file(
            {k: np.ascontiguousarray(v) for k, v in (table | numbers).items() if k != "split"}, path
        )
    elif path.suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(
            pa.table({k: v.tolist() for k, v in table.items()}), path
        )
    elif path.suffix == ".jsonl":
        lines = [
            dict(zip(table, line, strict=True))
            for line in zip(*(v.tolist() for v in table.values()), strict=True)
        ]
        path.write_text("\n".join(map(json.dumps, lines)))
    else:
        with path.open("w", newline="") as file:
            out = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            out.writerow(table)
            out.writerows(zip(*(v.tolist() for v in table.values()), strict=True))
    return path


def spec_file(
    folder: Path, data: dict[str, Any], name: str = "classification", **others: Any
) -> Path:
    """A spec beside the data."""
    task = {"name": name, "model": "linear", "data": data} | others.pop("task", {})
    table = {
        "rounds": 8,
        "method": {"name": "fedavg", "lr": 0.3, "local_steps": 10},
        "task": task,
    } | others
    path = folder / "spec.toml"
    path.write_text(tomli_w.dumps(table))
    return path


TABLE = {"target": "kind", "client": "city", "features": list(NAMES)}


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet", "npz", "safetensors"])
def test_every_format_gives_the_same_run(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are relative to the spec file, wherever the command runs."""
    project = tmp_path / "project"
    project.mkdir()
    reference = rows()
    if ending == "safetensors":  # which has no texts: clients are numbers
        reference["city"] = np.array([CITIES.index(city) for city in reference["city"]])
    write(project / "reference.csv", reference)
    expected = fedspan.run(spec_file(project, TABLE | {"path": "reference.csv"}))
    assert expected.history[-1]["accuracy"] > 0.85
    write(project / f"data.{ending}", rows())
    monkeypatch.chdir(tmp_path)
    found = fedspan.run(spec_file(project, TABLE | {"path": f"data.{ending}"}))
    assert [row["loss"] for row in found.history] == pytest.approx(
        [row["loss"] for row in expected.history], rel=1e-6
    )


def test_natural_clients_hold_out_a_share_each(tmp_path: Path) -> None:
    write(tmp_path / "d.csv", rows())
    task = Spec.load(spec_file(tmp_path, TABLE | {"path": "d.csv", "test_share": 0.25})).task
    found = task.division(0)  # type: ignore[attr-defined]
    assert (found.clients, found.classes) == (list(CITIES), ["healthy", "ill"])
    assert [len(part) for part in found.parts] == [30, 30, 30]
    assert len(found.test.y) == 30
    rows_of = {tuple(row) for row in found.train.x} & {tuple(row) for row in found.test.x}
    assert not rows_of, "no row is both trained and tested on"
    other = task.division(1)  # type: ignore[attr-defined]
    assert not np.array_equal(other.test.x, found.test.x)
    assert np.array_equal(task.division(0).test.x, found.test.x)  # type: ignore[attr-defined]


def test_columns_and_files_for_testing(tmp_path: Path) -> None:
    table = rows()
    test = table["split"] == "test"
    write(tmp_path / "all.csv", table)
    write(tmp_path / "train.csv", {k: v[~test] for k, v in table.items()})
    write(tmp_path / "test.csv", {k: v[test] for k, v in table.items() if k != "city"})
    by_column = Spec.load(
        spec_file(tmp_path, TABLE | {"path": "all.csv", "test_column": "split"})
    ).task
    by_file = Spec.load(
        spec_file(tmp_path, TABLE | {"path": "train.csv", "test_path": "test.csv"})
    ).task
    one, two = (task.division(0) for task in (by_column, by_file))  # type: ignore[attr-defined]
    assert len(one.test.y) == 24
    for a, b in ((one.train, two.train), (one.test, two.test)):
        assert np.array_equal(a.x, b.x)
        assert np.array_equal(a.y, b.y)
    assert all(np.array_equal(a, b) for a, b in zip(one.parts, two.parts, strict=True))
    tables = by_file.tables(0, torch.float64)  # type: ignore[attr-defined]
    assert sum(len(part["train"][0]) for part in tables.values()) == 96, "none is held out besides"
    assert len(tables.test[0]) == 24
    write(
        tmp_path / "test.csv",
        {k: v[test] for k, v in (table | {"kind": np.full(120, "odd")}).items()},
    )
    with pytest.raises(
        FedspanError, match="has the class 'odd' in row 1, which training does not have"
    ):
        by_file.tables(0, torch.float64)  # type: ignore[attr-defined]


def test_standardized_by_the_training_rows_of_all_clients(tmp_path: Path) -> None:
    write(tmp_path / "d.csv", rows() | {"constant": np.ones(120)})
    names = {"features": [*NAMES, "constant"], "path": "d.csv", "test_column": "split"}
    made = Spec.load(spec_file(tmp_path, TABLE | names))
    x = np.concatenate([data.parts[0].numpy() for data in made.task.build((0,), made).client_data])  # type: ignore[attr-defined]
    assert np.allclose(x.mean(0), [0, 0, 0, 1], atol=1e-5)  # a column of ones alone is yes or no
    assert np.allclose(x.std(0), [1, 1, 1, 0], atol=1e-4)
    plain = Spec.load(spec_file(tmp_path, TABLE | names | {"standardize": "none"}))
    raw = np.concatenate(
        [data.parts[0].numpy() for data in plain.task.build((0,), plain).client_data]
    )  # type: ignore[attr-defined]
    assert raw[:, 0].mean() == pytest.approx(60, abs=3)


def test_numbers_are_predicted_too(tmp_path: Path) -> None:
    write(tmp_path / "d.csv", rows())
    data = {"path": "d.csv", "target": "cost", "client": "city", "features": list(NAMES)}
    path = spec_file(tmp_path, data, "tabular_regression", metrics=["r2", "mae"], rounds=20)
    result = fedspan.run(path)
    assert result.history[-1]["r2"] > 0.99
    bad = spec_file(
        tmp_path,
        data,
        "tabular_regression",
        task={"partition": {"name": "dirichlet", "clients": 3}},
    )
    with pytest.raises(FedspanError, match="divides classes, but the target is a number"):
        fedspan.run(bad)


def test_any_partition_and_your_own_model(tmp_path: Path) -> None:
    write(
        tmp_path / "d.npz",
        {"x": np.stack([rows()[n] for n in NAMES], 1), "y": (rows()["kind"] == "ill").astype(int)},
    )
    (tmp_path / "nets.py").write_text(
        "import torch\ndef small():\n    return torch.nn.Linear(3, 2)\n"
    )
    task = {"partition": {"name": "dirichlet", "clients": 4, "alpha": 0.5}, "model": "nets:small"}
    result = fedspan.run(spec_file(tmp_path, {"path": "d.npz"}, task=task))
    assert result.history[-1]["accuracy"] > 0.8
    assert str(tmp_path) not in sys.path
    with pytest.raises(FedspanError, match="has no function 'large'"):
        fedspan.run(spec_file(tmp_path, {"path": "d.npz"}, task=task | {"model": "nets:large"}))


def images(root: Path, size: int = 8, gray: bool = True) -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name, low in (("cat", 0), ("dog", 128)):
        (root / name).mkdir(parents=True)
        for number in range(20):
            shape = (size, size) if gray else (size, size, 3)
            pixels = rng.integers(low, low + 127, shape, dtype=np.uint8)
            image.fromarray(pixels).save(root / name / f"{number:02}.png")


@pytest.mark.parametrize("gray", [True, False])
def test_a_directory_of_images(gray: bool, tmp_path: Path) -> None:
    images(tmp_path / "photos", gray=gray)
    task = {"model": "cnn", "partition": {"name": "iid", "clients": 2}}
    made = Spec.load(spec_file(tmp_path, {"path": "photos"}, task=task, rounds=4))
    assert made.task.division(0).classes == ["cat", "dog"]  # type: ignore[attr-defined]
    assert fedspan.run(made).history[-1]["accuracy"] == 1.0
    small = made.task.division(0).train.x.shape[1:]  # type: ignore[attr-defined]
    assert small == ((8, 8) if gray else (8, 8, 3))


def test_images_named_in_a_table_have_clients(tmp_path: Path) -> None:
    images(tmp_path / "photos")
    files = sorted((tmp_path / "photos").rglob("*.png"))
    table = {
        "file": [str(f.relative_to(tmp_path)) for f in files],
        "kind": [f.parent.name for f in files],
    }
    table["camera"] = ["a", "b"] * 20
    write(tmp_path / "list.csv", {k: np.array(v) for k, v in table.items()})
    data = {
        "path": "list.csv",
        "images": "file",
        "target": "kind",
        "client": "camera",
        "image_size": 4,
    }
    found = Spec.load(spec_file(tmp_path, data)).task.division(0)  # type: ignore[attr-defined]
    assert found.clients == ["a", "b"]
    assert found.train.x.shape == (32, 4, 4)


def broken(**changes: Any) -> dict[str, Any]:
    return {k: np.asarray(v) for k, v in (rows() | changes).items()}


def with_cell(name: str, cell: str) -> np.ndarray[Any, Any]:
    column = rows()[name].astype(object)
    column[6] = cell
    return column


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no file": (rows(), {"path": "no.csv"}, r"no\.csv' does not exist"),
    "kind of file": (
        rows(),
        {"path": "spec.toml"},
        r"is not one of \.npz, .*nor a directory of images",
    ),
    "no target": (
        rows(),
        {"target": None},
        "`task.data.target` is missing, the column to predict; there are age, size",
    ),
    "target": (
        rows(),
        {"target": "kid"},
        r"has no column 'kid' \(did you mean 'kind'\?\); it has age, size",
    ),
    "feature": (
        rows(),
        {"features": ["agee"]},
        r"Bergen has no column 'agee' \(did you mean 'age'.*`features`",
    ),
    "client": (rows(), {"client": "ward"}, "`task.data.client`: .* has no column 'ward'"),
    "texts": (
        broken(split=[f"note {n}" for n in range(120)]) | {"kind": np.array(["a", "b"] * 60)},
        {"features": ["age", "split"], "test_share": 0.0},
        "'split' of `features` has more than 100 different texts; name it in `categories`",
    ),
    "float labels": (
        rows(),
        {"target": "cost"},
        "classes are whole numbers or names, got floating-point numbers",
    ),
    "empty cell": (
        broken(age=with_cell("age", "")),
        {"missing": "refuse"},
        "column 'age' has 1 empty cells; fill them",
    ),
    "a word": (
        broken(age=with_cell("age", "old")),
        {"features": None},
        "column 'age' has numbers but 'old' in row 7",
    ),
    "one class": (broken(kind=["ill"] * 120), {}, "has one class only, 'ill'"),
    "empty label": (broken(kind=with_cell("kind", "")), {}, "`task.data.target` is empty in row 7"),
    "empty client": (
        broken(city=with_cell("city", "")),
        {},
        "`task.data.client`: 'city' is empty in row 7",
    ),
    "two tests": (
        rows(),
        {"test_share": 0.5, "test_column": "split"},
        "both say what the test set is",
    ),
    "test mark": (
        rows(),
        {"test_column": "city"},
        "'city' is 'Bergen' in row 1; write 'train' or 'test'",
    ),
    "share": (
        rows(),
        {"test_share": 1.0},
        r"`task.data.test_share` must be at least 0 and below 1, got 1\.0",
    ),
    "no rows": ({k: v[:0] for k, v in rows().items()}, {}, "has no rows"),
    "only tests": (
        broken(split=np.where(rows()["city"] == "Oslo", "test", "train")),
        {"test_column": "split"},
        "client 'Oslo' has no training rows",
    ),
    "no clients": (
        rows(),
        {"client": None},
        "`task.data.client` is missing, the column that says whose a row is",
    ),
    "key": (rows(), {"label": "kind"}, r"`\[task.data\]` has no key 'label'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, tmp_path: Path) -> None:
    table, changes, message = MISTAKES[mistake]
    write(tmp_path / "d.csv", table)
    data = {k: v for k, v in (TABLE | {"path": "d.csv"} | changes).items() if v is not None}
    with pytest.raises(FedspanError, match=message) as raised:
        fedspan.run(spec_file(tmp_path, data))
    assert "\n" not in str(raised.value)


def test_mistakes_in_arrays(tmp_path: Path) -> None:
    def fails(message: str, **arrays: Any) -> None:
        np.savez(tmp_path / "d.npz", **arrays)
        with pytest.raises(FedspanError, match=message):
            fedspan.run(
                spec_file(
                    tmp_path, {"path": "d.npz"}, task={"partition": {"name": "iid", "clients": 2}}
                )
            )

    x, y = np.ones((6, 2)), np.array([0, 1] * 3)
    fails("'the features' has 5 rows .* but 'y' has 6", x=x[:5], y=y)
    fails("do not fit together .* 'x' .*'offsets'", x=x, y=y, offsets=np.arange(3))
    fails("has no number in row 2", x=np.where(np.arange(12).reshape(6, 2) == 3, np.nan, x), y=y)
    fails("floating-point numbers", x=x, y=y / 2)
    with (tmp_path / "d.npz").open("wb") as file:
        np.savez(file, x=np.array([{}], dtype=object), y=y)
    with pytest.raises(FedspanError, match=r"cannot be read: .*[Pp]ickle"):
        fedspan.run(spec_file(tmp_path, {"path": "d.npz"}))
    (tmp_path / "d.npz").write_bytes(b"nothing")
    with pytest.raises(FedspanError, match="cannot be read"):
        fedspan.run(spec_file(tmp_path, {"path": "d.npz"}))
    with pytest.raises(FedspanError, match=r'is a file; write data = \{path = "d.npz"'):
        fedspan.run(spec_file(tmp_path, "d.npz"))  # type: ignore[arg-type]


def test_changed_data_is_another_run_and_a_moved_project_is_not(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
        write(place / "d.csv", rows())
    path = spec_file(here, TABLE | {"path": "d.csv"})
    before = Spec.load(path).identity()
    assert Spec.load(spec_file(there, TABLE | {"path": "d.csv"})).identity() == before
    fedspan.run(path, tmp_path / "run")
    assert Spec.load(tmp_path / "run/spec.toml").identity() == before
    fedspan.run(path, tmp_path / "run", resume=True)
    write(here / "d.csv", rows(seed=1))
    assert Spec.load(path).identity() != before
    with pytest.raises(FedspanError, match=r"task\.data\.digest"):
        fedspan.run(path, tmp_path / "run", resume=True)


def test_the_command_line_needs_no_python(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    write(tmp_path / "project/d.csv", rows())
    path = spec_file(tmp_path / "project", TABLE | {"path": "d.csv"})
    for words in (
        ["run"],
        ["partition"],
        ["compare", "--methods", "fedavg,scaffold", "--out", "out"],
    ):
        command = [sys.executable, "-m", "fedspan", words[0], path, *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        if words == ["partition"]:
            assert "Tromsø" in done.stdout
            assert "3 clients, 2 classes, 96 examples" in done.stdout


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_texts_of_your_own(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = {"good": "fine happy great", "bad": "sad poor awful"}
    labels = np.array(["good", "bad"] * 30)
    texts = np.array(
        [f"a {words[label].split()[i % 3]} day, number {i}" for i, label in enumerate(labels)]
    )
    write(
        tmp_path / f"d.{ending}",
        {"text": texts, "label": labels, "who": np.array(["x", "y", "z"] * 20)},
    )
    task = {"model": "tiny", "max_length": 16, "partition": {"name": "natural"}}
    path = spec_file(
        tmp_path,
        {"path": f"d.{ending}", "client": "who"},
        "text_classification",
        task=task,
        rounds=2,
    )
    made = Spec.load(path)
    held = made.task.holdings(0)
    assert (list(held.clients), list(held.classes)) == (["x", "y", "z"], ["bad", "good"])
    assert held.counts.sum() == 48
    assert fedspan.run(made).history[-1]["accuracy"] >= 0
    with pytest.raises(FedspanError, match=r"`task.data.features`: .* has no column 'words'"):
        fedspan.run(
            spec_file(
                tmp_path,
                {"path": f"d.{ending}", "features": ["words"]},
                "text_classification",
                task=task,
            )
        )


def test_the_page_on_own_data_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its spec and its Python, one after the other; the other tables are laid over the first spec."""
    pytest.importorskip("pandas")
    page = (Path(__file__).parents[2] / "docs/own-data.md").read_text()
    table = rows()
    names = {"kind": "diagnosis", "city": "hospital"}
    write(
        tmp_path / "patients.csv",
        {names.get(k, k): v for k, v in table.items() if k not in ("cost", "split")},
    )
    (tmp_path / "my_data.py").write_text("")
    first, *others = (
        tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.S)
    )
    (tmp_path / "spec.toml").write_text(tomli_w.dumps(first))
    assert fedspan.run(tmp_path / "spec.toml").history[-1]["accuracy"] > 0.85
    for other in others:
        task = other["task"] if "name" in other["task"] else first["task"] | other["task"]
        (tmp_path / "other.toml").write_text(tomli_w.dumps(first | other | {"task": task}))
        made = Spec.load(tmp_path / "other.toml")
        if task["name"] == "tabular_regression":
            assert "r2" in fedspan.run(made).history[-1]
    monkeypatch.chdir(tmp_path)
    program, more = re.findall(r"```python\n(.*?)```", page, re.S)
    scope: dict[str, Any] = {}
    exec(program + more, scope)  # noqa: S102
    assert scope["result"].history[-1]["accuracy"] > 0.85
    assert len(scope["clients"]) == 20


def test_the_toy_regression_reads_beside_its_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    place = tmp_path / "project"
    place.mkdir()
    np.savez(place / "ab.npz", A=rng.normal(size=(3, 9, 4)), B=rng.normal(size=(3, 9, 2)))
    table = {
        "rounds": 2,
        "method": {"name": "fedavg", "lr": 0.1},
        "task": {"name": "regression", "data": "ab.npz"},
    }
    (place / "spec.toml").write_text(tomli_w.dumps(table))
    monkeypatch.chdir(tmp_path)
    spec = Spec.load("project/spec.toml")
    assert fedspan.run(spec).finished
    assert spec.task.holdings(0).counts.tolist() == [[9], [9], [9]]
    before = spec.identity()
    np.savez(place / "ab.npz", A=rng.normal(size=(3, 9, 4)), B=rng.normal(size=(3, 9, 2)))
    assert Spec.load("project/spec.toml").identity() != before


def test_a_table_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "d.csv", rows())
    path = spec_file(tmp_path, TABLE | {"path": "d.csv"})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = CliRunner().invoke(app.app, ["partition", str(path)])
    assert shown.exit_code == 0
    assert "classes per client: 2 to 2, median 2" in shown.output
