"""Files that are complete or absent, whatever happens while they are written.

Everything that fedspan writes goes through these functions. They write all bytes or raise, never follow a link that
somebody else has planted, and name the file in the error.
"""

from __future__ import annotations

import csv
import errno
import functools
import io
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from fedspan.core import system
from fedspan.core.errors import DiskError, ResumableError, SpecError

Bytes = bytes | bytearray | memoryview
CHUNK = 1 << 30  # one call of the system writes at most 2 GiB


def write_atomic(path: Path, *parts: Bytes, private: bool = False) -> None:
    """Replaces a file in one step that survives a crash at any moment.

    Args:
        path: The file.
        parts: What it holds, one after the other.
        private: Only the owner may read it.
    """
    if private:
        system.warn_if_public()
    with disk_errors(path):
        file, name = tempfile.mkstemp(
            prefix=f".{path.name}.", dir=path.parent
        )  # new, and the owner's alone
        try:
            try:
                end = 0
                for part in parts:
                    end += write_at(file, part, end)
                if not private:
                    system.set_mode(file, 0o666 & ~_umask())
                system.flush(file)
            finally:
                os.close(file)
            replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        system.flush_dir(path.parent)


def replace(old: Path | str, new: Path) -> None:
    """Gives a file the name of another one, which is gone."""
    system.patiently(lambda: os.replace(old, new))


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Deletes what `write_atomic` has left of these files where the process was killed; only their writer may call."""
    ours = re.compile(
        rf"\.({'|'.join(map(re.escape, names))})\.[a-z0-9_]{{8}}"
    )  # as `mkstemp` names them
    for path in folder.glob(".*"):
        if ours.fullmatch(path.name) and not path.is_dir():
            remove(path)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    with disk_errors(path):
        file = system.open_bytes(path, flags)
        try:
            yield file
        finally:
            os.close(file)


def append(path: Path, data: Bytes) -> None:
    """Adds to the end of a file in one piece; where that fails, the file is as before."""
    with _opened(path, os.O_WRONLY | os.O_CREAT) as file:
        end = os.fstat(file).st_size
        try:
            write_at(file, data, end)
        except OSError:
            os.ftruncate(file, end)
            raise


def sync(path: Path) -> None:
    """Makes what was appended to a file survive a loss of power."""
    with _opened(path, os.O_WRONLY) as file:
        system.flush(file)


def make_dir(path: Path) -> None:
    """Makes a directory and those above it, where they are missing."""
    with disk_errors(path, "choose another place, or check its rights"):
        path.mkdir(parents=True, exist_ok=True)


def remove(path: Path) -> None:
    """Deletes a file, if it is there."""
    with disk_errors(path):
        system.patiently(lambda: path.unlink(missing_ok=True))


@contextmanager
def lock_dir(path: Path) -> Iterator[None]:
    """Lock a directory, creating it if needed; the system releases the lock when the process dies.

    Raises:
        SpecError: if another process holds the lock.
    """
    make_dir(path)
    with ExitStack() as held:
        try:
            held.enter_context(system.locked(path))
        except BlockingIOError:
            raise SpecError(
                f"{str(path)!r} is being written by another process; wait for it, or choose another run directory"
            ) from None
        try:
            yield
        except BaseException:
            with suppress(OSError):  # leave no empty directory behind
                path.rmdir()
            raise


@contextmanager
def removed_on_failure(
    written: Callable[[], Iterable[Path]], begun: Callable[[], object]
) -> Iterator[None]:
    """Removes what a failed start has written, so that a corrected call can begin.

    Args:
        written: The files and folders that a start may write. Those that were there before stay, and folders with
            something else in them.
        begun: Whether the start did not fail, and the run must be resumed instead.
    """
    before = {path for path in written() if path.exists()}
    try:
        yield
    except ResumableError:
        raise
    except Exception:
        if not begun():
            new = {path for path in written() if path.exists()} - before
            for path in sorted(new, reverse=True):  # a folder after what is in it
                with suppress(OSError, ResumableError):
                    path.rmdir() if path.is_dir() else remove(path)
        raise


def write_at(file: int, data: Bytes, start: int) -> int:
    """Writes all bytes at a place of an open file; gives their number."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        wrote = system.write_some(file, view[done : done + CHUNK], start + done)
        if wrote <= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += wrote
    return done


def read_at(file: int, size: int, start: int) -> bytearray:
    """Reads exactly `size` bytes at a place of an open file; fewer only where the file ends."""
    found, done, read = bytearray(size), 0, 1
    with memoryview(found) as view:
        while done < size and read:
            read = system.read_some(file, view[done : done + CHUNK], start + done)
            done += read
    del found[done:]
    return found


@contextmanager
def disk_errors(path: Path, remedy: str = "what was saved before is intact") -> Iterator[None]:
    """Turns errors of the system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot write {str(path)!r}: {error.strerror or error}; {remedy}"
        ) from error


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows under the names of all their values; what a row does not have stays empty."""
    text = io.StringIO()
    table = csv.DictWriter(
        text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n"
    )
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


@functools.cache
def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
