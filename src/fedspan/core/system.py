"""What operating systems do differently."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a directory until the context or the process ends.

    Raises:
        BlockingIOError: Another process has locked it.
    """
    if os.name != "posix":  # no flock: users must keep two processes apart themselves
        yield
        return
    fcntl = importlib.import_module("fcntl")
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)
