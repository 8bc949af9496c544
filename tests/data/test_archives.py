"""The archives of CIFAR and of the plays, written here in small as they are, and hostile ones."""

from __future__ import annotations

import dataclasses
import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import fedspan
from fedspan.core.errors import DataError
from fedspan.data import archives, sets
from fedspan.data import datasets as _datasets


def archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as out:
        for name, data in files.items():
            info = tarfile.TarInfo(f"folder/{name}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))


def images_of(n: int, seed: int) -> tuple[npt.NDArray[np.uint8], list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, 10, n).tolist()


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_official_archives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = CIFAR10 if name == "cifar10" else ["train", "test"]
    made = {part: images_of(7, seed) for seed, part in enumerate(parts)}
    files = {}
    for part, (pixels, labels) in made.items():
        coarse = [label // 2 for label in labels]
        heads = [labels] if name == "cifar10" else [coarse, labels]
        files[f"{part}.bin"] = np.column_stack([*np.array(heads, np.uint8), pixels]).tobytes()
    official = "cifar-10" if name == "cifar10" else "cifar-100"
    archive(tmp_path / f"{official}-binary.tar.gz", files)
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path))
    known = sets.find(name)
    loose = tuple(dataclasses.replace(file, sha256="") for file in known.files)
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
    loose = tuple(dataclasses.replace(file, sha256="") for file in known.files)
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
    return tmp_path / "cifar-10-binary.tar.gz"


def test_a_broken_archive_is_named(place: Path) -> None:
    place.write_bytes(b"not an archive")
    with pytest.raises(
        DataError, match=r"is not the official file: .*; delete '.*' and run `fedspan data get"
    ):
        fedspan.data.cifar10()
    refused("cifar10", "not a gzip file")
    archive(place, {"data_batch_1.bin": b""})
    refused("cifar10", "data_batch_2.bin")
    archive(place, dict.fromkeys([f"{name}.bin" for name in CIFAR10], b"123"))
    refused("cifar10", "size 15")
    whole = place.read_bytes()
    for cut in range(0, len(whole), 9):
        place.write_bytes(whole[:cut])
        refused("cifar10")


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
    links(place, {}, *(link(f"folder/{name}.bin", "/etc/passwd", kind) for name in CIFAR10))
    refused("cifar10", "data_batch_1.bin")


def test_files_that_unpack_to_much_more(place: Path) -> None:
    archive(place, {"1.bin": bytes(40_000), "2.bin": bytes(40_000), "other": bytes(10**6)})
    assert len(archives.members(place, "*.bin", most=100_000)) == 2
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz' unpacks to many more bytes"):
        archives.members(place, "*.bin", most=70_000)
    packed = place.with_name("images.gz")
    packed.write_bytes(gzip.compress(bytes(100_001)))
    with pytest.raises(DataError, match=r"images\.gz' unpacks to many more bytes"):
        archives.idx(packed, most=100_000)


def test_the_largest_official_files_are_read() -> None:
    rows = 50_000 * (3 * 32 * 32 + 2)  # of CIFAR-100
    assert rows + rows // 5 < archives.MOST
