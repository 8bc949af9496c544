"""The data directory: where data sets are kept, how official files are downloaded, and how files are read and written.

A file is an .npz of arrays, a .jsonl.gz of rows, or bytes. Nothing is unpickled. `FEDSPAN_DATA` names the directory; by
default it is `fedspan` in the cache directory of the platform.

Downloads are resumed where they were cut, checked by SHA-256, and complete or absent. Proxies are those of the
environment (`https_proxy`, `http_proxy`, `no_proxy`) or of the system.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core.digest import sha256
from fedspan.core.errors import DataError, one_line, path_of
from fedspan.core.files import disk_errors, make_dir, remove, replace, write_at, write_atomic
from fedspan.core.system import locked
from fedspan.data.columns import Array, read_npz, read_rows

Contents = Mapping[str, Any]  # path in the data directory → arrays by name, rows, or bytes
Seen = Callable[
    [str, int, int], None
]  # name of the file, bytes that are there, bytes in all (0: unknown)
CHUNK = 1 << 18
TRIES = 3  # at each address; every one goes on where the last one was cut
TIMEOUT = 30  # seconds without a byte
FAILED = (
    OSError,
    http.client.HTTPException,
    ValueError,
)  # of the network, the server, and a malformed proxy


def folder() -> Path:
    """The data directory, whether it exists or not."""
    if named := os.environ.get("FEDSPAN_DATA"):
        return path_of("FEDSPAN_DATA", os.path.expanduser(named))
    caches = {
        "win32": os.environ.get("LOCALAPPDATA", "~/AppData/Local"),
        "darwin": "~/Library/Caches",
    }
    cache = caches.get(sys.platform) or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
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
    if isinstance(contents, list):
        contents = gzip.compress(_lines(contents), mtime=0)
    elif not isinstance(contents, bytes):
        packed = io.BytesIO()
        np.savez_compressed(packed, **contents)
        contents = packed.getbuffer()
    write_atomic(path, contents)


def digest(contents: Contents) -> str:
    """The SHA-256 of values, whatever file they come from."""
    found = hashlib.sha256()
    for name, value in sorted(contents.items()):
        found.update(f"{name}\n".encode())
        if isinstance(value, bytes | list):
            found.update(_lines(value) if isinstance(value, list) else value)
        else:
            for key, array in sorted(value.items()):
                plain: Array = np.ascontiguousarray(array)
                found.update(f"{key} {plain.dtype.str} {plain.shape}\n".encode() + plain.tobytes())
    return found.hexdigest()


def _lines(rows: list[Any]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


# --- Downloads ---


@dataclass(frozen=True)
class File:
    """An official file: where it is in the data directory, and where it comes from."""

    name: str  # path in the data directory
    urls: tuple[str, ...]  # tried in this order
    sha256: str = ""  # empty: not published; what is made of the file is checked instead
    size: int = 0  # bytes


def files_of(
    folder: str, addresses: Sequence[str], known: Mapping[str, tuple[str, int]]
) -> tuple[File, ...]:
    """Return files of one folder that lie at the same addresses; `known` has the SHA-256 and the size of each."""
    return tuple(
        File(f"{folder}/{name}", tuple(at + name for at in addresses), *of)
        for name, of in known.items()
    )


def download(file: File, folder: Path, seen: Seen = lambda *_: None) -> None:
    """Bring a file into the data directory. A part that an earlier call left there is continued.

    Raises:
        DataError: No address gives the file.
        DiskError: The file cannot be written.
    """
    path = folder / file.name
    make_dir(path.parent)
    part, why = path.with_name(f"{path.name}.part"), "no address is known"
    for url in file.urls:
        for _ in range(TRIES):
            resumed = part.exists()
            try:
                _fetch(url, part, file, seen)
                found = sha256(part)
            except FAILED as error:
                reason = error.reason if type(error) is urllib.error.URLError else error
                why = one_line(f"{url}: {reason}")
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break  # it will say the same again
                continue
            if not file.sha256 or found == file.sha256:
                with disk_errors(path):
                    replace(part, path)
                return
            remove(part)
            why = f"{url}: the SHA-256 is {found[:16]}…, not {file.sha256[:16]}…"
            if not resumed:
                break  # it would be the same again
    raise DataError(f"cannot download {path.name} ({why})")


def by_hand(files: Sequence[File], folder: Path) -> str:
    """What to fetch by hand, and where to put it."""
    urls, place = ", ".join(file.urls[0] for file in files), folder / files[0].name
    if len(files) == 1:
        return f"fetch {urls} by hand, save it as {str(place)!r}"
    return f"fetch {urls} by hand, put them into {str(place.parent)!r}"


def _fetch(url: str, part: Path, file: File, seen: Seen) -> None:
    """Append what is missing of a file to its part; raises one of FAILED if the connection is cut."""
    done = part.stat().st_size if part.exists() else 0
    asked = {"User-Agent": "fedspan"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        request = urllib.request.Request(url, headers=asked)  # noqa: S310 - addresses of the catalog
        reply = urllib.request.build_opener().open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if done == file.size:
            return
        remove(part)
        raise ConnectionError("the part did not fit") from None
    with reply:
        if reply.status != http.client.PARTIAL_CONTENT:
            done = 0
        total = done + (reply.length or 0)
        with disk_errors(part):
            out = part.open("r+b" if done else "wb", buffering=0)
        with out:
            while (block := reply.read(CHUNK)) and not 0 < file.size < done:
                with disk_errors(part):
                    write_at(out.fileno(), block, done)
                done += len(block)
                seen(file.name, done, total or file.size)
        if done < total and not 0 < file.size < done:
            raise ConnectionError(f"cut after {done:,} of {total:,} bytes")
