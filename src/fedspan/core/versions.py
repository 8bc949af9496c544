"""What the numbers of a run depend on besides its spec, found without importing it."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import version

import fedspan


@functools.cache
def versions() -> dict[str, str]:
    """The versions of fedspan, Python, torch and NumPy."""
    others = {name: version(name) for name in ("torch", "numpy")}
    return {"fedspan": fedspan.__version__, "python": platform.python_version(), **others}
