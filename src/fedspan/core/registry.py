"""Folder = axis, file = choice: what is registered under which name, and how it is built from a spec's table.

`@register` files a class under the name of its module. Everything in `fedspan/methods`, `projectors`, `compressors`,
`optimizers` and `tasks` is found by looking into the folder; a file elsewhere once it is imported (`load_file`).
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedspan.core.callback import Callback
from fedspan.core.compressor import Compressor
from fedspan.core.errors import SpecError, one_of
from fedspan.core.method import Method
from fedspan.core.optimizer import Optimizer
from fedspan.core.partition import Partition
from fedspan.core.projector import Projector
from fedspan.core.task import Task

C = TypeVar("C", bound=type)

KINDS: dict[str, type] = {
    "method": Method, "projector": Projector, "compressor": Compressor, "optimizer": Optimizer, "task": Task,
    "partition": Partition, "callback": Callback,
}  # fmt: skip
_FOLDERS = {kind: f"fedspan.{kind}s" for kind in KINDS} | {"partition": "fedspan.data.partitions"}
_known: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}
_searched: set[str] = set()


def register(cls: C) -> C:
    """File a method, projector, compressor, optimizer or task under the name of the file it stands in."""
    kind = next((k for k, base in KINDS.items() if issubclass(cls, base)), None)
    if kind is None:
        raise TypeError(f"{cls.__name__} is neither a Method, a Projector, a Compressor, an Optimizer nor a Task")
    _known[kind][_file_name(cls)] = cls
    return cls


def choices(kind: str) -> dict[str, type]:
    """Name → class of all there is of a kind."""
    if kind not in _searched:
        _searched.add(kind)
        folder = importlib.import_module(_FOLDERS[kind])
        for module in pkgutil.iter_modules(folder.__path__):
            if not module.name.startswith("_"):
                importlib.import_module(f"{_FOLDERS[kind]}.{module.name}")
    return dict(sorted(_known[kind].items()))


def name_of(value: object) -> str:
    """The registered name of a value's class."""
    for table in _known.values():
        for name, cls in table.items():
            if cls is type(value):
                return name
    raise SpecError(f"{type(value).__name__} is not registered; put @register above the class")


def is_registered(value: object) -> bool:
    """Whether a value's class has a registered name."""
    return any(cls is type(value) for table in _known.values() for cls in table.values())


def summary(cls: type) -> str:
    """The one-line description: the first line of its module's docstring, without the name it repeats."""
    text = (sys.modules[cls.__module__].__doc__ or cls.__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split())


def load_file(path: Path) -> None:
    """Import a user's own file so that what it registers can be named in a spec."""
    if not path.is_file():
        raise SpecError(f"plugin file {str(path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SpecError(f"plugin file {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)


def build(kind: str, table: dict[str, Any], where: str | None = None) -> Any:
    """The value that a spec's table describes: `name` picks the class, the other keys are its fields."""
    where = where or kind
    if "name" not in table:
        raise SpecError(f"`[{where}]` needs a `name`; one of {', '.join(choices(kind))}")
    one_of(f"{where}.name", table["name"], choices(kind))
    return make(choices(kind)[table["name"]], {k: v for k, v in table.items() if k != "name"}, where)


def make(cls: type, table: dict[str, Any], where: str) -> Any:
    """A dataclass from a table of plain values, each checked against the field's type."""
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = typing.get_type_hints(cls)
    for key in table:
        one_of(f"key of [{where}]", key, fields)
    for field in fields.values():
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if missing and field.name not in table:
            raise SpecError(f"`{where}.{field.name}` is missing; it has no default")
    return cls(**{key: _value(hints[key], value, f"{where}.{key}") for key, value in table.items()})


def describe(value: Any) -> dict[str, Any]:
    """The table that `build` would make this value from, defaults included."""
    table: dict[str, Any] = {"name": name_of(value)}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if inner is not None:
            table[field.name] = _plain(inner)
    return table


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return describe(value)
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple) else value


def _value(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    real = [option for option in options if option is not type(None)]
    if len(real) == 1 and value is not None:
        (hint,) = options = (real[0],)
    for kind, base in KINDS.items():
        cls = typing.get_origin(hint) or hint
        if isinstance(cls, type) and issubclass(cls, base):
            if isinstance(value, base):
                return value
            if not isinstance(value, dict):
                raise SpecError(f"`{where}` must be a table such as {{name = …}}, got {value!r}")
            return build(kind, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return make(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is typing.Literal:
        one_of(where, value, typing.get_args(hint))
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise SpecError(f"`{where}` must be a list of texts, got {value!r}")
        return tuple(value)
    for option in options:
        if typing.get_origin(option) is typing.Literal:
            if value in typing.get_args(option):
                return value
        elif type(value) is option:
            return value
        elif typing.get_origin(option) is Mapping and isinstance(value, dict):
            kinds = typing.get_args(typing.get_args(option)[1])
            if all(type(inner) in kinds for inner in value.values()):
                return value
    if float in options and type(value) is int:
        return float(value)
    wanted = " or ".join(_readable(option) for option in real)
    raise SpecError(f"`{where}` must be {wanted}, got {value!r}")


def _readable(option: Any) -> str:
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(repr(a) for a in typing.get_args(option))
    if typing.get_origin(option) is Mapping:
        return "a table of numbers by name pattern"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words.get(option, getattr(option, "__name__", str(option)))


def _file_name(cls: type) -> str:
    if cls.__module__ == "__main__":
        return Path(getattr(sys.modules["__main__"], "__file__", None) or cls.__name__.lower()).stem
    return cls.__module__.rsplit(".", 1)[-1]
