"""The official files of MNIST (IDX) and CIFAR (Python or binary archives), read without unpickling anything.

The Python form of CIFAR is a pickle. It is read opcode by opcode with `pickletools`, which runs nothing: the images are
its one long string, the labels the whole numbers that follow the name of their list.
"""

from __future__ import annotations

import gzip
import io
import itertools
import pickletools
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import numpy as np

from fedspan.core.errors import DataError, one_line
from fedspan.data.columns import Array, Columns

PIXELS = 3 * 32 * 32
LABELS = {
    "cifar-10": ("labels", 0, 1, 10),
    "cifar-100": ("fine_labels", 1, 2, 100),
}  # name; its byte and how many, in binary; classes
MOST = 1 << 28  # bytes that are unpacked of a file; the largest official one has 186 million
TYPES = {0x08: ">u1", 0x0C: ">i4"}  # of IDX files


def idx(path: Path, most: int = MOST) -> Array:
    """A packed IDX file: two zero bytes, a type, the number of axes, their lengths, the values."""
    with gzip.open(path) as packed:
        raw = _unpacked(packed, path, most)
    try:
        kind, axes = np.dtype(TYPES[raw[2]]), raw[3]
        shape = np.frombuffer(raw, ">i4", axes, 4)
        values = np.frombuffer(raw, kind, offset=4 + shape.nbytes)
        return values.reshape(shape).astype(kind.newbyteorder("="))
    except (LookupError, ValueError):
        raise DataError(f"{str(path)!r} is not an IDX file of bytes or whole numbers") from None


def hub_images(hub: Mapping[str, Mapping[str, Any]], image: str, label: str) -> Columns:
    """`train_x`, `train_y`, `test_x` and `test_y` of the columns that a hub gives."""
    arrays: Columns = {}
    for part, columns in hub.items():
        arrays[f"{part}_x"] = np.stack([np.asarray(one, np.uint8) for one in columns[image]])
        arrays[f"{part}_y"] = np.asarray(columns[label], np.uint8)
    return arrays


def members(
    archive: Path, wanted: Callable[[PurePosixPath], bool], most: int = MOST
) -> dict[PurePosixPath, bytes]:
    """The wanted files of a .tar.gz archive. Nothing is written to disk, and links are left out."""
    found: dict[PurePosixPath, bytes] = {}
    with tarfile.open(archive, "r:gz") as files:
        for member in files:
            name = PurePosixPath(member.name)
            if member.isfile() and wanted(name) and (data := files.extractfile(member)) is not None:
                found[name] = _unpacked(data, archive, most)
                most -= len(found[name])
    return found


def _unpacked(file: IO[bytes] | gzip.GzipFile, path: Path, most: int) -> bytes:
    data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{str(path)!r} unpacks to many more bytes than the official file")
    return data


def cifar(archive: Path, name: Literal["cifar-10", "cifar-100"]) -> Columns:
    """`train_x`, `train_y`, `test_x` and `test_y` of an archive."""
    parts = {"train": ["train"], "test": ["test"]}
    if name == "cifar-10":
        parts = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
    suffix, read = (".bin", _binary) if "binary" in archive.name else ("", _python)
    parts = {part: [one + suffix for one in names] for part, names in parts.items()}
    wanted = {*itertools.chain(*parts.values())}
    found = members(archive, lambda path: path.name in wanted)
    files = {path.name: data for path, data in found.items()}
    arrays: Columns = {}
    for part, names in parts.items():
        for one in names:
            if one not in files:
                raise DataError(f"{str(archive)!r} has no file {one!r}")
        made = [read(files[one], name, f"{archive.name}/{one}") for one in names]
        flat = np.concatenate([pixels for pixels, _ in made])  # color by color
        images = flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"{part}_x"] = np.ascontiguousarray(images)
        arrays[f"{part}_y"] = np.concatenate([labels for _, labels in made])
    return arrays


def _binary(data: bytes, name: str, where: str) -> tuple[Array, Array]:
    _, place, labels, classes = LABELS[name]
    if not data or len(data) % (labels + PIXELS):
        raise DataError(f"{where} has {len(data)} bytes, which is no whole number of images")
    rows = np.frombuffer(data, np.uint8).reshape(-1, labels + PIXELS)
    y = rows[:, place]
    if y.max() >= classes:
        raise DataError(f"{where} has the label {y.max()}, and {classes} classes")
    return rows[:, labels:].ravel(), y


def _python(data: bytes, name: str, where: str) -> tuple[Array, Array]:
    wanted, _, _, classes = LABELS[name]
    pixels, labels, key = b"", [], ""
    try:
        for opcode, value, _ in pickletools.genops(io.BytesIO(data)):
            text = None  # of opcodes of strings, one character for each byte
            if "STRING" in opcode.name or "UNICODE" in opcode.name:
                text = str(value)
            elif "BYTES" in opcode.name and isinstance(value, bytes):
                text = value.decode("latin-1")
            if text is not None:
                key = text if len(text) < 100 else ""
                pixels = max(pixels, text.encode("latin-1"), key=len)
            elif key == wanted and opcode.name in ("BININT1", "BININT2", "BININT", "INT"):
                labels.append(int(str(value)))
    except (ValueError, IndexError, OverflowError) as error:
        raise DataError(
            f"{where} is not a pickle as the archive has it: {one_line(error)}"
        ) from None
    if not labels or len(pixels) != PIXELS * len(labels):
        raise DataError(f"{where} has {len(labels)} labels for {len(pixels)} bytes of images")
    if min(labels) < 0 or max(labels) >= classes:
        raise DataError(
            f"{where} has labels from {min(labels)} to {max(labels)}, and {classes} classes"
        )
    return np.frombuffer(pixels, np.uint8), np.array(labels, np.uint8)
