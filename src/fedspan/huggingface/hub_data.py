"""Data sets from Hugging Face's hub, by the library `datasets`."""

from __future__ import annotations

import importlib.util
from typing import Any

from fedspan.core.errors import DataError, one_line
from fedspan.data.sets import Files, Hub
from fedspan.data.store import Contents

LIBRARIES = ("datasets", "PIL")


def installed() -> bool:
    """Whether the libraries are there that load data sets and their images."""
    return all(importlib.util.find_spec(name) is not None for name in LIBRARIES)


def load(hub: Hub, files: Files) -> Contents:
    """A data set of the hub, converted.

    Raises:
        DataError: The hub does not give it.
    """
    import datasets

    try:
        found = datasets.load_dataset(hub.path, revision=hub.revision)
        return hub.convert({part: columns(found[part]) for part in ("train", "test")}, files)
    except Exception as error:  # of the network, the hub and the library, which has many kinds
        raise DataError(f"the hub does not give {hub.path!r}: {one_line(error)}") from None


def columns(split: Any) -> dict[str, Any]:
    """Column → values, and the names of classes as `COLUMN_names`."""
    named = {f"{name}_names": kind.names for name, kind in split.features.items() if hasattr(kind, "names")}
    return {name: split[name] for name in split.column_names} | named
