"""Data sets from Hugging Face's hub, by the library `datasets`."""

from __future__ import annotations

import importlib.util
import logging
import urllib.error
import urllib.request
from typing import Any

from fedspan.core.errors import one_line
from fedspan.data.sets import Files, Hub, HubError
from fedspan.data.store import Contents

LIBRARIES = ("datasets", "PIL")
TIMEOUT = 10  # seconds


def installed() -> bool:
    """Whether the libraries are there that load data sets and their images."""
    return all(importlib.util.find_spec(name) is not None for name in LIBRARIES)


def reach() -> None:
    """Ask whether the hub answers: the library itself would try for half a minute. Offline it has its own cache.

    Raises:
        HubError: The hub does not answer.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310 - the user's own hub
        urllib.request.urlopen(request, timeout=TIMEOUT).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()  # it answers
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise HubError(
            f"the hub {constants.ENDPOINT} does not answer ({one_line(str(reason))})"
        ) from None


def load(hub: Hub, files: Files) -> Contents:
    """A data set of the hub, converted.

    Raises:
        HubError: The hub does not give it.
    """
    import datasets

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every attempt
    try:
        found = datasets.load_dataset(hub.path, revision=hub.revision)
        return hub.convert({part: columns(found[part]) for part in ("train", "test")}, files)
    except Exception as error:  # of the network, the hub and the library, which has many kinds
        raise HubError(f"the hub does not give {hub.path!r} ({one_line(error)})") from None
    finally:
        log.setLevel(level)


def columns(split: Any) -> dict[str, Any]:
    """Column → values, and the names of classes as `COLUMN_names`."""
    named = {
        f"{name}_names": kind.names
        for name, kind in split.features.items()
        if hasattr(kind, "names")
    }
    return {name: split[name] for name in split.column_names} | named
