"""The official files of MNIST (IDX) and CIFAR (Python or binary archives), read without unpickling anything.

The Python form of CIFAR is a pickle. It is read opcode by opcode with `pickletools`, which runs nothing: the images are
its one long string, the labels the whole numbers that follow the name of their list.
"""

from __future__ import annotations

import gzip
import io
import math
import pickletools
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import DataError, one_line

PIXELS = 3 * 32 * 32
LABELS = {
    "cifar-10": ("labels", 0, 1, 10),
    "cifar-100": ("fine_labels", 1, 2, 100),
}  # name; its byte and how many, in binary; classes
MOST = 1 << 28  # bytes that are unpacked of a file; the largest official one has 186 million
Array = npt.NDArray[Any]
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
TYPES = {0x08: ">u1", 0x0C: ">i4"}  # of IDX files


def idx(path: Path, most: int = MOST) -> Array:
    """A packed IDX file: two zero bytes, a type, the number of axes, their lengths, the values."""
    with gzip.open(path) as packed:
        raw = _unpacked(packed, path, most)
    kind = (
        TYPES.get(raw[2])
        if len(raw) > 4 and raw[:2] == b"\0\0" and len(raw) >= 4 + 4 * raw[3]
        else None
    )
    shape = [] if kind is None else np.frombuffer(raw, ">i4", raw[3], 4).tolist()
    values = (
        np.frombuffer(raw, kind or np.uint8, offset=4 + 4 * len(shape)) if shape else np.empty(0)
    )
    if not shape or len(values) != math.prod(shape) or min(shape) < 0:
        raise DataError(f"{str(path)!r} is not an IDX file of bytes or whole numbers")
    return values.reshape(shape).astype(values.dtype.newbyteorder("="))


def idx_splits(files: Mapping[str, Path], folder: str) -> dict[str, Array]:
    """`train_x`, `train_y`, `test_x` and `test_y` of the four files of MNIST, or of a data set in its format."""
    arrays = {}
    for part, name in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_x"] = idx(files[f"{folder}/{name}-images-idx3-ubyte.gz"])
        arrays[f"{part}_y"] = idx(files[f"{folder}/{name}-labels-idx1-ubyte.gz"])
    return arrays


def hub_splits(
    splits: Mapping[str, Mapping[str, Any]], image: str = "image", label: str = "label"
) -> dict[str, Array]:
    """The same of the columns that a hub gives."""
    arrays: dict[str, Array] = {}
    for part, columns in splits.items():
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


def cifar(archive: Path, name: Literal["cifar-10", "cifar-100"]) -> dict[str, Array]:
    """`train_x`, `train_y`, `test_x` and `test_y` of an archive."""
    suffix = ".bin" if "binary" in archive.name else ""
    train = (
        [f"data_batch_{i}{suffix}" for i in range(1, 6)]
        if name == "cifar-10"
        else [f"train{suffix}"]
    )
    test = [f"test_batch{suffix}" if name == "cifar-10" else f"test{suffix}"]
    files = {
        path.name: data
        for path, data in members(archive, lambda path: path.name in (*train, *test)).items()
    }
    read = _binary if suffix else _python
    arrays: dict[str, Array] = {}
    for part, names in (("train", train), ("test", test)):
        for one in names:
            if one not in files:
                raise DataError(f"{str(archive)!r} has no file {one!r}")
        pieces = [read(files[one], name, f"{archive.name}/{one}") for one in names]
        arrays[f"{part}_x"] = np.concatenate([x for x, _ in pieces])
        arrays[f"{part}_y"] = np.concatenate([y for _, y in pieces])
    return arrays


def _images(flat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rows of 3072 bytes, color by color, as (n, 32, 32, 3)."""
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _binary(data: bytes, name: str, where: str) -> Arrays:
    _, place, labels, classes = LABELS[name]
    if not data or len(data) % (labels + PIXELS):
        raise DataError(f"{where} has {len(data)} bytes, which is no whole number of images")
    rows = np.frombuffer(data, np.uint8).reshape(-1, labels + PIXELS)
    if rows[:, place].max() >= classes:
        raise DataError(f"{where} has the label {rows[:, place].max()}, and {classes} classes")
    return _images(rows[:, labels:]), rows[:, place].copy()


def _python(data: bytes, name: str, where: str) -> Arrays:
    wanted, _, _, classes = LABELS[name]
    pixels, labels, key = b"", [], ""
    try:
        for opcode, value, _ in pickletools.genops(io.BytesIO(data)):
            text = _text(opcode.name, value)
            if text is not None:
                key = text if len(text) < 100 else ""
                pixels = text.encode("latin-1") if len(text) > len(pixels) else pixels
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
    return _images(np.frombuffer(pixels, np.uint8)), np.array(labels, np.uint8)


def _text(opcode: str, value: Any) -> str | None:
    """A string opcode's text, each byte one character; None for other opcodes."""
    if "STRING" in opcode or "UNICODE" in opcode:
        return str(value)
    return value.decode("latin-1") if "BYTES" in opcode and isinstance(value, bytes) else None
