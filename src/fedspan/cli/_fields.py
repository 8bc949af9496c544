"""The settings of a dataclass in words: name, type, default, and the comment or docstring entry of the field."""

import ast
import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from fedspan.cli._options import entries
from fedspan.core import registry, tables


def settings(cls: Any) -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, description) of every field that a spec can set."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return []
    words: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        words |= described(base)
    fields = [one for one in dataclasses.fields(cls) if one.init and not one.name.startswith("_")]
    hints = typing.get_type_hints(cls)
    return [
        (one.name, _type(hints[one.name]), _default(one), words.get(one.name, "")) for one in fields
    ]


@functools.cache
def described(cls: type) -> dict[str, str]:
    """Return field → description, from the class's own source and docstring."""
    try:
        source = inspect.cleandoc("\n" + inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    found, lines = entries(cls.__dict__.get("__doc__") or ""), source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            own = lines[node.lineno - 1 : node.end_lineno]
            comments = [line.partition("  # ")[2] for line in own]
            if words := " ".join(filter(None, comments)):
                found[ast.unparse(node.target)] = words
    return found


def _type(hint: Any) -> str:
    """Return a type as a spec's author knows it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(one) for one in arguments if one is not type(None)))
    if origin is typing.Literal:
        return " | ".join(map(json.dumps, arguments))
    if origin is tuple:
        return "list"
    if origin is Mapping or dataclasses.is_dataclass(hint):
        return registry.kind_of(hint) or "table"
    return registry.kind_of(hint) or str(getattr(hint, "__name__", hint))


def _default(one: dataclasses.Field[object]) -> str:
    value = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
    if value is dataclasses.MISSING or value is None:
        return "required" if value is dataclasses.MISSING else "none"
    if dataclasses.is_dataclass(value) and not registry.is_registered(value):
        return "{}"  # a table of a spec, whose own page has its defaults
    return _toml(tables.describe(value))


def _toml(value: Any) -> str:
    """Return a plain value as a spec has it, in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
