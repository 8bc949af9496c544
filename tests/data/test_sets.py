"""Data sets from their official files: downloaded from 127.0.0.1, resumed, checked and converted."""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import runpy
import struct
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspan
from fedspan.cli import app as cli
from fedspan.core.errors import DataError
from fedspan.data import sets, store
from support.served import Server, idx, mnist, questions, served, serving


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with serving(tmp_path / "cache", monkeypatch) as made:
        yield made


def test_mnist_with_writers_of_qmnist(server: Server) -> None:
    sets.get(served(server, "mnist", mnist()))
    train, test = fedspan.data.mnist()
    assert train.x.shape == (12, 28, 28)
    assert train.owner.tolist() == [2100 + i // 3 for i in range(12)]
    assert test.owner.tolist() == [2100, 2100, 2100, 2101, 2101]
    asked = len(server.asked)
    sets.get(served(server, "mnist", mnist()))
    assert len(server.asked) == asked  # the second call does nothing
    assert [path.name for path in store.folder().rglob("*") if path.is_file()] == [
        "mnist_by_writer.npz"
    ]


def test_writers_of_other_digits_are_refused(server: Server) -> None:
    files = mnist() | {"mnist/qmnist-train-labels-idx2-int.gz": idx(np.full((12, 8), 99), 12)}
    with pytest.raises(DataError, match="labels of QMNIST are not those of MNIST"):
        sets.get(served(server, "mnist", files))
    assert not sets.find("mnist").places()


def test_fashion_mnist(server: Server) -> None:
    files = {f"fashion-{name}": data for name, data in mnist().items() if "qmnist" not in name}
    sets.get(served(server, "fashion_mnist", files))
    assert [len(split.y) for split in fedspan.data.fashion_mnist()] == [12, 5]


def test_banking77_from_csv(server: Server) -> None:
    sets.get(served(server, "banking77", questions()))
    train, test = fedspan.data.banking77()
    assert train.x[:3].tolist() == ["My card, please", "Where is\nit?", "how old"]
    assert (train.y[:3].tolist(), test.y.tolist()) == ([2, 0, 1], [2])  # Refund, age, card


PLAY = """

                Hamlet
Shakespeare_homepage | Hamlet | Entire play
**** ACT I ****
     Enter BERNARDO
BERNARDO
     Who's there?
     Exeunt
FRANCISCO
     [Aside] Nay, answer me.
     Stand, and unfold yourself.
**** SCENE II ****
     A flourish
BERNARDO
     Long live the king!
"""


def test_shakespeare_by_role(server: Server) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as out:
        info = tarfile.TarInfo("plays-abc/shakespeare-db/Hamlet.txt")
        info.size = len(PLAY)
        out.addfile(info, io.BytesIO(PLAY.encode()))
    sets.get(served(server, "shakespeare", {"shakespeare/plays.tar.gz": packed.getvalue()}))
    (path,) = sets.paths("shakespeare").values()
    assert [(row["role"], row["text"]) for row in store.read(path)] == [
        ("BERNARDO", "Who's there?\nLong live the king!"),
        ("FRANCISCO", "Stand, and unfold yourself."),
    ]


@pytest.fixture
def llama(server: Server) -> Path:
    """The directory of a small Llama, made of files in the format of llama2.c."""
    pytest.importorskip("tokenizers")
    dim, hidden, layers, heads, kv, vocab = 8, 12, 2, 2, 1, 262
    shapes = [
        (vocab, dim),
        (layers, dim),
        (layers, dim, dim),
        (layers, 4, dim),
        (layers, 4, dim),
        (layers, dim, dim),
    ]
    shapes += [
        (layers, dim),
        (layers, hidden, dim),
        (layers, dim, hidden),
        (layers, hidden, dim),
        (dim,),
    ]
    rng = np.random.default_rng(0)
    raw = struct.pack("<7i", dim, hidden, layers, heads, kv, vocab, 32)
    raw += b"".join(rng.normal(size=shape).astype("<f4").tobytes() for shape in shapes) + bytes(
        4 * 32 * 4
    )
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), " ", "a", " a"]
    packed = struct.pack("<i", 7) + b"".join(
        struct.pack("<fi", 0, len(t.encode())) + t.encode() for t in tokens
    )
    sets.get(
        served(
            server,
            "stories260k",
            {"stories260k/stories260K.bin": raw, "stories260k/tok512.bin": packed},
        )
    )
    return store.folder() / "models/stories260k"


def test_a_llama_of_llama2c(llama: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    ids = transformers.AutoTokenizer.from_pretrained(llama)("a aé")["input_ids"]
    assert ids == [1, 261, 261, 3 + 0xC3, 3 + 0xA9]
    assert model.config.num_key_value_heads == 1


def speak(model: str) -> None:
    task = {
        "name": "language_model",
        "data": "shakespeare_mini",
        "model": model,
        "block": 16,
        "test_blocks": 1,
    }
    method = {"name": "fedavg", "lr": 0.1, "local_steps": 1}
    fedspan.run({"rounds": 1, "batch_size": 1, "task": task, "method": method}, progress=False)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_models_are_named_in_one_line(llama: Path, name: str) -> None:
    pytest.importorskip("transformers")
    whole = (llama / name).read_bytes()
    for wrong in (b"", whole[: len(whole) // 2], b"\x89PNG" + bytes(50), b"{}"):
        (llama / name).write_bytes(wrong)
        for model in (str(llama), "stories260k"):
            with pytest.raises(DataError, match=str(llama)) as told:
                speak(model)
            assert "\n" not in str(told.value)


OFFICIAL = Path(__file__).parent / "official"
DOCS = Path(__file__).parents[2] / "docs/data.md"


def test_slices_of_the_real_files_train(server: Server) -> None:
    """Writers, photographs, questions and roles, from the official formats to a run."""
    for name in ("mnist", "cifar100", "banking77", "shakespeare"):
        files = {one.name: (OFFICIAL / one.name).read_bytes() for one in sets.find(name).files}
        sets.get(served(server, name, files))
    train, test = fedspan.data.mnist()
    assert np.unique(train.owner, return_counts=True)[1].tolist() == [16] * 5
    assert not set(train.owner) & set(test.owner)
    assert [split.x.shape for split in fedspan.data.cifar100()] == [(8, 32, 32, 3), (4, 32, 32, 3)]
    assert fedspan.data.cifar100()[0].x.std() > 30
    tasks: list[dict[str, Any]] = [
        {"name": "classification", "data": "mnist", "model": "linear"},
        {
            "name": "classification",
            "data": "cifar100",
            "model": "linear",
            "partition": {"name": "iid", "clients": 2},
        },
    ]
    if importlib.util.find_spec("transformers"):
        halves = {"name": "iid", "clients": 2}
        tasks += [{"name": "text_classification", "model": "tiny", "partition": halves}]
        tasks += [{"name": "language_model", "model": "tiny", "block": 64, "test_blocks": 8}]
    for task in tasks:
        spec = {"rounds": 3, "eval_every": 3, "batch_size": 4, "task": task}
        method = {"name": "fedavg", "lr": 0.05, "local_steps": 4}
        rows = fedspan.run(spec | {"method": method}, progress=False).history
        assert np.isfinite(rows[-1]["loss"])
        assert rows[-1]["loss"] != rows[0]["loss"]


# ---- the command line, and damaged files


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["fedspan", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_the_list(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "data") == 0
    told = capsys.readouterr().out
    for name in sets.names():
        found = sets.find(name)
        assert found.name == name
        assert all(
            text in told
            for text in (f"{name} (", found.about, found.licence, found.source, found.clients)
        )
        assert f"`{name}`" in DOCS.read_text()
    assert "mnist (11.6 MB, not here; fedspan data get mnist)" in told
    assert "tcga_brca (15 kB, here)" in told
    assert command(monkeypatch, "data", "get", "tcga_brca") == 0
    assert command(monkeypatch, "data", "get", "minst") == 2
    assert "did you mean 'mnist'?" in capsys.readouterr().err


def test_a_run_without_its_data_names_the_command(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = {"rounds": 1, "method": {"name": "fedavg", "lr": 0.1}}
    task = {"name": "classification", "data": "mnist", "partition": {"name": "iid", "clients": 2}}
    (tmp_path / "spec.toml").write_text(fedspan.Spec.from_table(spec | {"task": task}).toml())
    for words in (("run", "--run-dir"), ("compare", "--methods", "fedavg", "--out")):
        out = tmp_path / words[0]
        assert (
            command(monkeypatch, words[0], str(tmp_path / "spec.toml"), *words[1:], str(out)) == 2
        )
        told = capsys.readouterr().err
        assert "run `fedspan data get mnist` first" in told
        assert told.count("\n") == 1
        assert not out.exists()


FILES = ["mnist_by_writer.npz", "text/banking77_train.jsonl.gz"]


@pytest.mark.parametrize("damage", ["cut", "empty", "bytes", "flipped", "arrays", "pickle"])
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named_in_one_line(server: Server, name: str, damage: str) -> None:
    for known, files in (("mnist", mnist()), ("banking77", questions())):
        sets.get(served(server, known, files))
    path = store.folder() / name
    whole, npz = path.read_bytes(), name.endswith("npz")
    if damage == "arrays":
        wrong: Any = (
            {"train_x": np.ones(3), "test_x": np.ones(3)} if npz else [{"text": 3, "label": "a"}]
        )
        store.write(path, wrong)
    elif damage == "pickle":
        if npz:
            np.savez(path, train_x=np.array([{}], object))
        else:
            path.write_bytes(gzip.compress(json.dumps([1]).encode()))
    else:
        half = len(whole) // 2
        flipped = whole[:half] + bytes([whole[half] ^ 16]) + whole[half + 1 :]
        kinds = {
            "cut": whole[:half],
            "empty": b"",
            "bytes": b"\x1f\x8b\x08" + bytes(50),
            "flipped": flipped,
        }
        path.write_bytes(kinds[damage])
    data = {FILES[0]: "mnist", FILES[1]: "banking77"}[name]
    with pytest.raises(DataError) as told:
        getattr(fedspan.data, data)()
    assert "\n" not in str(told.value)
    assert f"{path.name}'" in str(told.value)
    assert f"run `fedspan data get {data}`" in str(told.value)


def test_heart_patients() -> None:
    """Patients with a gap in a column that is kept are left out; the first category of a column has no feature."""
    train, test = fedspan.data.heart_disease()
    assert (len(train.x), len(test.x), train.x.shape[1]) == (486, 254, 13)
    assert np.bincount(train.owner).tolist() == [199, 172, 30, 85]  # as in FLamby's paper
    assert np.bincount(test.owner).tolist() == [104, 89, 16, 45]


CONVERT = runpy.run_path(str(Path(__file__).parents[2] / "studies/patients/convert.py"))


def test_heart_patients_of_the_official_files(tmp_path: Path) -> None:
    rows = {
        "cleveland": ["63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"] * 303,
        "hungarian": ["28,1,2,130,132,0,1,185,0,.5,?,?,?,1"] * 261,
        "switzerland": ["32,1,3,95,0,?,0,127,0,.7,1,?,?,1"]
        + ["32,1,3,95,0,0,0,127,0,.7,1,?,?,4"] * 46,
        "va": ["63,1,4,140,260,0,1,112,1,3,2,?,?,2"] * 130,
    }
    for name, lines in rows.items():
        (tmp_path / f"processed.{name}.data").write_text("\n".join(lines))
    made = CONVERT["heart_disease"](tmp_path)
    assert made["x"].shape == (740, 13)
    assert made["x"][0].tolist() == pytest.approx([63, 1, 145, 233, 1, 150, 0, 2.3, 0, 0, 0, 0, 1])
    assert made["x"][303].tolist() == [28, 1, 130, 132, 0, 185, 0, 0.5, 1, 0, 0, 1, 0]
    assert made["y"][[0, 303, 600]].tolist() == [0, 1, 1]
    assert made["train"].sum() == 486


def test_patients_of_flamby(tmp_path: Path) -> None:
    """The table and the split are in FLamby's format; patients without a fold are left out."""
    rows = [
        "TCGA-AA-0001,50,1,1.0,10.0",
        "TCGA-AA-0002,60,0,0.0,20.5",
        "TCGA-AA-0003,70,0,0.0,30.0",
    ]
    (tmp_path / "brca.csv").write_text("\n".join(['pid,age,"race, other",E,T', *rows]))
    folds = "pid,fold,fold2\nTCGA-AA-0003,test,test_5\nTCGA-AA-0001,train,train_2\n"
    (tmp_path / "train_test_split.csv").write_text(folds)
    made = CONVERT["tcga_brca"](tmp_path)
    assert made["x"].tolist() == [[50.0, 1.0], [70.0, 0.0]]
    assert (made["time"].tolist(), made["event"].tolist()) == ([10.0, 30.0], [1.0, 0.0])
    assert (made["train"].tolist(), made["center"].tolist()) == ([True, False], [2, 5])
    assert made["columns"].tolist() == ["age", "race, other"]


SHIPPED = {
    "heart_disease": "176b58a8746ab134fd91a94e81346dcc91ed4bff68698add185b2af6e3febb63",
    "tcga_brca": "d52e4e48571347648dd8a39d323d448c2da0a2574d7c19f45633323a24b30332",
}


@pytest.mark.parametrize("name", SHIPPED)
def test_patients_that_come_with_fedspan_are_the_converted_ones(name: str) -> None:
    shipped = {name: store.read(sets.SHIPPED / name) for name in sets.find(name).made}
    assert store.digest(shipped) == SHIPPED[name]
