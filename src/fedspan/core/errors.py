"""Errors that a user can cause, and checks of values. Each message is one line that names the value and the remedy.

The command line prints these errors without a traceback. Any other exception is a bug in fedspan.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

LARGEST = 1e15  # of a step size and the like; float32 overflows not far above its square


class FedspanError(Exception):
    """Base class of errors that the user can correct; the message says how, on one line and without endless values."""

    def __init__(self, message: str = "") -> None:
        line = " ".join(message.splitlines())
        line = re.sub(r"(\S{60})\S{120,}(\S{20})", r"\1…\2", line)
        super().__init__(line if len(line) <= 1000 else f"{line[:600]} … {line[-300:]}")


class SpecError(FedspanError):
    """A spec, an argument or a hyper-parameter has a value that cannot be used."""


class FormError(SpecError):
    """A function of a user's own returns something of another form than it must."""


class DataError(FedspanError):
    """A data file is missing, of the wrong shape, or not finite.

    Args:
        message: The error, which may quote a cell.
        told: What another machine may be told instead: the column and the row; by default the message.
    """

    def __init__(self, message: str = "", told: str = "") -> None:
        super().__init__(message)
        self.told = told or str(self)


class CheckpointError(FedspanError):
    """A checkpoint or a history cannot be resumed."""


class ResumableError(FedspanError):
    """A run cannot go on now; what it has saved can be resumed."""


class DiskError(ResumableError):
    """A file cannot be written, for want of space or of rights."""


class ProtocolError(FedspanError):
    """Server and client do not agree on what they compute."""


class Terminated(BaseException):
    """SIGTERM ended a run whose process goes on, as in a notebook; what was done so far is saved."""


def one_line(text: object, most: int = 300) -> str:
    """What somebody else said, safe for a log: printable, on one line, and not long."""
    said = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * most])
    foreign = isinstance(text, Exception) and not isinstance(text, FedspanError)
    kind = f"{type(text).__name__}: " if foreign else ""
    return f"{kind}{' '.join(said.split())}"[:most]


def positive(name: str, value: object) -> None:
    """Refuses what is not a finite number above zero."""
    if not (_finite(value) and value > 0):
        raise SpecError(f"`{name}` must be a positive number, got {shown(value)}")
    at_most(name, value, LARGEST)


def not_negative(name: str, value: object) -> None:
    """Refuses what is not a finite number of at least zero."""
    if not (_finite(value) and value >= 0):
        raise SpecError(f"`{name}` must be a number of at least 0, got {shown(value)}")
    at_most(name, value, LARGEST)


def below_one(name: str, value: object) -> None:
    """Refuses what is not a number in [0, 1), such as a momentum."""
    if not (_finite(value) and 0 <= value < 1):
        raise SpecError(f"`{name}` must be at least 0 and below 1, got {shown(value)}")


def positive_share(name: str, value: object) -> None:
    """Refuses what is not a number in (0, 1]."""
    if not (_finite(value) and 0 < value <= 1):
        raise SpecError(f"`{name}` must be above 0 and at most 1, got {shown(value)}")


def at_least(name: str, value: object, least: int) -> None:
    """Refuses what is not a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise SpecError(f"`{name}` must be a whole number of at least {least}, got {shown(value)}")


def count_or_ratio(name: str, value: object) -> None:
    """Refuses what is neither a whole number of at least 1 nor a ratio in (0, 1]."""
    if not (_finite(value) and (value >= 1 if isinstance(value, int) else 0 < value <= 1)):
        raise SpecError(
            f"`{name}` must be a whole number of at least 1 or a ratio in (0, 1], got {shown(value)}"
        )


def at_most(name: str, value: float, most: float) -> None:
    """Refuses a number above `most`, which would take for ever, overflow or not fit into memory."""
    if value > most:
        raise SpecError(f"`{name}` must be at most {most:,}, got {shown(value)}")


def shown(value: object) -> str:
    """A value as an error message quotes it: as Python writes it, on one line and not long."""
    try:
        return one_line(repr(value), 80)
    except ValueError:  # a whole number of thousands of digits
        return "a number of thousands of digits"
    except Exception:  # an object whose own repr fails
        return f"a {type(value).__name__}"


def _finite(value: object) -> TypeGuard[int | float]:
    # a whole number may be too large to be asked
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def true_or_false(name: str, value: object) -> None:
    """Refuses what is neither True nor False."""
    if not isinstance(value, bool):
        raise SpecError(f"`{name}` must be True or False, got {shown(value)}")


def number(name: str, value: object) -> float:
    """Refuses what is not a finite number."""
    if not _finite(value):
        raise SpecError(f"`{name}` must be a number, got {shown(value)}")
    return value


def items(name: str, value: Any, of: str = "names") -> tuple[Any, ...]:
    """The members of a list, a tuple or the like; refuses text, tables and what has no members."""
    if not isinstance(value, list | tuple | set | frozenset) and type(value).__name__ != "ndarray":
        hint = f"; write [{shown(value)}]" if isinstance(value, str | bytes) else ""
        raise SpecError(f"`{name}` must be a list of {of}, got {shown(value)}{hint}")
    return tuple(value)


def path_of(name: str, value: Any) -> Path:
    """The path that a user gives; refuses what no file system takes."""
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise SpecError(f"`{name}` must be a path, as text or a pathlib.Path, got {shown(value)}")
    text = os.fspath(value)
    if not text.strip() or "\0" in text:
        raise SpecError(
            f"`{name}` must name a file or directory, got {shown(value)}; '.' is the current directory"
        )
    raw = os.fsencode(text)
    if len(raw) > 4000 or max(map(len, raw.split(b"/"))) > 255:
        raise SpecError(
            f"`{name}` is longer than file names may be: {shown(text[:60] + '…')}; give a shorter one"
        )
    return Path(text)


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuses what is not among the choices, and names them and the nearest one."""
    known = sorted(choices)
    if not isinstance(value, str) or value not in known:
        raise SpecError(
            f"`{name}` must be one of {', '.join(known)}, got {shown(value)}{did_you_mean(value, known)}"
        )


def did_you_mean(value: object, known: Iterable[str]) -> str:
    """A hint at the nearest of the known names, if one is near."""
    word = value[:100].lower() if isinstance(value, str) else ""
    lower = {name.lower(): name for name in map(str, known) if len(name) < 2 * len(word)}
    near = difflib.get_close_matches(word, lower, n=1)
    return f" (did you mean {lower[near[0]]!r}?)" if near else ""


def client_name(client: int, names: Sequence[str] | None) -> str:
    """A client as messages name it: by its number, unless it has a name of its own."""
    own = str(client) if names is None else names[client]
    return f"client {client}" if own in (str(client), f"client-{client}") else f"client {own!r}"
