"""Optional libraries: checked before the work begins, with the command that installs them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

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
