"""Packed official files: IDX files of MNIST, and members of .tar.gz archives, read in memory up to a bound."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from fedspan.core.errors import DataError
from fedspan.data.columns import Array

MOST = 1 << 28  # bytes that are unpacked of a file; the largest official one has 184 million
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


def members(archive: Path, pattern: str, most: int = MOST) -> dict[PurePosixPath, bytes]:
    """The files of a .tar.gz archive that match a pattern. Nothing is written to disk, and links are left out."""
    found: dict[PurePosixPath, bytes] = {}
    with tarfile.open(archive, "r:gz") as files:
        for member in files:
            name = PurePosixPath(member.name)
            if member.isfile() and name.match(pattern):
                data = files.extractfile(member)
                assert data is not None  # it is a file
                found[name] = _unpacked(data, archive, most)
                most -= len(found[name])
    return found


def _unpacked(file: IO[bytes] | gzip.GzipFile, path: Path, most: int) -> bytes:
    data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{str(path)!r} unpacks to many more bytes than the official file")
    return data
