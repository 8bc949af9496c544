"""Data sets from Hugging Face's hub: the same contents as from the official files, which are taken if it has none."""

from __future__ import annotations

import dataclasses
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedspan.cli import app as cli
from fedspan.data import sets, store
from support.served import Server, served, serving

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub").constants
Image = pytest.importorskip("PIL.Image")

OFFICIAL = Path(__file__).parents[1] / "data/official"
IMAGES = {
    "mnist": ("image", "label"),
    "fashion_mnist": ("image", "label"),
    "cifar100": ("img", "fine_label"),
}
HUBS = {
    "mnist": ("ylecun/mnist", None),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", None),
    "cifar100": ("uoft-cs/cifar100", None),
    "banking77": ("PolyAI/banking77", "refs/convert/parquet"),
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path / "cache", monkeypatch) as made:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{made.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield made


def official(server: Server, monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """Serve the small official files of a data set, and return what is made of them."""
    known = sets.find(name)
    places = {file.name: OFFICIAL / file.name.removeprefix("fashion-") for file in known.files}
    assert known.convert is not None
    made = known.convert(places, None)
    small = served(server, name, {file: path.read_bytes() for file, path in places.items()})
    beside = tuple(one for one in small.files if "qmnist" in one.name)
    small = dataclasses.replace(small, beside_hub=beside, digest=store.digest(made))
    find = sets.find
    monkeypatch.setattr(sets, "find", lambda one: small if one == name else find(one))
    return made


def packed(image: Any) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(image).save(out, "png")
    return {"bytes": out.getvalue(), "path": None}


def on_hub(name: str, made: Any) -> Any:
    """The same data set as the hub has it: images as PNG, intents in another order."""
    splits = {}
    for part in ("train", "test"):
        if name == "banking77":
            rows = made[f"text/banking77_{part}.jsonl.gz"]
            names = sorted(
                {row["intent"] for both in made.values() for row in both},
                key=str.lower,
                reverse=True,
            )
            columns = {
                "text": [row["text"] for row in rows],
                "label": [names.index(row["intent"]) for row in rows],
            }
            kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        else:
            (arrays,) = made.values()
            image, label = IMAGES[name]
            columns = {
                image: [packed(x) for x in arrays[f"{part}_x"]],
                label: arrays[f"{part}_y"].tolist(),
            }
            kinds = {image: datasets.Image(), label: datasets.ClassLabel(num_classes=100)}
        splits[part] = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))
    return datasets.DatasetDict(splits)


def get(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["fedspan", "data", "get", name])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.parametrize("name", HUBS)
def test_the_hub_is_the_source_where_datasets_is_installed(
    name: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = official(server, monkeypatch, name)
    asked = []

    def load_dataset(path: str, revision: str | None = None) -> Any:
        asked.append((path, revision))
        return on_hub(name, made)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert get(monkeypatch, name) == 0
    assert asked == [HUBS[name]]
    assert all("qmnist" in path for path, _ in server.asked if path != "/")
    for file, contents in made.items():
        found = store.read(store.folder() / file)
        if isinstance(contents, list):
            assert found == contents
        else:
            assert found.keys() == contents.keys()
            assert all(np.array_equal(found[key], contents[key]) for key in contents)


@pytest.mark.parametrize("fault", ["silent", "missing", "other"])
def test_the_official_files_are_taken_where_the_hub_fails(
    fault: str, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = official(server, monkeypatch, "mnist")

    def load_dataset(*_: Any, **__: Any) -> Any:
        if fault == "missing":
            raise RuntimeError("no such data set\nat all")
        return on_hub(
            "mnist",
            {file: arrays | {"train_x": 255 - arrays["train_x"]} for file, arrays in made.items()},
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    if fault == "silent":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.perf_counter()
    assert get(monkeypatch, "mnist") == 0
    assert time.perf_counter() - began < 5
    told = capsys.readouterr().err.splitlines()
    (line,) = [one for one in told if "taking the official files" in one]
    assert {"silent": "does not answer", "missing": "no such data set at all", "other": "SHA-256"}[
        fault
    ] in line
    assert (
        store.digest({file: store.read(store.folder() / file) for file in made})
        == sets.find("mnist").digest
    )


def test_labels_of_qmnist_that_cannot_be_had_are_the_only_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = official(server, monkeypatch, "mnist")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: on_hub("mnist", made))
    server.files = {}
    assert get(monkeypatch, "mnist") == 2
    assert capsys.readouterr().err.count("\n") == 1
