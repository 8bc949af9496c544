"""What operating systems do differently. The rest of fedspan asks no questions about platforms.

Calls that Windows lacks have a substitute here with the same effect. Two effects cannot be had there: files that only
their owner may read, about which a warning is issued, and a directory that is flushed to disk, which NTFS does itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import io
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


fcntl, msvcrt = _module("fcntl"), _module("msvcrt")
WINDOWS = msvcrt is not None  # a file that is open or mapped can neither be deleted nor replaced
# seconds in which another process may close a file
PAUSES = (0.01, 0.05, 0.25, 1.0) if WINDOWS else ()
# macOS: fsync leaves the data in the drive's own memory
FULL_FSYNC = getattr(fcntl, "F_FULLFSYNC", None)
_position = threading.Lock()  # of a file, where it is moved to read or write


def open_bytes(path: Path, flags: int, *, private: bool = False) -> int:
    """Opens a file that is no link; a new one is the owner's alone if `private`."""
    if not hasattr(os, "O_NOFOLLOW") and os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if private:
        warn_if_public()
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o600 if private else 0o666)


def write_some(file: int, data: memoryview, start: int) -> int:
    """Writes bytes at a place of a file; returns how many."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, start)
    with _position:
        os.lseek(file, start, os.SEEK_SET)
        return os.write(file, data)


def read_some(file: int, into: memoryview, start: int) -> int:
    """Reads bytes at a place of a file; returns how many, 0 at its end."""
    if hasattr(os, "preadv"):
        return os.preadv(file, [into], start)
    with _position, io.FileIO(file, closefd=False) as opened:
        opened.seek(start)
        return opened.readinto(into) or 0


def flush(file: int) -> None:
    """Makes what was written to a file survive a loss of power."""
    if FULL_FSYNC is not None:
        with contextlib.suppress(OSError):  # a file system that does not know it
            fcntl.fcntl(file, FULL_FSYNC)
            return
    os.fsync(file)


def flush_dir(path: Path) -> None:
    """Makes the names in a directory survive a loss of power."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def set_mode(file: int, mode: int) -> None:
    """Sets the permissions of an open file, where files have them."""
    if hasattr(os, "fchmod"):
        os.fchmod(file, mode)


def patiently(act: Callable[[], None]) -> None:
    """Deletes or replaces a file; on Windows again, if another process has it open."""
    for pause in PAUSES:
        try:
            return act()
        except PermissionError:
            time.sleep(pause)
    return act()


@functools.cache
def warn_if_public() -> None:
    """Warns, once and not in worker processes, where files cannot be made private."""
    if not hasattr(os, "getuid") and multiprocessing.parent_process() is None:
        warnings.warn(
            "checkpoints and client states cannot be made private on this system: whoever may read their folder can "
            "read them",
            stacklevel=2,
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a directory until the context or the process ends.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    beside: Path | None = None  # Windows opens no directory
    if fcntl is None:
        beside = folder.absolute().parent / f".{folder.absolute().name}.lock"
        file = open_bytes(beside, os.O_RDWR | os.O_CREAT)
    else:
        file = os.open(folder, os.O_RDONLY)
    try:
        if beside is None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        os.close(file)
        if beside is None:
            raise
        raise BlockingIOError(*error.args) from None
    try:
        yield
    finally:
        os.close(file)
        if beside is not None:
            with contextlib.suppress(OSError):  # another process has it now
                beside.unlink()


def memory() -> int:
    """Bytes of memory of the machine."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # MEMORYSTATUSEX: begins with its own size; next is the machine's memory
    status = (ctypes.c_ulonglong * 8)(64)
    kernel32 = getattr(ctypes, "windll").kernel32  # noqa: B009 (known to type checkers on Windows alone)
    kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status[1]) or sys.maxsize


def release_memory() -> None:
    """Returns freed memory to the system: glibc keeps that of many runs in one process, gigabytes in a long study."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
