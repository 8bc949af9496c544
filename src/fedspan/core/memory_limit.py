"""Memory that a run needs, held against what the machine has, before anything is allocated."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from fedspan.core import system
from fedspan.core.errors import SpecError

LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def check_memory(needed: int, remedy: str) -> None:
    """Refuses what needs more bytes than the machine has; `remedy` says what to make smaller."""
    if needed > machine_memory():
        size = f"{needed / 1e9:,.0f} GB" if needed < 10**18 else "more than a billion GB"
        raise SpecError(
            f"this needs {size} of memory, and the machine has {machine_memory() / 1e9:,.0f} GB; {remedy}"
        )


@functools.cache
def machine_memory() -> int:
    """Bytes of memory of the machine, or of the container."""
    found = system.memory()
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found = min(found, int(LIMIT.read_text("utf-8")))
    return found
