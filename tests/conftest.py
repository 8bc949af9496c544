"""Settings of the whole test run. What test files share is in `support/`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from fedspan.core import registry

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def plugins_are_forgotten() -> Iterator[None]:
    """What a file of a user or a study registers is gone at the end of a test file."""
    yield
    for known in registry._known.values():
        for name, cls in list(known.items()):
            if not cls.__module__.startswith("fedspan."):
                del known[name]
                sys.modules.pop(cls.__module__, None)


@pytest.fixture(scope="module", autouse=True)
def browser_is_closed() -> Iterator[None]:
    """The pages of a test file share one browser, which ends with the file."""
    yield
    if "support.browsing" in sys.modules:
        sys.modules["support.browsing"].close()
