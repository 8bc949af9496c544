"""Values from the plain tables of a spec and back: names to classes, keys to fields, each checked by its type."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core.digest import source_of
from fedspan.core.errors import SpecError, did_you_mean, one_of, shown
from fedspan.core.registry import (
    ADOPTING,
    KINDS,
    choices,
    is_registered,
    kind_of,
    name_of,
    registered_name,
    settings,
)
from fedspan.core.task import Task

Table = Mapping[str, Any]


def build(kind: str, table: Table, where: str | None = None) -> Any:
    """The value that a table describes: `name` selects the class, the other keys are its fields."""
    where = where or kind
    if "name" not in table:
        raise SpecError(f"`[{where}]` needs a `name`; one of {', '.join(choices(kind))}")
    name = registered_name(kind, table["name"], f"{where}.name")
    return make(choices(kind)[name], {k: v for k, v in table.items() if k != "name"}, where)


def as_choice(kind: str, value: Any, where: str | None = None) -> Any:
    """A value of a kind from what a user may write for it.

    Args:
        kind: Such as "compressor".
        value: An instance (`QSGD(bits=3)`), a name ("qsgd") or a table (`{"name": "qsgd", "bits": 3}`).
        where: What the value is called in error messages; `kind` by default.

    Raises:
        SpecError: The value is none of these, or a name whose class has settings without a default.
    """
    where = where or kind
    base: Any = KINDS[kind].base
    if isinstance(value, base):
        return value
    if kind in ADOPTING and _is_compressor(kind, value, where):
        return choices(kind)[base.adopts](as_choice("compressor", value, where))
    if isinstance(value, Mapping):
        return build(kind, value, where)
    if not isinstance(value, str):
        hint = f"; write {value.__name__}(…)" if isinstance(value, type) else ""
        raise SpecError(
            f"`{where}` must be {_readable(KINDS[kind].base)}, got {shown(value)}{hint}"
        )
    value = registered_name(kind, value, where)
    if missing := _missing(choices(kind)[value], ()):
        raise SpecError(
            f"`{where}` {value!r} needs `{missing[0]}` too; write {{name = {value!r}, {missing[0]} = …}}"
        )
    return build(kind, {"name": value}, where)


def _is_compressor(kind: str, value: Any, where: str) -> bool:
    """Whether a value of an axis is a compressor, its name or its table: it stands for a choice that uses it."""
    if isinstance(value, KINDS["compressor"].base):
        return True
    name, key = value, where
    if isinstance(value, Mapping):
        name, key = value.get("name"), f"{where}.name"
    return isinstance(name, str) and registered_name(kind, name, key) not in choices(kind)


def accept_choices(value: Any) -> None:
    """Turns names and tables in the fields of a dataclass into what they name; for `__post_init__`."""
    for name, kind, optional in _choice_fields(type(value)):
        held = getattr(value, name)
        if held is not None or not optional:
            object.__setattr__(value, name, as_choice(kind, held, name))


def check_types(value: Any) -> None:
    """Refuses a dataclass whose fields hold values of a wrong type, as Python lets its user build."""
    cls: Any = type(value)  # which the cache takes for something that cannot be hashed
    for name, hint, default in _typed_fields(cls):
        held = getattr(value, name)
        if held is not default:
            _value(hint, held.item() if isinstance(held, np.generic) else held, name)
        if dataclasses.is_dataclass(held):
            check_types(held)


@functools.cache
def _typed_fields(cls: type) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of a dataclass's settings."""
    hints = _hints(cls)
    return [(f.name, hints[f.name], f.default) for f in settings(cls) if f.compare and hints]


def _choice_fields(cls: type) -> list[tuple[str, str, bool]]:
    """(field, kind, whether it may be None) of the settings that hold a choice."""
    hints = _hints(cls)
    typed = [(f.name, _options(hints[f.name])) for f in settings(cls) if hints]
    found = [
        (name, kind_of(one), type(None) in options) for name, options in typed for one in options
    ]
    return [(name, kind, optional) for name, kind, optional in found if kind is not None]


def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields by name; none where one is imported for type checkers only."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {}


def make(cls: type, table: Table, where: str = "") -> Any:
    """A dataclass from a table of plain values, each checked against the type of its field.

    `where` is the table's name in the spec, which error messages put in front of keys.
    """
    fields = {f.name for f in settings(cls)}
    for key in table:
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise SpecError(
                f"`[{where or 'spec'}]` has no key {shown(key)}{did_you_mean(key, fields)}; it has {known}"
            )
    if missing := _missing(cls, table):
        raise SpecError(f"`{_dotted(where, missing[0])}` is missing; it has no default")
    hints = typing.get_type_hints(cls) if fields else {}
    values = {
        key: _value(hints[key], _completed(cls, key, value), _dotted(where, key))
        for key, value in table.items()
    }
    try:
        return cls(**values)
    except SpecError as error:  # the class names its argument; a spec's reader looks for the key
        named = re.match(r"`(\w+)`", str(error))
        inside = where and named is not None and named[1] in fields
        raise SpecError(f"`{where}.{str(error)[1:]}" if inside else str(error)) from None


def _completed(cls: type, key: str, value: Any) -> Any:
    """Return a table without a name as one of the field's default, with other settings: {mu = 0.5} of a proximal."""
    default = next((f.default for f in settings(cls) if f.name == key), None)
    if not isinstance(value, Mapping) or "name" in value or not is_registered(default):
        return value
    return {**describe(default), **value}


def _missing(cls: type, given: Iterable[str]) -> list[str]:
    """The fields without a default that are not given."""
    none = dataclasses.MISSING
    fields = [f.name for f in settings(cls) if f.default is none and f.default_factory is none]
    return [name for name in fields if name not in given]


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def describe(value: Any) -> Any:
    """A value as TOML and JSON can hold it: dataclasses as tables without None, functions by name and source.

    `build` makes a registered value again from its table.
    """
    if isinstance(value, Task) and (given := value.given()) is not None:
        return given
    if dataclasses.is_dataclass(value):
        named = {"name": name_of(value)} if is_registered(value) else {}
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return named | {
            name: describe(inner) for name, inner in fields.items() if inner is not None
        }
    if isinstance(value, Mapping):
        return {str(key): describe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [describe(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    scalar = isinstance(value, str | int | float | bool)
    return (
        value if scalar else {"name": name_of(value)} if is_registered(value) else source_of(value)
    )


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    return (
        typing.get_args(hint)
        if typing.get_origin(hint) in (types.UnionType, typing.Union)
        else (hint,)
    )


def _among(value: Any, choices: tuple[Any, ...]) -> bool:
    return isinstance(value, str | int) and value in choices


def _value(hint: Any, value: Any, where: str) -> Any:
    """A plain value as the type of its field."""
    options = _options(hint)
    for option in options:
        origin, inner, kind = typing.get_origin(option), typing.get_args(option), kind_of(option)
        if (
            option is Any
            or type(value) is option
            or (origin is typing.Literal and _among(value, inner))
        ):
            return value
        if _as_it_is(option, origin, value):
            return value
        if kind is not None and value is not None:
            return as_choice(kind, value, where)
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return make(typing.cast(type, option), value, where)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(
                _value(inner[0], item, f"{where}[{number}]") for number, item in enumerate(value)
            )
        if origin is Mapping and isinstance(value, Mapping):
            return {key: _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if float in options and type(value) is int:
        return (
            float(value) if abs(value) < 1 << 1000 else value
        )  # the setting itself refuses what is larger
    if len(options) == 1 and typing.get_origin(hint) is typing.Literal:
        one_of(where, value, map(str, typing.get_args(hint)))
    unsaid = (type(None), int if float in options else None)
    wanted = " or ".join(_readable(option) for option in options if option not in unsaid)
    raise SpecError(f"`{where}` must be {wanted}, got {shown(value)}")


def _as_it_is(option: Any, origin: Any, value: Any) -> bool:
    """Whether a value that no spec file holds is of a type: a path, a function, or an object of a class or protocol."""
    if origin is Callable or option is Callable:
        return callable(value)
    plain = isinstance(option, type) and option not in (int, float, str, bool)
    return plain and not isinstance(value, type) and isinstance(value, option)


def _readable(option: Any) -> str:
    if (kind := kind_of(option)) is not None:
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}, its name or a table with `name`"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    origin = typing.get_origin(option)
    if origin is typing.Literal:
        return " or ".join(repr(argument) for argument in typing.get_args(option))
    if origin is tuple:
        return "a list"
    if origin is Callable:
        return "a function"
    if dataclasses.is_dataclass(option):
        return f"{option.__name__}(…) or a table"  # type: ignore[union-attr]
    if option is Path:
        return "a path"
    return (
        "a table of numbers by name pattern"
        if origin is Mapping
        else words.get(option, str(option))
    )
