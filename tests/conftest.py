"""Settings of the whole test run. What test files share is in `support/`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def browser_is_closed() -> Iterator[None]:
    """The pages of a test file share one browser, which ends with the file."""
    yield
    if "support.browsing" in sys.modules:
        sys.modules["support.browsing"].close()
