"""One process at a time in a folder: two that write the same run would mix their rows."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedspan.core.errors import SpecError


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, made where it is not there, or say that another process does. A process that dies lets go."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.name != "posix":  # there only care keeps two processes apart
        yield
        return
    fcntl = importlib.import_module("fcntl")
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise SpecError(
            f"{str(folder)!r} is being written by another process; wait for it, or choose another --out"
        ) from None
    try:
        yield
    except BaseException:
        with suppress(OSError):  # where nothing was written, leave nothing
            folder.rmdir()
        raise
    finally:
        os.close(place)
