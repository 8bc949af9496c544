"""The data directory: where data sets are kept, and how their files are read and written. Nothing is unpickled.

A file is an .npz of arrays, a .jsonl.gz of rows, or bytes. `FEDSPAN_DATA` names the directory; by default it is
`fedspan` in the cache directory of the platform.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import path_of
from fedspan.core.files import make_dir, write_atomic
from fedspan.core.system import locked
from fedspan.data.columns import read_npz, read_rows

Contents = Mapping[str, Any]  # path in the data directory → arrays by name, rows, or bytes


def folder() -> Path:
    """The data directory, whether it exists or not."""
    if named := os.environ.get("FEDSPAN_DATA"):
        return path_of("FEDSPAN_DATA", os.path.expanduser(named))
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        cache = "~/Library/Caches"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "fedspan"


@contextmanager
def alone(wait: Callable[[], None]) -> Iterator[None]:
    """Hold the data directory; `wait` is called again and again while another process brings data into it."""
    make_dir(folder())
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(folder()))
            except BlockingIOError:
                wait()
                time.sleep(0.2)
                continue
            except OSError:  # a file system without locks
                pass
            break
        yield


def read(path: Path) -> Any:
    """The contents of a file: arrays by name, rows, or bytes; raises one of UNREADABLE."""
    if path.suffix == ".npz":
        return read_npz(path)
    return read_rows(path) if path.name.endswith(".jsonl.gz") else path.read_bytes()


def write(path: Path, contents: Any) -> None:
    """Write arrays, rows or bytes to a file, all of it or nothing."""
    make_dir(path.parent)
    if isinstance(contents, bytes):
        write_atomic(path, contents)
    elif isinstance(contents, list):
        write_atomic(path, gzip.compress(_lines(contents), mtime=0))
    else:
        packed = io.BytesIO()
        np.savez_compressed(packed, **contents)
        write_atomic(path, packed.getbuffer())


def digest(contents: Contents) -> str:
    """The SHA-256 of values, whatever file they come from."""
    found = hashlib.sha256()
    for name, value in sorted(contents.items()):
        found.update(f"{name}\n".encode())
        if isinstance(value, bytes):
            found.update(value)
        elif isinstance(value, list):
            found.update(_lines(value))
        else:
            for key, array in sorted(value.items()):
                plain: npt.NDArray[Any] = np.ascontiguousarray(array)
                found.update(f"{key} {plain.dtype.str} {plain.shape}\n".encode() + plain.tobytes())
    return found.hexdigest()


def _lines(rows: list[Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()
