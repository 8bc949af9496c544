"""Downloads of official files: resumed where they were cut, checked by SHA-256, complete or absent.

Proxies are those of the environment (`https_proxy`, `http_proxy`, `no_proxy`) or of the system.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedspan.core.digest import sha256
from fedspan.core.errors import DataError, one_line
from fedspan.core.files import disk_errors, make_dir, remove, replace, write_at

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


@dataclass(frozen=True)
class File:
    """An official file: where it is in the data directory, and where it comes from."""

    name: str  # path in the data directory
    urls: tuple[str, ...]  # tried in this order
    sha256: str = ""  # empty: not published; what is made of the file is checked instead
    size: int = 0  # bytes
    also: str = ""  # another official file that serves as well, if it was fetched by hand
    also_sha256: str = ""


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
