"""The official CIFAR archives, in their Python or their binary form, without unpickling anything.

The Python form is a pickle. It is read opcode by opcode with `pickletools`, which runs nothing: the images are its one
long string, the labels the whole numbers that follow the name of their list.
"""

from __future__ import annotations

import io
import pickletools
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import DataError

PIXELS = 3 * 32 * 32
LABELS = {"cifar-10": ("labels", 0, 1), "cifar-100": ("fine_labels", 1, 2)}  # name; its byte and how many, in binary
Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def read(folder: Path, name: str) -> tuple[Arrays, Arrays] | None:
    """(train, test) of `cifar-10` or `cifar-100` from either archive; None where there is none."""
    for form in ("python", "binary"):
        archive = folder / f"{name}-{form}.tar.gz"
        if archive.is_file():
            try:
                with tarfile.open(archive) as files:
                    found = {Path(m.name).name: files.extractfile(m) for m in files if m.isfile()}
                    return _split({k: v.read() for k, v in found.items() if v is not None}, name, form, archive)
            except (tarfile.TarError, EOFError, OSError) as error:
                raise DataError(f"{str(archive)!r} cannot be read: {error}; get it again") from None
    return None


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
    return _images(rows[:, labels:]), rows[:, place].astype(np.int64)


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
    except (ValueError, UnicodeEncodeError) as error:
        raise DataError(f"{where} is not a pickle as the archive has it: {error}; get it again") from None
    if not labels or len(pixels) != PIXELS * len(labels):
        raise DataError(f"{where} has {len(labels)} labels for {len(pixels)} bytes of images; get it again")
    return _images(np.frombuffer(pixels, np.uint8)), np.array(labels, np.int64)


def _text(opcode: str, value: Any) -> str | None:
    """A string opcode's text, each byte one character; None for other opcodes."""
    if "STRING" in opcode or "UNICODE" in opcode:
        return str(value)
    return value.decode("latin-1") if "BYTES" in opcode and isinstance(value, bytes) else None
