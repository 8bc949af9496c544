"""Try every law on what a file of a user's own registers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fedspan.checks import laws, network_laws, part_laws
from fedspan.checks.bench import STOPPED, Tried, hold, tried, words_of
from fedspan.core import registry, tables
from fedspan.core.errors import SpecError
from fedspan.core.method import Method
from fedspan.core.plugins import load_plugin
from fedspan.methods.box import Box

USUAL = {"lr": 0.02, "local_steps": 3}  # what laws are tried with where nothing else is said
AXES = ("drift", "uplink", "server", "downlink")
RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedavg", {}),
    ("scaffold", {}),
    ("subavg", {}),
    ("ssf", {}),
    ("subavg", {"space": {"name": "gaussian", "rank": 0.3}}),
)  # methods and settings that a choice on an axis is tried in


def check_method(method: Method) -> list[Tried]:
    """Try every law on a method; those of networks are left out if its clients' state cannot be restored."""
    found = tried(laws.LAWS, method)
    if STOPPED in found:
        return found
    if (words_of(laws.restorable_state), False) in [(law, holds) for law, holds, _ in found]:
        why = "not tried: it needs update_client_state"
        if isinstance(method, Box):
            why = "not tried: clients' states do not follow from their replies"
        return [*found, *((words_of(law), None, why) for law in network_laws.LAWS)]
    return [*found, *tried(network_laws.LAWS, method)]


def own_names(cls: type) -> None:
    """Every public name is a setting or a member of its interface: none is misspelled or lacks a type."""
    known = {field.name for field in dataclasses.fields(cls)}.union(*map(dir, cls.__bases__))
    for name in vars(cls):
        hold(
            name.startswith("_") or name in known,
            f"{name!r} is neither: correct its name, give a setting its type (`{name}: float = …`), or begin the name "
            "of a helper with _",
        )


def _by_axis(kind: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a choice, and those of the method around it: `method.lr`, `server.lr`."""
    own: dict[str, Any] = {}
    method: dict[str, Any] = {}
    for key, value in settings.items():
        axis, _, name = key.removeprefix("method.").partition(".")
        if (axis == kind and name) or "." not in key:
            own[name or axis] = value
        elif name:
            method.setdefault(axis, {})[name] = value
        else:
            method[axis] = value
    return own, method


def check_file(path: Path, settings: dict[str, Any]) -> dict[str, list[Tried]]:
    """Check every method, choice on an axis, projector, compressor and aggregator that a file registers.

    Returns:
        What the laws say, by kind and name. A choice on an axis is tried in each recipe that does not refuse it.
    """
    found: dict[str, list[Tried]] = {}
    for cls in load_plugin(path):
        kind = str(registry.kind_of(cls))
        if kind == "method":
            known = {field.name for field in dataclasses.fields(cls)}
            table: dict[str, Any] = {k: value for k, value in USUAL.items() if k in known}
            table |= {key.removeprefix("method."): value for key, value in settings.items()}
            found[f"method {path.stem}"] = check_method(tables.make(cls, table, kind))
        elif kind in AXES:
            own, more = _by_axis(kind, settings)
            part, refused = tables.make(cls, own, kind), []
            found[f"{kind} {path.stem}"] = tried([own_names], cls)
            for name, space in RECIPES:
                try:
                    own_table: dict[str, Any] = {"name": name, **USUAL, **space, **more, kind: part}
                    method = tables.build("method", own_table)
                except SpecError as error:
                    refused.append(error)
                    continue
                where = f"{name} in a gaussian space" if space else name
                found[f"{kind} {path.stem} in {where}"] = laws_of = check_method(method)
                if STOPPED in laws_of:
                    break
            if len(refused) == len(RECIPES):
                raise refused[0]
        elif kind in part_laws.LAWS:
            part = tables.make(cls, settings, kind)
            found[f"{kind} {path.stem}"] = tried(part_laws.LAWS[kind], part)
    if not found:
        raise SpecError(
            f"{str(path)!r} registers no method, choice on an axis of methods, projector, compressor or aggregator; "
            "there are laws of these only"
        )
    return found
