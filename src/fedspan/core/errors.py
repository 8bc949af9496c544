"""Errors a user can cause. Each is one line that names the value and the remedy.

The command line prints these without a traceback; anything else that escapes is a defect of fedspan.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class FedspanError(Exception):
    """Something the user can put right; the message says how."""


class SpecError(FedspanError):
    """A spec, option or hyper-parameter has a value that cannot be used."""


class DataError(FedspanError):
    """A data file is missing, of the wrong shape, or not finite."""


class CheckpointError(FedspanError):
    """A checkpoint or history cannot be continued from."""


class ProtocolError(FedspanError):
    """Two ends of a run do not agree on what they compute."""


def positive(name: str, value: float) -> None:
    """Refuse what is not a finite number above zero."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise SpecError(f"`{name}` must be a positive number, got {value!r}")


def not_negative(name: str, value: float) -> None:
    """Refuse what is not a finite number of at least zero."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise SpecError(f"`{name}` must be a number of at least 0, got {value!r}")


def below_one(name: str, value: float) -> None:
    """Refuse what is not a share that leaves something over, such as a momentum."""
    if not 0 <= value < 1:
        raise SpecError(f"`{name}` must be at least 0 and below 1, got {value!r}")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"`{name}` must be a whole number of at least {least}, got {value!r}")


def count_or_ratio(name: str, value: float) -> None:
    """Refuse what is neither a whole number of at least 1 nor a ratio in (0, 1]."""
    ok = value >= 1 if isinstance(value, int) else 0 < value <= 1
    if isinstance(value, bool) or not ok:
        raise SpecError(f"`{name}` must be a whole number of at least 1 or a ratio in (0, 1], got {value!r}")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is not among the choices, naming them and the nearest one."""
    known = sorted(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SpecError(f"`{name}` must be one of {', '.join(known)}, got {value!r}{hint}")
