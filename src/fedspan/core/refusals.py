"""Combinations of choices that are mathematically wrong, each with its reason; everything else runs."""

from __future__ import annotations

from typing import Any

from fedspan.core.errors import SpecError
from fedspan.core.registry import name_of


def needs_contractive(key: str, compressor: Any, n: int) -> None:
    """Refuse a compressor of n values that may leave out more than it sends: what is kept would grow."""
    if compressor.delta(n) is None:
        raise SpecError(
            f"`{key}` {name_of(compressor)!r} is not contractive for {n} values with these settings: it would leave "
            "out more than it sends; use topk or sign, more bits, or set its unbiased = false"
        )


def needs_unbiased(key: str, compressor: Any, n: int) -> None:
    """Refuse a biased compressor where only unbiased errors average out."""
    compressor.delta(n)  # refuses too large a k
    if compressor.omega(n) is None:
        raise SpecError(
            f"`{key}` {name_of(compressor)!r} is biased with these settings, and a control that moves by a share of it "
            "needs an unbiased one; use randk, qsgd or natural with unbiased = true"
        )


def needs_controls(key: str, choice: Any, drift: Any) -> None:
    """Refuse a running mean of what controls lack without controls."""
    if not drift.controls:
        raise SpecError(
            f"`{key}` {name_of(choice)!r} is a running mean of what controls lack; set `drift` to 'controls', or use "
            "uplink = 'feedback'"
        )


def check_axes(drift: Any, uplink: Any, server: Any) -> None:
    """Refuse choices of a method that cannot work together."""
    if drift.controls and uplink.needs_no_controls:
        raise SpecError(
            f"`uplink` {name_of(uplink)!r} with drift = 'controls': {uplink.needs_no_controls}"
        )
    if server.needs_each_reply and uplink.in_gradients:
        raise SpecError(
            f"`server` {name_of(server)!r} needs the change of each client, and uplink = {name_of(uplink)!r} sends "
            "changes of an estimate; use another of the two"
        )
