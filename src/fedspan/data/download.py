"""Downloads of official files: resumed where they were cut, checked by SHA-256, complete or absent.

Proxies are those of the environment (`https_proxy`, `http_proxy`, `no_proxy`) or of the system.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedspan.core.errors import DataError, one_line
from fedspan.core.files import disk_errors, make_dir, remove, replace

Seen = Callable[[str, int, int], None]  # name of the file, bytes that are there, bytes in all (0: unknown)
CHUNK = 1 << 18
TRIES = 3  # at each address; every one goes on where the last one was cut
TIMEOUT = 30  # seconds without a byte
FAILED = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class File:
    """An official file: where it is in the data directory, and where it comes from."""

    name: str  # path in the data directory
    urls: tuple[str, ...]  # tried in this order
    sha256: str = ""  # empty: not published; what is made of the file is checked instead
    size: int = 0  # bytes
    also: str = ""  # another official file that serves as well, if it was fetched by hand


def download(file: File, folder: Path, command: str, seen: Seen = lambda *_: None) -> None:
    """Bring a file into the data directory. A part that an earlier call left there is continued.

    Raises:
        DataError: No address gives the file; the message says what to fetch by hand.
        DiskError: The file cannot be written.
    """
    path = folder / file.name
    make_dir(path.parent)
    part, why = path.with_name(f"{path.name}.part"), "no address is known"
    for url in file.urls:
        for _ in range(TRIES):
            try:
                _fetch(url, part, file, seen)
            except FAILED as error:
                why = one_line(f"{url}: {error}")
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    break  # it will say the same again
                continue
            found = sha256(part)
            if not file.sha256 or found == file.sha256:
                with disk_errors(path):
                    replace(part, path)
                return
            remove(part)
            why = f"{url}: the SHA-256 is {found[:16]}…, not {file.sha256[:16]}…"
    raise DataError(
        f"cannot download {path.name} ({why}); run `{command}` again, or fetch {file.urls[0]} by hand, save it as "
        f"{str(path)!r} and run the command then"
    )


def check(file: File, path: Path) -> None:
    """Refuse a file that is not the official one."""
    if file.sha256 and (found := sha256(path)) != file.sha256:
        raise DataError(
            f"{str(path)!r} is not the official file: its SHA-256 is {found[:16]}…, not {file.sha256[:16]}…; delete it"
        )


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _fetch(url: str, part: Path, file: File, seen: Seen) -> None:
    """Append what is missing of a file to its part; raises one of FAILED if the connection is cut."""
    with disk_errors(part):
        done = part.stat().st_size if part.exists() else 0
    asked = {"User-Agent": "fedspan"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        request = urllib.request.Request(url, headers=asked)  # noqa: S310 - addresses of the catalog
        reply = urllib.request.build_opener().open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # the part is complete, or not of this file
            if file.size and done == file.size:
                return
            remove(part)
            raise ConnectionError("the part did not fit") from None
        raise
    with reply:
        if reply.status != http.client.PARTIAL_CONTENT:
            done = 0
        total = done + int(reply.headers.get("Content-Length") or 0)
        with disk_errors(part):
            out = part.open("ab" if done else "wb")
        with out:
            while block := reply.read(CHUNK):
                with disk_errors(part):
                    out.write(block)
                done += len(block)
                seen(file.name, done, total or file.size)
            with disk_errors(part):
                out.flush()
        if done < total:
            raise ConnectionError(f"cut after {done:,} of {total:,} bytes")
