"""What laws are made of: a law is a function that tries something with a value and raises where it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fedspan.core.errors import FedspanError
from fedspan.engine.loop import Loop

Law = Callable[[Any], None]


class BrokenError(FedspanError):
    """A law does not hold."""


@dataclass(frozen=True)
class Tried:
    """What came of trying a law."""

    law: str  # in words
    holds: bool | None  # None: not tried
    why: str = ""


def words_of(law: Law) -> str:
    """Return a law in words."""
    return str(law.__doc__).strip().removesuffix(".")


def tried(laws: Iterable[Law], value: Any) -> list[Tried]:
    """Try every law on a value."""
    found = []
    for law in laws:
        try:
            law(value)
        except Exception as error:  # whatever a user's own code raises is the answer
            kind = "" if isinstance(error, FedspanError) else f"{type(error).__name__}: "
            found.append(Tried(words_of(law), False, kind + " ".join(str(error).split())))
        else:
            found.append(Tried(words_of(law), True))
    return found


def hold(condition: object, words: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise BrokenError(words)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float, words: str) -> None:
    """Raise unless two vectors agree in shape and, up to a relative tolerance, in their numbers."""
    hold(a.shape == b.shape, f"{words}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    wrong = float((a - b).abs().max()) if a.numel() else 0.0
    close = torch.allclose(a, b, rtol=tolerance, atol=1e-2 * tolerance)
    hold(close, f"{words}: they differ by up to {wrong:.2g}")


def same_bytes(one: Loop, other: Loop, words: str) -> None:
    """Raise unless the ledgers of two runs are equal; `{}` in the words is the direction."""
    for name in ("up", "down"):
        hold((getattr(one.ledger, name) == getattr(other.ledger, name)).all(), words.format(name))
