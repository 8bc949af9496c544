"""The archives of CIFAR and of the plays, written here in small as they are, and hostile ones.

CIFAR's Python form is a pickle of protocol 2 by Python 2, the binary form plain records.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import pickle
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import fedspan
from fedspan.core.errors import DataError
from fedspan.data import archives, sets
from fedspan.data import datasets as _datasets


def old_pickle(
    images: npt.NDArray[np.uint8], labels: dict[str, list[int]], first: list[str]
) -> bytes:
    """{'filenames': …, 'labels': [...], 'data': array}, with the opcodes that Python 2 wrote."""

    def text(value: bytes) -> bytes:
        short = len(value) < 256
        return (
            (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value)))
            + value
            + b"q\x01"
        )

    out = b"\x80\x02}q\x00("
    out += text(b"filenames") + b"]q\x02(" + b"".join(text(name.encode()) for name in first) + b"e"
    for name, values in labels.items():
        out += text(name.encode()) + b"]q\x03("
        for number, value in enumerate(values):  # in groups, as pickle writes long lists
            out += b"K" + bytes([value]) + (b"e(" if number % 3 == 2 else b"")
        out += b"e"
    rows, columns = images.shape
    shape = b"J" + struct.pack("<i", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
    out += (
        text(b"data")
        + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    )
    out += (
        shape
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    )
    return out + text(images.tobytes()) + b"tbu."


def archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as out:
        for name, data in files.items():
            info = tarfile.TarInfo(f"folder/{name}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def images_of(n: int, seed: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_official_archives(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (
        [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
        if name == "cifar10"
        else ["train", "test"]
    )
    made = {part: images_of(7, seed) for seed, part in enumerate(parts)}
    files = {}
    for part, (pixels, labels) in made.items():
        coarse = [label // 2 for label in labels]
        if form == "binary":
            heads = [labels] if name == "cifar10" else [coarse, labels]
            files[f"{part}.bin"] = np.column_stack([*np.array(heads, np.uint8), pixels]).tobytes()
        else:
            named = (
                {"labels": labels}
                if name == "cifar10"
                else {"coarse_labels": coarse, "fine_labels": labels}
            )
            files[part] = old_pickle(pixels, named, ["a.png", "b.png"])
    official = "cifar-10" if name == "cifar10" else "cifar-100"
    archive(tmp_path / f"{official}-{form}.tar.gz", files)
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path))
    known = sets.find(name)
    loose = tuple(dataclasses.replace(file, sha256="", also_sha256="") for file in known.files)
    sets.get(dataclasses.replace(known, files=loose, digest=""))
    train, test = _datasets.load(name)
    pixels = np.concatenate([made[part][0] for part in parts[:-1]])
    assert train.y.tolist() == [label for part in parts[:-1] for label in made[part][1]]
    assert test.y.tolist() == made[parts[-1]][1]
    assert np.array_equal(train.x.transpose(0, 3, 1, 2).reshape(len(pixels), -1), pixels)


CIFAR10 = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def refused(name: str, *words: str) -> None:
    """The archive that is in the data directory cannot be converted, and one line says so."""
    known = sets.find(name)
    loose = tuple(dataclasses.replace(file, sha256="", also_sha256="") for file in known.files)
    with pytest.raises(DataError) as told:
        sets.get(dataclasses.replace(known, files=loose, digest=""))
    assert "\n" not in str(told.value)
    for word in (
        *words,
        f"'{name}' cannot be converted",
        "; delete '",
        f"run `fedspan data get {name}` again",
    ):
        assert word in str(told.value)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path))
    return tmp_path / "cifar-10-python.tar.gz"


def test_a_broken_archive_is_named(place: Path) -> None:
    place.write_bytes(b"not an archive")
    with pytest.raises(
        DataError, match=r"is not the official file: .*; delete '.*' and run `fedspan data get"
    ):
        fedspan.data.cifar10()
    refused("cifar10", "not a gzip file")
    archive(place, {"data_batch_1": b""})
    refused("cifar10", "no file 'data_batch_2'")
    archive(place, dict.fromkeys(CIFAR10, b""))
    whole = place.read_bytes()
    for cut in range(0, len(whole), 9):
        place.write_bytes(whole[:cut])
        refused("cifar10")
    pixels, labels = images_of(3, 0)
    archive(place, dict.fromkeys(CIFAR10, old_pickle(pixels, {"labels": labels[:2]}, [])))
    refused("cifar10", "2 labels for 9216 bytes")


def test_the_binary_form_is_checked_too(place: Path) -> None:
    binary = place.with_name("cifar-10-binary.tar.gz")
    pixels, labels = images_of(3, 0)
    for record, word in ((np.column_stack([np.full(3, 77, np.uint8), pixels]).tobytes(), "the label 77"),
                         (b"", "0 bytes"), (bytes(3074), "3074 bytes")):  # fmt: skip
        archive(binary, {f"{name}.bin": record for name in CIFAR10})
        refused("cifar10", word)
    records = np.column_stack([np.array(labels, np.uint8), pixels]).tobytes()
    archive(binary, {f"{name}.bin": records for name in CIFAR10})
    with pytest.raises(DataError, match="is not the official file"):
        fedspan.data.cifar10()


class Hostile:
    """Unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.write_text, (self.target, "run")


def test_a_pickle_is_never_run(place: Path) -> None:
    target = place.with_name("run.txt")
    pixels, labels = images_of(3, 0)
    good = old_pickle(pixels, {"labels": labels}, [])
    code = f"open({str(target)!r}, 'w')".encode()
    attack = b"cbuiltins\neval\n(U" + bytes([len(code)]) + code + b"tR."
    long, wrong = b"\x8d" + struct.pack("<Q", 1 << 62), {"labels": [labels[0], 250, 3]}
    cases: Iterable[tuple[bytes, str]] = [
        (pickle.dumps(Hostile(target)), "0 labels"),
        (pickle.dumps({"labels": labels, "data": Hostile(target)}), "3 labels for"),
        (attack, "0 labels"),
        (long + b"abc.", "not a pickle"),
        (good[:-30], "not a pickle"),
        (json.dumps(labels).encode(), "not a pickle"),
        (old_pickle(pixels, wrong, []), "labels from"),
        (good.replace(b"K" + bytes([labels[0]]), b"M\xff\xff", 1), "to 65535"),
        (good.replace(b"K" + bytes([labels[0]]), b"J\xff\xff\xff\xff", 1), "from -1"),
        (good.replace(b"K" + bytes([labels[0]]), b"I" + b"9" * 5000 + b"\n", 1), "not a pickle"),
    ]
    for data, word in cases:
        archive(place, dict.fromkeys(CIFAR10, data))
        refused("cifar10", word)
    assert not target.exists()


def links(path: Path, files: dict[str, bytes], *members: tarfile.TarInfo) -> None:
    with tarfile.open(path, "w:gz") as out:
        for member in members:
            out.addfile(member)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def link(name: str, to: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.linkname, info.type = to, kind
    return info


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_links_and_paths_out_of_an_archive(kind: bytes, place: Path, tmp_path: Path) -> None:
    """Links are left out, and nothing is written by the names of an archive."""
    plays = tmp_path / "shakespeare/plays.tar.gz"
    plays.parent.mkdir()
    members = [
        link("plays/shakespeare-db/A.txt", "nowhere", kind),
        link("x", "../../../etc/passwd", kind),
    ]
    links(
        plays,
        {"../../shakespeare-db/Hamlet.txt": b"HAMLET\n     To be\n", "/evil.txt": b"evil"},
        *members,
    )
    known = sets.find("shakespeare")
    sets.get(dataclasses.replace(known, digest=""))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "plays.tar.gz",
        "shakespeare_roles.jsonl.gz",
    }
    links(place, {}, *(link(f"folder/{name}", "/etc/passwd", kind) for name in CIFAR10))
    refused("cifar10", "no file 'data_batch_1'")


def test_files_that_unpack_to_much_more(place: Path) -> None:
    archive(
        place,
        {"one": bytes(40_000), "two": bytes(40_000), "three": bytes(40_000), "other": bytes(10**6)},
    )
    wanted = {"one", "two"}
    assert len(archives.members(place, lambda path: path.name in wanted, most=100_000)) == 2
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz' unpacks to many more bytes"):
        archives.members(place, lambda path: path.name in wanted | {"three"}, most=100_000)
    packed = place.with_name("images.gz")
    packed.write_bytes(gzip.compress(bytes(100_001)))
    with pytest.raises(DataError, match=r"images\.gz' unpacks to many more bytes"):
        archives.idx(packed, most=100_000)


def test_the_largest_official_files_are_read() -> None:
    rows = 50_000 * (3 * 32 * 32 + 100)  # a pickle of CIFAR-100 with names and labels
    assert rows + rows // 5 < archives.MOST
