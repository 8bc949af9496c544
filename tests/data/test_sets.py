"""Data sets from their official files: downloaded from 127.0.0.1, resumed, checked and converted."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import struct
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspan
from fedspan.cli import app as cli
from fedspan.core.errors import DataError, FedspanError
from fedspan.data import sets, store
from fedspan.data.sets import DataSet


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, with ranges; `cut` closes the first connections early."""

    files: dict[str, bytes]
    cut: int = 0
    asked: list[tuple[str, str | None]]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.removeprefix("http://data.example").lstrip("/")
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        if path not in self.server.files:
            self.send_error(404)
            return
        data, start = self.server.files[path], int(wanted[6:-1]) if wanted else 0
        if start >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.server.cut:
            self.server.cut -= 1
            self.wfile.write(data[start : start + (len(data) - start) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Server(("127.0.0.1", 0), Handler)
    made.files, made.asked = {}, []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def served(server: Server, name: str, files: dict[str, bytes], at: str = "") -> DataSet:
    """The data set with these files, which a server on this machine has."""
    server.files |= files
    base = at or f"http://127.0.0.1:{server.server_port}/"
    known = sets.find(name)
    official = tuple(
        dataclasses.replace(one, urls=(base + one.name,), sha256=hashlib.sha256(files[one.name]).hexdigest(), size=0)
        for one in known.files
    )
    return dataclasses.replace(known, files=official, digest="")


def idx(values: Any, kind: int = 8) -> bytes:
    array = np.asarray(values).astype(">i4" if kind == 12 else np.uint8)
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
    return gzip.compress(head + array.tobytes())


def mnist() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for part, file, n, more in (("train", "train", 12, 0), ("test", "t10k", 5, 3)):
        x, y = rng.integers(0, 256, (n, 28, 28)), rng.integers(0, 10, n + more)
        extended = np.zeros((n + more, 8), int)
        extended[:, 0], extended[:, 2] = y, 2100 + np.arange(n + more) // 3
        files[f"mnist/{file}-images-idx3-ubyte.gz"] = idx(x)
        files[f"mnist/{file}-labels-idx1-ubyte.gz"] = idx(y[:n])
        files[f"mnist/qmnist-{part}-labels-idx2-int.gz"] = idx(extended, 12)
    return files


def test_mnist_with_writers_of_qmnist(server: Server) -> None:
    sets.get(served(server, "mnist", mnist()))
    train, test = fedspan.data.mnist()
    assert train.x.shape == (12, 28, 28)
    assert train.owner.tolist() == [2100 + i // 3 for i in range(12)]
    assert test.owner.tolist() == [2100, 2100, 2100, 2101, 2101]
    asked = len(server.asked)
    sets.get(served(server, "mnist", mnist()))
    assert len(server.asked) == asked  # the second call does nothing
    assert [path.name for path in store.folder().rglob("*") if path.is_file()] == ["mnist_by_writer.npz"]


def test_writers_of_other_digits_are_refused(server: Server) -> None:
    files = mnist() | {"mnist/qmnist-train-labels-idx2-int.gz": idx(np.full((12, 8), 99), 12)}
    with pytest.raises(DataError, match="labels of QMNIST are not those of MNIST"):
        sets.get(served(server, "mnist", files))
    assert not sets.made("mnist")


def test_fashion_mnist(server: Server) -> None:
    files = {f"fashion-{name}": data for name, data in mnist().items() if "qmnist" not in name}
    sets.get(served(server, "fashion_mnist", files))
    assert [len(split.y) for split in fedspan.data.fashion_mnist()] == [12, 5]


def questions() -> dict[str, bytes]:
    files = {}
    for part, rows in (("train", [("My card, please", "card"), ("Where is\nit?", "Refund"), ("how old", "age")] * 4),
                       ("test", [("no card", "card")])):  # fmt: skip
        text = io.StringIO(newline="")
        csv.writer(text).writerows([("text", "category"), *rows])
        files[f"banking77/{part}.csv"] = text.getvalue().encode()
    return files


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


def test_a_llama_of_llama2c(server: Server) -> None:
    transformers = pytest.importorskip("transformers")
    dim, hidden, layers, heads, kv, vocab = 8, 12, 2, 2, 1, 262
    shapes = [(vocab, dim), (layers, dim), (layers, dim, dim), (layers, 4, dim), (layers, 4, dim), (layers, dim, dim)]
    shapes += [(layers, dim), (layers, hidden, dim), (layers, dim, hidden), (layers, hidden, dim), (dim,)]
    rng = np.random.default_rng(0)
    raw = struct.pack("<7i", dim, hidden, layers, heads, kv, vocab, 32)
    raw += b"".join(rng.normal(size=shape).astype("<f4").tobytes() for shape in shapes) + bytes(4 * 32 * 4)
    tokens = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{i:02X}>" for i in range(256)), " ", "a", " a"]
    packed = struct.pack("<i", 7) + b"".join(struct.pack("<fi", 0, len(t.encode())) + t.encode() for t in tokens)
    sets.get(served(server, "stories260k", {"stories260k/stories260K.bin": raw, "stories260k/tok512.bin": packed}))
    place = next(iter(sets.paths("stories260k").values())).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    ids = transformers.AutoTokenizer.from_pretrained(place)("a aé")["input_ids"]
    assert ids == [1, 261, 261, 3 + 0xC3, 3 + 0xA9]
    assert model.config.num_key_value_heads == 1


OFFICIAL = Path(__file__).parent / "official"


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
        {"name": "classification", "data": "cifar100", "model": "linear", "partition": {"name": "iid", "clients": 2}},
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


# ---- downloads


def test_a_cut_connection_is_resumed(server: Server) -> None:
    server.cut = 2
    sets.get(served(server, "banking77", questions()))
    assert [wanted is not None for _, wanted in server.asked] == [False, True, True, False]
    assert len(fedspan.data.banking77()[0].y) == 12


def test_a_later_call_goes_on_where_the_first_one_stopped(server: Server) -> None:
    found = served(server, "banking77", questions())
    part = store.folder() / "banking77/train.csv.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(questions()["banking77/train.csv"][:40])
    sets.get(found)
    assert server.asked[0][1] == "bytes=40-"
    assert not part.exists()


def test_a_wrong_file_is_refused_and_the_message_says_what_to_do(server: Server) -> None:
    found = served(server, "banking77", questions())
    server.files["banking77/test.csv"] += b"changed"
    with pytest.raises(DataError, match=r"test\.csv .*SHA-256 is .*by hand, save it as .*banking77/test\.csv'") as told:
        sets.get(found)
    assert "\n" not in str(told.value)
    assert "run `fedspan data get banking77` again" in str(told.value)
    assert not sets.here("banking77")


def test_a_missing_file_is_fetched_by_hand(server: Server) -> None:
    found = served(server, "banking77", questions())
    gone = server.files.pop("banking77/test.csv")
    with pytest.raises(DataError, match="404"):
        sets.get(found)
    (store.folder() / "banking77/test.csv").write_bytes(gone)
    sets.get(found)
    assert len(fedspan.data.banking77()[1].y) == 1


def test_contents_that_are_not_the_known_ones_are_refused(server: Server) -> None:
    found = dataclasses.replace(served(server, "banking77", questions()), digest="0" * 64)
    with pytest.raises(DataError, match="have changed"):
        sets.get(found)
    assert not sets.made("banking77")


def test_a_proxy_of_the_environment_is_used(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "")
    sets.get(served(server, "banking77", questions(), at="http://data.example/"))
    assert server.asked[0][0] == "http://data.example/banking77/train.csv"


def test_a_directory_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FedspanError, match="cannot write") as told:
        sets.get(served(server, "banking77", questions()))
    assert "\n" not in str(told.value)


def test_data_of_the_hub(server: Server) -> None:
    datasets = pytest.importorskip("datasets")
    from fedspan.huggingface import hub_data

    names = datasets.ClassLabel(names=["age", "card", "Refund"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    split = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [2, 1, 0]}, features=features)
    hub = sets.find("banking77").hub
    assert hub is not None
    made = hub.convert({part: hub_data.columns(split) for part in ("train", "test")}, {})
    rows = made["text/banking77_train.jsonl.gz"]
    assert [(row["text"], row["label"], row["intent"]) for row in rows] == [
        ("a", 0, "Refund"),
        ("b", 2, "card"),
        ("c", 1, "age"),
    ]


# ---- the command line, and damaged files


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["fedspan", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_the_list(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "data") == 0
    told = capsys.readouterr().out
    for name in sets.names():
        found = sets.find(name)
        assert found.name == name
        assert all(text in told for text in (f"{name} (", found.about, found.licence, found.source, found.clients))
    assert "mnist (11.6 MB, not here; fedspan data get mnist)" in told
    assert "tcga_brca (15 kB, here)" in told
    assert command(monkeypatch, "data", "get", "tcga_brca") == 0
    assert command(monkeypatch, "data", "get", "minst") == 2
    assert "did you mean 'mnist'?" in capsys.readouterr().err


def test_a_run_without_its_data_names_the_command(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"rounds": 1, "method": {"name": "fedavg", "lr": 0.1}}
    task = {"name": "classification", "data": "mnist", "partition": {"name": "iid", "clients": 2}}
    (tmp_path / "spec.toml").write_text(fedspan.Spec.from_table(spec | {"task": task}).toml())
    for words in (("run", "--run-dir"), ("compare", "--methods", "fedavg", "--out")):
        out = tmp_path / words[0]
        assert command(monkeypatch, words[0], str(tmp_path / "spec.toml"), *words[1:], str(out)) == 2
        told = capsys.readouterr().err
        assert "run `fedspan data get mnist` first" in told
        assert told.count("\n") == 1
        assert not out.exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "bytes", "arrays", "pickle"])
@pytest.mark.parametrize("name", ["mnist_by_writer.npz", "text/banking77_train.jsonl.gz"])
def test_damaged_files_are_named_in_one_line(server: Server, name: str, damage: str) -> None:
    for known, files in (("mnist", mnist()), ("banking77", questions())):
        sets.get(served(server, known, files))
    path = store.folder() / name
    whole, npz = path.read_bytes(), name.endswith("npz")
    if damage == "arrays":
        wrong: Any = {"train_x": np.ones(3), "test_x": np.ones(3)} if npz else [{"text": 3, "label": "a"}]
        store.write(path, wrong)
    elif damage == "pickle":
        if npz:
            np.savez(path, train_x=np.array([{}], object))
        else:
            path.write_bytes(gzip.compress(json.dumps([1]).encode()))
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "bytes": b"\x1f\x8b\x08" + bytes(50)}[damage])
    with pytest.raises(DataError) as told:
        fedspan.data.mnist() if npz else fedspan.data.banking77()
    assert "\n" not in str(told.value)
    assert path.name in str(told.value)
