"""Values from the plain tables of a spec and back: names to classes, keys to fields, each checked by its type."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedspan.core.digest import source_of
from fedspan.core.errors import SpecError, one_of, shown
from fedspan.core.registry import (
    ADOPTING,
    KINDS,
    choices,
    is_registered,
    kind_of,
    name_of,
    registered_name,
    settings,
    unknown,
)
from fedspan.core.task import Task

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}  # fmt: skip


def build(kind: str, value: Any, where: str | None = None) -> Any:
    """A value of a kind from what a user may write for it.

    Args:
        kind: Such as "compressor".
        value: An instance (`QSGD(bits=3)`), a name ("qsgd") or a table (`{"name": "qsgd", "bits": 3}`).
        where: What the value is called in error messages; `kind` by default.

    Raises:
        SpecError: The value is none of these, or a name whose class has settings without a default.
    """
    where, base = where or kind, KINDS[kind]
    if isinstance(value, base):
        return value
    table = {"name": value} if isinstance(value, str) else value
    adopted = kind in ADOPTING and isinstance(value, KINDS["compressor"])
    if isinstance(table, Mapping):
        if "name" not in table:
            raise SpecError(f"`[{where}]` needs a `name`; one of {', '.join(choices(kind))}")
        name = registered_name(
            kind, table["name"], where if table is not value else f"{where}.name"
        )
        adopted = name not in choices(kind)
    elif not adopted:
        hint = f"; write {value.__name__}(…)" if isinstance(value, type) else ""
        raise SpecError(f"`{where}` must be {_readable(base)}, got {shown(value)}{hint}")
    if adopted:  # a compressor stands for the choice that uses it
        return choices(kind)[base.adopts](build("compressor", value, where))  # type: ignore[attr-defined]
    own = {key: inner for key, inner in table.items() if key != "name"}
    return make(choices(kind)[name], own, where)


def accept_choices(value: Any) -> None:
    """Turns names and tables in the fields of a dataclass into what they name; for `__post_init__`.

    Words such as `"exact"` are checked, also those of the choices.
    """
    for name, (hint, default) in typed(value.__class__).items():
        held, chosen = _named(getattr(value, name), default), any(map(kind_of, _options(hint)))
        plain = type(held) in (str, dict) or isinstance(held, np.generic)
        if plain or chosen or get_origin(hint) is Literal:
            held = _value(hint, held, name)
            object.__setattr__(value, name, held)
            if chosen and is_dataclass(held):
                check_types(held)


def _named(value: Any, default: Any) -> Any:
    """Return a table without a name as that of the default with these settings: {mu = 0.5} of a proximal."""
    if isinstance(value, Mapping) and "name" not in value and is_registered(default):
        return describe(default) | value
    return value


def check_types(value: Any) -> None:
    """Refuses a dataclass whose fields hold values of a wrong type, as Python lets its user build."""
    for name, (hint, default) in typed(value.__class__).items():
        held = getattr(value, name)
        if held is not default:
            _value(hint, held, name)
        for one in held if isinstance(held, tuple) else (held,):
            if is_dataclass(one):
                check_types(one)


@functools.cache
def typed(cls: Any) -> dict[str, tuple[Any, Any]]:
    """Name → (type, default) of a class's settings; any type if one is imported for type checkers only."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(NameError):
        hints = get_type_hints(cls)
    return {
        f.name: (
            hints.get(f.name, Any),
            f.default if f.default_factory is MISSING else f.default_factory(),
        )
        for f in settings(cls)
        if f.compare
    }


def make(cls: type, table: Mapping[str, Any], where: str = "") -> Any:
    """A dataclass from a table of plain values, each checked against the type of its field.

    `where` is the table's name in the spec, which error messages put in front of keys.
    """
    fields, prefix, values = typed(cls), f"{where}." if where else "", {}
    for key in table:
        if key not in fields:
            raise unknown(cls, key, f"`[{where or 'spec'}]` has no key")
    for key, (_, default) in fields.items():
        if default is MISSING and key not in table:
            raise SpecError(f"`{prefix}{key}` is missing; it has no default")
    for key, value in table.items():
        hint, default = fields[key]
        values[key] = _value(hint, _named(value, default), prefix + key)
    try:
        return cls(**values)
    except SpecError as error:  # the class names its argument; a spec's reader looks for the key
        named = re.match(r"`(\w+)`", str(error))
        inside = named is not None and named[1] in fields
        raise SpecError(f"`{prefix}{str(error)[1:]}" if inside else str(error)) from None


def describe(value: Any, changed: bool = False) -> Any:
    """A value as TOML and JSON can hold it: dataclasses as tables without None, functions by name and source.

    `build` makes a registered value again from its table. With `changed`, a table has only what differs from its
    default, and a task's data as its hash.
    """
    if isinstance(value, Task) and (given := value.given()) is not None:
        return given
    if is_dataclass(value):
        table = {"name": name_of(value)} if is_registered(value) else {}
        cls: Any = type(value)
        for name, (_, default) in typed(cls).items():
            inner = getattr(value, name)
            if inner != default if changed else inner is not None:
                table[name] = describe(inner, changed and is_dataclass(inner))
        if changed and isinstance(value, Task):
            table |= value.fingerprint()
            table = {name: inner for name, inner in table.items() if inner is not None}
        return table
    if isinstance(value, Mapping):
        return {str(key): describe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [describe(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str | int | float | bool):
        return value
    return {"name": name_of(value)} if is_registered(value) else source_of(value)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    union = get_origin(hint) in (UnionType, Union)
    return get_args(hint) if union else (hint,)


def _value(hint: Any, value: Any, where: str) -> Any:
    """A plain value as the type of its field."""
    options = _options(hint)
    if isinstance(value, np.generic):
        value = value.item()
    for option in options:
        origin, inner = get_origin(option), get_args(option)
        if option is Any or type(value) is option:
            return value
        if origin is Literal:
            if isinstance(value, str | int) and value in inner:
                return value
        elif origin is Callable or option is Callable:
            if callable(value):
                return value
        elif origin is tuple and isinstance(value, list | tuple):
            return tuple(_value(inner[0], one, f"{where}[{i}]") for i, one in enumerate(value))
        elif origin is Mapping and isinstance(value, Mapping):
            return {key: _value(inner[1], one, f"{where}.{key}") for key, one in value.items()}
        elif isinstance(option, type) and option not in (int, float, str, bool):
            if isinstance(value, option) and not isinstance(
                value, type
            ):  # which no spec file holds
                return value
            if value is not None and (kind := kind_of(option)) is not None:
                return build(kind, value, where)
            if is_dataclass(option) and isinstance(value, Mapping):
                return make(option, value, where)
    if float in options and type(value) is int:  # the setting itself refuses what is too large
        return float(value) if abs(value) < 1 << 1000 else value
    if len(options) == 1 and get_origin(hint) is Literal:
        one_of(where, value, map(str, get_args(hint)))
    unsaid = (type(None), int if float in options else None)
    wanted = " or ".join(_readable(option) for option in options if option not in unsaid)
    raise SpecError(f"`{where}` must be {wanted}, got {shown(value)}")


def _readable(option: Any) -> str:
    origin = get_origin(option)
    if origin is Literal:
        return " or ".join(map(repr, get_args(option)))
    if (kind := kind_of(option)) is not None:
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}, its name or a table with `name`"
    if isinstance(option, type) and is_dataclass(option):
        return f"{option.__name__}(…) or a table"
    words = {tuple: "a list", Callable: "a function", Mapping: "a table of numbers by name pattern"}
    return (WORDS | words).get(origin or option, str(option))
