"""Other processes: copies of this one where there are any, otherwise new ones that are sent what they work on.

A forked process has every object of this one. Windows has none, and on macOS they crash in the system's own libraries
(Python's documentation of multiprocessing). A spawned process imports modules by name and gets objects pickled. It does
not run the user's script again, so that a script needs no `if __name__ == "__main__"`; what the script itself defines
cannot be sent to it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import multiprocessing
import re
import sys
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from fedspan.core.errors import FedspanError, one_line

FORKS = "fork" in multiprocessing.get_all_start_methods() and sys.platform != "darwin"
T = TypeVar("T")


class NotSentError(Exception):
    """An object cannot be sent to another process."""


class Shared(Generic[T]):
    """A value that other processes work on, which must be passed to them as they start.

    Raises:
        NotSentError: There is no fork, and the value cannot be pickled by the names of its functions and classes.
    """

    def __init__(self, value: T) -> None:
        import torch

        self.value, self._packed = value, io.BytesIO()
        try:
            with without_script():  # views of one tensor stay together, as in a copy
                if not FORKS:
                    torch.save((value, torch.get_default_dtype()), self._packed)
        except Exception as error:
            raise NotSentError(one_line(re.sub(" at 0x[0-9A-Fa-f]+", "", str(error)))) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"_packed": self._packed}

    @functools.cached_property
    def value(self) -> T:
        """The value; a spawned process unpacks it here for the first time."""
        import torch

        self._packed.seek(0)
        try:
            with torch.inference_mode(False):  # from our own parent, through a pipe
                value, dtype = torch.load(self._packed, weights_only=False)
        except Exception as error:
            raise FedspanError(
                f"another process cannot load what it was sent ({one_line(error)}); use jobs=1 or simulate='loop'"
            ) from None
        torch.set_default_dtype(dtype)
        self._packed = io.BytesIO()
        found: T = value
        return found


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """Hides the user's script from processes that are started, which would run it again, and from pickle."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
