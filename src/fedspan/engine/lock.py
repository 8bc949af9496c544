"""A lock on a run directory, so that two processes never mix their rows in one history."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedspan.core.errors import SpecError
from fedspan.core.files import make_dir


@contextmanager
def lock_dir(path: Path) -> Iterator[None]:
    """Lock a directory, creating it if needed; the system releases the lock when the process dies.

    Raises:
        SpecError: if another process holds the lock.
    """
    make_dir(path)
    if os.name != "posix":  # no flock: users must keep two processes apart themselves
        yield
        return
    fcntl = importlib.import_module("fcntl")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SpecError(
            f"{str(path)!r} is being written by another process; wait for it, or choose another run directory"
        ) from None
    try:
        yield
    except BaseException:
        with suppress(OSError):  # leave no empty directory behind
            path.rmdir()
        raise
    finally:
        os.close(descriptor)
