"""Folder = axis, file = choice: what is registered under which name, and how it is built from a table of a spec.

`@register` files a class under the name of its module. Every file of a kind's folder is found by discovery; a file
elsewhere once it is imported (`core.plugins`). A new kind is a line in `KINDS` and one in `core.catalog`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedspan.core.aggregator import Aggregator
from fedspan.core.callback import Callback
from fedspan.core.catalog import FOLDERS, first_paragraph
from fedspan.core.compressor import Compressor
from fedspan.core.errors import SpecError, did_you_mean, one_of, shown
from fedspan.core.method import Method
from fedspan.core.metric import Metric
from fedspan.core.optimizer import Optimizer
from fedspan.core.partition import Partition
from fedspan.core.projector import Projector
from fedspan.core.source import source_of as source_of
from fedspan.core.task import Task

C = TypeVar("C", bound=type)
Table = Mapping[str, Any]


class Kind(NamedTuple):
    """One axis of variation."""

    base: type  # what its choices derive from
    folder: str  # the package with one file per choice


KINDS: dict[str, Kind] = {
    kind: Kind(base, FOLDERS[kind])
    for kind, base in {
        "method": Method, "projector": Projector, "compressor": Compressor, "aggregator": Aggregator,
        "optimizer": Optimizer, "task": Task, "partition": Partition, "callback": Callback, "metric": Metric,
    }.items()
}  # fmt: skip
_known: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}


def register(cls: C) -> C:
    """Registers a method, projector, metric or another kind of choice under the name of the file it is in.

    Args:
        cls: A class that derives from the base class of its kind, such as `fedspan.Method`; its fields are settings.

    Returns:
        The class itself, so that this serves as a decorator.
    """
    kind = kind_of(cls)
    if kind is None:
        bases = ", ".join(known.base.__name__ for known in KINDS.values())
        raise SpecError(f"{cls.__name__} cannot be registered; derive it from one of {bases}")
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        raise SpecError(f"the {kind} {cls.__name__} lacks {', '.join(lacking)}, which every {kind} needs")
    if bare := sorted(_annotated(cls) - {f.name for f in _fields(cls)}):
        raise SpecError(
            f"{', '.join(bare)} of {cls.__name__} would be no setting: put @dataclass(frozen=True, kw_only=True) "
            "between @fedspan.register and the class"
        )
    if issubclass(cls, Method):
        cls.types()
    name, folder = _file_name(cls), KINDS[kind].folder
    if not cls.__module__.startswith(f"{folder}.") and importlib.util.find_spec(f"{folder}.{name}") is not None:
        raise SpecError(f"{cls.__name__} would replace fedspan's own {kind} {name!r}; rename its file")
    _known[kind][name] = cls
    return cls


def _annotated(cls: type) -> set[str]:
    """The names that a class annotates as its own fields."""
    own = inspect.get_annotations(cls)
    return {name for name, hint in own.items() if name[0] != "_" and "ClassVar" not in str(hint)}


def registered_in(module: str) -> list[type]:
    """The classes that a module registers."""
    return [cls for known in _known.values() for cls in known.values() if cls.__module__ == module]


def kind_of(cls: Any) -> str | None:
    """The kind that a class is of, such as "method"."""
    cls = typing.get_origin(cls) or cls
    return next((k for k, kind in KINDS.items() if isinstance(cls, type) and issubclass(cls, kind.base)), None)


def choices(kind: str) -> dict[str, type]:
    """Name → class of everything that is registered of a kind."""
    _discover(KINDS[kind].folder)
    return dict(sorted(_known[kind].items()))


@functools.cache
def _discover(folder: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{folder}.{module.name}")


def name_of(value: object) -> str:
    """The registered name of a value's class."""
    for name, cls in ((name, cls) for known in _known.values() for name, cls in known.items()):
        if cls is type(value):
            return name
    raise SpecError(f"{type(value).__name__} is not registered; put @fedspan.register above the class")


def is_registered(value: object) -> bool:
    """Whether a value's class has a registered name."""
    return any(cls is type(value) for table in _known.values() for cls in table.values())


def summary(cls: type) -> str:
    """The one-line description of a choice: the first paragraph of its module's docstring."""
    return first_paragraph(sys.modules[cls.__module__].__doc__ or cls.__doc__)


def as_choice(kind: str, value: Any, where: str | None = None) -> Any:
    """A value of a kind from what a user may write for it.

    Args:
        kind: Such as "compressor".
        value: An instance (`QSGD(levels=3)`), a name ("qsgd") or a table (`{"name": "qsgd", "levels": 3}`).
        where: What the value is called in error messages; `kind` by default.

    Raises:
        SpecError: The value is none of these, or a name whose class has settings without a default.
    """
    where = where or kind
    if isinstance(value, KINDS[kind].base):
        return value
    if isinstance(value, Mapping):
        return build(kind, value, where)
    if not isinstance(value, str):
        hint = f"; write {value.__name__}(…)" if isinstance(value, type) else ""
        raise SpecError(f"`{where}` must be {_readable(KINDS[kind].base)}, got {shown(value)}{hint}")
    value = registered_name(kind, value, where)
    if missing := _missing(choices(kind)[value], ()):
        raise SpecError(f"`{where}` {value!r} needs `{missing[0]}` too; write {{name = {value!r}, {missing[0]} = …}}")
    return build(kind, {"name": value}, where)


def accept_choices(value: Any) -> None:
    """Turns names and tables in the fields of a dataclass into what they name; for `__post_init__`."""
    for name, kind in _choice_fields(type(value)):
        held = getattr(value, name)
        if held is not None:
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
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a type that is imported for type checkers only
        return []
    return [(f.name, hints[f.name], f.default) for f in _fields(cls) if f.compare]


def _choice_fields(cls: type) -> list[tuple[str, str]]:
    """(field, kind) of the fields that hold a choice."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # a type that is imported for type checkers only
        return []
    found = ((f.name, kind_of(option)) for f in dataclasses.fields(cls) for option in _options(hints[f.name]))
    return [(name, kind) for name, kind in found if kind is not None]


def build(kind: str, table: Table, where: str | None = None) -> Any:
    """The value that a table describes: `name` selects the class, the other keys are its fields."""
    where = where or kind
    if "name" not in table:
        raise SpecError(f"`[{where}]` needs a `name`; one of {', '.join(choices(kind))}")
    name = registered_name(kind, table["name"], f"{where}.name")
    return make(choices(kind)[name], {k: v for k, v in table.items() if k != "name"}, where)


def registered_name(kind: str, name: Any, where: str) -> str:
    """The name under which a choice is registered; "FedAvg" and "Early-Stopping" are read as fedavg, early_stopping."""
    known = choices(kind)
    if isinstance(name, str) and name not in known:
        plain = {re.sub(r"[\W_]", "", one): one for one in known}
        name = plain.get(re.sub(r"[\W_]", "", name.lower()), name)
    one_of(where, name, known)
    return str(name)


def make(cls: type, table: Table, where: str = "") -> Any:
    """A dataclass from a table of plain values, each checked against the type of its field.

    `where` is the table's name in the spec, which error messages put in front of keys.
    """
    fields = {f.name for f in _fields(cls)}
    for key in table:
        if key not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise SpecError(f"`[{where or 'spec'}]` has no key {shown(key)}{did_you_mean(key, fields)}; it has {known}")
    if missing := _missing(cls, table):
        raise SpecError(f"`{_dotted(where, missing[0])}` is missing; it has no default")
    hints = typing.get_type_hints(cls) if fields else {}
    values = {key: _value(hints[key], value, _dotted(where, key)) for key, value in table.items()}
    try:
        return cls(**values)
    except SpecError as error:  # the class names its argument; a spec's reader looks for the key
        named = re.match(r"`(\w+)`", str(error))
        inside = where and named is not None and named[1] in fields
        raise SpecError(f"`{where}.{str(error)[1:]}" if inside else str(error)) from None


def _fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The settings of a class; a class that is no dataclass has none."""
    return [f for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []


def _missing(cls: type, given: Iterable[str]) -> list[str]:
    """The fields without a default that are not given."""
    none = dataclasses.MISSING
    fields = [f.name for f in _fields(cls) if f.default is none and f.default_factory is none]
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
        return named | {name: describe(inner) for name, inner in fields.items() if inner is not None}
    if isinstance(value, Mapping):
        return {str(key): describe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [describe(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    scalar = isinstance(value, str | int | float | bool)
    return value if scalar else {"name": name_of(value)} if is_registered(value) else source_of(value)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else, itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _value(hint: Any, value: Any, where: str) -> Any:
    """A plain value as the type of its field."""
    options = _options(hint)
    for option in options:
        origin, inner, kind = typing.get_origin(option), typing.get_args(option), kind_of(option)
        if option is Any or type(value) is option or (origin is typing.Literal and value in inner):
            return value
        if _as_it_is(option, origin, value):
            return value
        if kind is not None and value is not None:
            return as_choice(kind, value, where)
        if dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return make(typing.cast(type, option), value, where)
        if origin is tuple and isinstance(value, list | tuple):
            return tuple(_value(inner[0], item, f"{where}[{number}]") for number, item in enumerate(value))
        if origin is Mapping and isinstance(value, Mapping):
            return {key: _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if float in options and type(value) is int:
        return float(value) if abs(value) < 1 << 1000 else value  # the setting itself refuses what is larger
    if len(options) == 1 and typing.get_origin(hint) is typing.Literal:
        one_of(where, value, typing.get_args(hint))
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
    return "a table of numbers by name pattern" if origin is Mapping else words.get(option, str(option))


def _file_name(cls: type) -> str:
    if cls.__module__ == "__main__":
        return Path(getattr(sys.modules["__main__"], "__file__", None) or cls.__name__.lower()).stem
    return cls.__module__.rsplit(".", 1)[-1]
