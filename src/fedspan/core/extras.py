"""Libraries: optional ones are checked before the work begins; numbers depend on the versions of others."""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import fedspan
from fedspan.core.errors import FedspanError


def needs(extra: str, *modules: str) -> None:
    """Raises FedspanError if a library of an extra is not installed; before hours of computing, not after."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise FedspanError(
                f"{error.name or name} is not installed; pip install 'fedspan[{extra}]'"
            ) from None


def data_frame(rows: Iterable[dict[str, Any]]) -> Any:
    """Rows as a pandas DataFrame."""
    needs("pandas", "pandas")
    import pandas as pd

    return pd.DataFrame(rows)


@functools.cache
def versions() -> dict[str, str]:
    """The versions of fedspan, Python, torch and NumPy, found without importing them."""
    own = {"fedspan": fedspan.__version__, "python": platform.python_version()}
    return own | {name: version(name) for name in ("torch", "numpy")}
