"""Data sets from Hugging Face's hub, by the library `datasets`."""

import importlib.util
import logging
import urllib.error
import urllib.request
from typing import Any

from fedspan.core.errors import one_line
from fedspan.data.sets import HubError, Splits

TIMEOUT = 10  # seconds


def installed() -> bool:
    """Whether the libraries are there that load data sets and their images."""
    return all(importlib.util.find_spec(name) is not None for name in ("datasets", "PIL"))


def load(hub: str) -> Splits:
    """The columns of a data set's two halves, and the names of classes as `COLUMN_names`.

    Args:
        hub: The data set, as PATH or PATH@REVISION.

    Raises:
        HubError: The hub does not answer, or does not give it.
    """
    import datasets
    from huggingface_hub import constants

    # the library itself would try for half a minute; offline it has its own cache
    if not constants.HF_HUB_OFFLINE:
        try:
            request = urllib.request.Request(constants.ENDPOINT, method="HEAD")  # noqa: S310 - the user's own hub
            urllib.request.urlopen(request, timeout=TIMEOUT).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()  # it answers
        except (OSError, ValueError) as error:
            raise HubError(
                f"the hub {constants.ENDPOINT} does not answer ({one_line(str(error))})"
            ) from None

    path, _, revision = hub.partition("@")
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of every attempt
    found: dict[str, dict[str, Any]] = {}
    try:
        splits = datasets.load_dataset(path, revision=revision or None)
        for part in ("train", "test"):
            found[part] = {name: splits[part][name] for name in splits[part].column_names}
            for name, kind in splits[part].features.items():
                if hasattr(kind, "names"):
                    found[part][f"{name}_names"] = kind.names
    except Exception as error:  # of the network, the hub and the library, which has many kinds
        raise HubError(f"the hub does not give {path!r} ({one_line(error)})") from None
    finally:
        log.setLevel(level)
    return found
