"""Every law tried on a value of a user's own, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.checks import laws, network_laws, part_laws
from fedspan.checks.bench import AnyMethod
from fedspan.core import building, registry
from fedspan.core.errors import FedspanError, SpecError
from fedspan.core.plugins import load_plugin

STEPS = {"lr": 0.02, "local_steps": 3}  # what laws are tried with where nothing else is said


@dataclass(frozen=True)
class Verdict:
    """What came of trying a law."""

    law: str  # in words
    holds: bool | None  # None: not tried
    why: str = ""


def check_method(method: AnyMethod) -> list[Verdict]:
    """Every law tried on a method; those of networks are left out if its clients' state cannot be restored."""
    found = _tried(laws.LAWS, method)
    if _failed(found, laws.restorable_state):
        words = "not tried: it needs update_client_state"
        return [*found, *(Verdict(_words(law), None, words) for law in network_laws.LAWS)]
    return [*found, *_tried(network_laws.LAWS, method)]


def check_file(path: Path, settings: dict[str, Any]) -> dict[str, list[Verdict]]:
    """The verdicts on every method, projector, compressor and aggregator that a file registers, by kind and name."""
    found: dict[str, list[Verdict]] = {}
    for cls in load_plugin(path):
        kind = str(registry.kind_of(cls))
        if kind == "method":
            table = {
                key: value
                for key, value in STEPS.items()
                if key in {f.name for f in dataclasses.fields(cls)}
            }
            found[f"method {path.stem}"] = check_method(building.make(cls, table | settings, kind))
        elif kind in part_laws.LAWS:
            found[f"{kind} {path.stem}"] = _tried(
                part_laws.LAWS[kind], building.make(cls, settings, kind)
            )
    if not found:
        raise SpecError(
            f"{str(path)!r} registers no method, projector, compressor or aggregator; there are laws of these only"
        )
    return found


def _words(law: Callable[[Any], None]) -> str:
    return str(law.__doc__).strip().removesuffix(".")


def _failed(found: Iterable[Verdict], law: Callable[[Any], None]) -> bool:
    return any(one.holds is False and one.law == _words(law) for one in found)


def _tried(of: Iterable[Callable[[Any], None]], value: Any) -> list[Verdict]:
    found = []
    for law in of:
        try:
            law(value)
        except Exception as error:  # whatever a user's own code raises is the verdict
            kind = "" if isinstance(error, FedspanError) else f"{type(error).__name__}: "
            found.append(Verdict(_words(law), False, kind + " ".join(str(error).split())))
        else:
            found.append(Verdict(_words(law), True))
    return found
