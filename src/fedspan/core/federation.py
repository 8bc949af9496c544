"""Settings of the virtual clock: how clients are connected, how fast they are, and when they are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fedspan.core.errors import SpecError, not_negative, one_of, positive, shown

Amount = float | Mapping[str, float] | str
DEVICES = ("up_mbit", "down_mbit", "latency", "step_seconds")
PRESETS: dict[str, dict[str, Any]] = {
    "datacenter": {
        "up_mbit": 10_000.0,
        "down_mbit": 10_000.0,
        "latency": 0.001,
        "step_seconds": 0.01,
        "available": 1.0,
    },
    "hospitals": {
        "up_mbit": {"low": 1.0, "high": 100.0},
        "down_mbit": {"low": 1.0, "high": 100.0},
        "latency": 0.05,
        "step_seconds": {"low": 0.02, "high": 0.2},
        "available": 1.0,
    },
    "phones": {
        "up_mbit": {"low": 0.5, "high": 20.0},
        "down_mbit": {"low": 0.5, "high": 20.0},
        "latency": 0.1,
        "step_seconds": {"low": 0.05, "high": 1.0},
        "available": 0.1,
    },
}


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The links and devices of the clients, by which a virtual clock counts the hours of a run.

    `up_mbit`, `down_mbit`, `latency` and `step_seconds` are each a number, a table `{low, high}` from which every
    client draws a value, or the path of a file with a column of that name and a row per client. Draws are uniform in
    the logarithm and depend on the run's seed and the client's number alone. What is None is that of the preset.

    Args:
        preset: `"datacenter"` (10 Gbit/s), `"hospitals"` (1 to 100 Mbit/s, always there), or `"phones"` (0.5 to 20
            Mbit/s, 10 % there in a round).
        up_mbit: Mbit/s that a client can send.
        down_mbit: Mbit/s that a client can receive.
        latency: Seconds of a round besides transfer and steps.
        step_seconds: Seconds of a local step.
        available: When clients are there: `"always"`, the probability with which each one is there in a round, a daily
            cycle such as `{start = 22, hours = 8}`, in which a client without `start` draws its own, or the path of a
            file with the columns `client`, `from` and `to` in hours, which starts again after its last hour.
    """

    preset: Literal["datacenter", "hospitals", "phones"] = "datacenter"
    up_mbit: Amount | None = None
    down_mbit: Amount | None = None
    latency: Amount | None = None
    step_seconds: Amount | None = None
    available: Amount | None = None

    def __post_init__(self) -> None:
        one_of("preset", self.preset, PRESETS)
        for name in DEVICES:
            value, check = self.value(name), positive if "mbit" in name else not_negative
            if isinstance(value, Mapping):
                _keys(name, value, {"low", "high"}, {"low", "high"})
                for end in ("low", "high"):
                    positive(f"{name}.{end}", value[end])
                if value["high"] < value["low"]:
                    raise SpecError(f"`{name}` has a high of {value['high']:g} below its low")
            elif not isinstance(value, str):
                check(name, value)
        there = self.value("available")
        if isinstance(there, Mapping):
            _keys("available", there, {"hours"}, {"start", "hours"})
            positive("available.hours", there["hours"])
            not_negative("available.start", there.get("start", 0))
        elif not isinstance(there, str):
            positive("available", there)
            if there > 1:
                raise SpecError(f"`available` must be a probability or 'always', got {there:g}")

    def value(self, name: str) -> Any:
        """Return a setting, or that of the preset."""
        own = getattr(self, name)
        return PRESETS[self.preset][name] if own is None else own


def _keys(name: str, value: Mapping[str, Any], needed: set[str], known: set[str]) -> None:
    if not needed <= value.keys() <= known:
        wanted = ", ".join(sorted(known))
        raise SpecError(f"`{name}` must be a table of {wanted}, got {shown(dict(value))}")
