"""Optional libraries: asked for before the work begins, with the command that installs them."""

from __future__ import annotations

import importlib

from fedspan.core.errors import FedspanError


def needs(extra: str, *modules: str) -> None:
    """Fail before hours of computing rather than after, where a library of an extra is not installed."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise FedspanError(f"{error.name or name} is not installed; pip install 'fedspan[{extra}]'") from None
