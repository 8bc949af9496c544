"""The calls that change a file, and a process that is killed at one of them."""

from __future__ import annotations

CALLS = ("pwrite", "fsync", "replace", "ftruncate", "unlink", "fchmod")


class KilledError(BaseException):
    """The process ends here: no clean-up touches the disk any more."""
