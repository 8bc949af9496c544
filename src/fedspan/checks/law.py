"""What laws are made of: a law is a function that tries something with a method and raises where it does not hold."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedspan.checks.bench import AnyMethod
from fedspan.core.errors import FedspanError

Law = Callable[[AnyMethod], None]


class BrokenError(FedspanError):
    """A law does not hold."""


def hold(condition: object, words: str) -> None:
    """Raises unless the condition holds."""
    if not condition:
        raise BrokenError(words)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float, words: str) -> None:
    """Raises unless two vectors agree in shape and, up to a relative tolerance, in their numbers."""
    hold(a.shape == b.shape, f"{words}: shape {tuple(a.shape)} instead of {tuple(b.shape)}")
    wrong = float((a - b).abs().max()) if a.numel() else 0.0
    close = torch.allclose(a, b, rtol=tolerance, atol=1e-2 * tolerance)
    hold(close, f"{words}: they differ by up to {wrong:.2g}")
