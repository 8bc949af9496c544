"""Memory that a run needs, held against what the machine has, before anything is allocated."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from fedspan.core.errors import SpecError

LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def check_memory(needed: int, remedy: str) -> None:
    """Refuses what needs more bytes than the machine has; `remedy` says what to make smaller."""
    if needed > machine_memory():
        size = f"{needed / 1e9:,.0f} GB" if needed < 10**18 else "more than a billion GB"
        raise SpecError(f"this needs {size} of memory, and the machine has {machine_memory() / 1e9:,.0f} GB; {remedy}")


@functools.cache
def machine_memory() -> int:
    """Bytes of memory of the machine, or of the container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found = min(found, int(LIMIT.read_text()))
    return found
