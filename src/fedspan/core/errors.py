"""Errors that a user can cause, and checks of values. Each message is one line that names the value and the remedy.

The command line prints these errors without a traceback. Any other exception is a bug in fedspan.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import TypeGuard

LARGEST = 1e15  # of a step size and the like; float32 overflows not far above its square


class FedspanError(Exception):
    """Base class of errors that the user can correct; the message says how."""


class SpecError(FedspanError):
    """A spec, an argument or a hyper-parameter has a value that cannot be used."""


class DataError(FedspanError):
    """A data file is missing, of the wrong shape, or not finite."""


class CheckpointError(FedspanError):
    """A checkpoint or a history cannot be resumed."""


class ResumableError(FedspanError):
    """A run cannot go on now; what it has saved can be resumed."""


class DiskError(ResumableError):
    """A file cannot be written, for want of space or of rights."""


class ProtocolError(FedspanError):
    """Server and client do not agree on what they compute."""


def one_line(text: object, most: int = 300) -> str:
    """What somebody else said, safe for a log: printable, on one line, and not long."""
    said = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 4 * most]).split())
    kind = f"{type(text).__name__}: " if isinstance(text, Exception) and not isinstance(text, FedspanError) else ""
    return f"{kind}{said}"[:most]


def positive(name: str, value: object) -> None:
    """Refuses what is not a finite number above zero."""
    if not (_finite(value) and value > 0):
        raise SpecError(f"`{name}` must be a positive number, got {_short(value)}")
    at_most(name, value, LARGEST)


def not_negative(name: str, value: object) -> None:
    """Refuses what is not a finite number of at least zero."""
    if not (_finite(value) and value >= 0):
        raise SpecError(f"`{name}` must be a number of at least 0, got {_short(value)}")
    at_most(name, value, LARGEST)


def below_one(name: str, value: object) -> None:
    """Refuses what is not a number in [0, 1), such as a momentum."""
    if not (_finite(value) and 0 <= value < 1):
        raise SpecError(f"`{name}` must be at least 0 and below 1, got {value!r}")


def positive_share(name: str, value: object) -> None:
    """Refuses what is not a number in (0, 1]."""
    if not (_finite(value) and 0 < value <= 1):
        raise SpecError(f"`{name}` must be above 0 and at most 1, got {value!r}")


def at_least(name: str, value: object, least: int) -> None:
    """Refuses what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"`{name}` must be a whole number of at least {least}, got {_short(value)}")


def count_or_ratio(name: str, value: object) -> None:
    """Refuses what is neither a whole number of at least 1 nor a ratio in (0, 1]."""
    if not (_finite(value) and (value >= 1 if isinstance(value, int) else 0 < value <= 1)):
        raise SpecError(f"`{name}` must be a whole number of at least 1 or a ratio in (0, 1], got {value!r}")


def at_most(name: str, value: float, most: float) -> None:
    """Refuses a number above `most`, which would take for ever, overflow or not fit into memory."""
    if value > most:
        raise SpecError(f"`{name}` must be at most {most:,}, got {_short(value)}")


def _short(value: object) -> str:
    try:
        return one_line(repr(value), 80)
    except ValueError:  # a whole number of thousands of digits
        return "a number of thousands of digits"


def _finite(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)  # a whole number may be too large to be asked


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuses what is not among the choices, and names them and the nearest one."""
    known = sorted(choices)
    if value not in known:
        raise SpecError(f"`{name}` must be one of {', '.join(known)}, got {value!r}{did_you_mean(value, known)}")


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """A hint at the nearest of the known names, if one is near."""
    near = difflib.get_close_matches(str(value), known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
