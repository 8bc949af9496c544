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
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import DataError

PIXELS = 3 * 32 * 32
LABELS = {"cifar-10": ("labels", 0, 1), "cifar-100": ("fine_labels", 1, 2)}  # name; its byte and how many, in binary
Array = npt.NDArray[Any]
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
TYPES = {0x08: ">u1", 0x0C: ">i4"}  # of IDX files


def idx(path: Path) -> Array:
    """A packed IDX file: two zero bytes, a type, the number of axes, their lengths, the values."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{str(path)!r} cannot be read: {error}; get it again") from None
    kind = TYPES.get(raw[2]) if len(raw) > 4 and raw[:2] == b"\0\0" and len(raw) >= 4 + 4 * raw[3] else None
    shape = [] if kind is None else np.frombuffer(raw, ">i4", raw[3], 4).tolist()
    values = np.frombuffer(raw, kind or np.uint8, offset=4 + 4 * len(shape)) if shape else np.empty(0)
    if not shape or len(values) != math.prod(shape) or min(shape) < 0:
        raise DataError(f"{str(path)!r} is not an IDX file of bytes or whole numbers; get it again")
    return values.reshape(shape).astype(values.dtype.newbyteorder("="))


def cifar(archive: Path, name: Literal["cifar-10", "cifar-100"]) -> dict[str, Array]:
    """`train_x`, `train_y`, `test_x` and `test_y` of an archive."""
    form = "binary" if "binary" in archive.name else "python"
    try:
        with tarfile.open(archive) as files:
            found = {Path(m.name).name: files.extractfile(m) for m in files if m.isfile()}
            (x, y), (test_x, test_y) = _split({k: v.read() for k, v in found.items() if v}, name, form, archive)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{str(archive)!r} cannot be read: {error}; get it again") from None
    return {"train_x": x, "train_y": y, "test_x": test_x, "test_y": test_y}


def _split(files: dict[str, bytes], name: str, form: str, archive: Path) -> tuple[Arrays, Arrays]:
    suffix = ".bin" if form == "binary" else ""
    train = [f"data_batch_{i}{suffix}" for i in range(1, 6)] if name == "cifar-10" else [f"train{suffix}"]
    test = [f"test_batch{suffix}" if name == "cifar-10" else f"test{suffix}"]
    for wanted in (*train, *test):
        if wanted not in files:
            raise DataError(f"{str(archive)!r} has no file {wanted!r}; get it again")
    part = _binary if form == "binary" else _python
    both = []
    for names in (train, test):
        pieces = [part(files[one], name, f"{archive.name}/{one}") for one in names]
        both.append((np.concatenate([x for x, _ in pieces]), np.concatenate([y for _, y in pieces])))
    return both[0], both[1]


def _images(flat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Rows of 3072 bytes, color by color, as (n, 32, 32, 3)."""
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _binary(data: bytes, name: str, where: str) -> Arrays:
    _, place, labels = LABELS[name]
    if len(data) % (labels + PIXELS):
        raise DataError(f"{where} has {len(data)} bytes, which is no whole number of images; get it again")
    rows = np.frombuffer(data, np.uint8).reshape(-1, labels + PIXELS)
    return _images(rows[:, labels:]), rows[:, place].copy()


def _python(data: bytes, name: str, where: str) -> Arrays:
    wanted, pixels, labels, key = LABELS[name][0], b"", [], ""
    try:
        for opcode, value, _ in pickletools.genops(io.BytesIO(data)):
            text = _text(opcode.name, value)
            if text is not None:
                key = text if len(text) < 100 else ""
                pixels = text.encode("latin-1") if len(text) > len(pixels) else pixels
            elif key == wanted and opcode.name in ("BININT1", "BININT2", "BININT", "INT"):
                labels.append(int(str(value)))
    except (ValueError, IndexError, UnicodeError) as error:
        raise DataError(f"{where} is not a pickle as the archive has it: {error}; get it again") from None
    if not labels or len(pixels) != PIXELS * len(labels):
        raise DataError(f"{where} has {len(labels)} labels for {len(pixels)} bytes of images; get it again")
    return _images(np.frombuffer(pixels, np.uint8)), np.array(labels, np.uint8)


def _text(opcode: str, value: Any) -> str | None:
    """A string opcode's text, each byte one character; None for other opcodes."""
    if "STRING" in opcode or "UNICODE" in opcode:
        return str(value)
    return value.decode("latin-1") if "BYTES" in opcode and isinstance(value, bytes) else None
