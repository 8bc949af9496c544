"""A lock on a run directory, so that two processes never mix their rows in one history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedspan.core.errors import SpecError
from fedspan.core.files import make_dir
from fedspan.core.system import locked


@contextmanager
def lock_dir(path: Path) -> Iterator[None]:
    """Lock a directory, creating it if needed; the system releases the lock when the process dies.

    Raises:
        SpecError: if another process holds the lock.
    """
    make_dir(path)
    with ExitStack() as held:
        try:
            held.enter_context(locked(path))
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
