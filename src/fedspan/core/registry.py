"""Folder = axis, file = choice: what is registered under which name (`core.tables` makes values of it).

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
from pathlib import Path
from typing import Any, TypeVar

from fedspan.core.aggregator import Aggregator
from fedspan.core.axes import Downlink, Drift, Optimizer, Server, Uplink
from fedspan.core.callback import Callback
from fedspan.core.catalog import FOLDERS, first_paragraph
from fedspan.core.compressor import Compressor
from fedspan.core.errors import SpecError, did_you_mean, one_of, shown
from fedspan.core.method import Method
from fedspan.core.metric import Metric, snake_case
from fedspan.core.partition import Partition
from fedspan.core.projector import Projector
from fedspan.core.task import Task

C = TypeVar("C", bound=type)


KINDS: dict[str, type] = {
    "method": Method, "projector": Projector, "drift": Drift, "optimizer": Optimizer, "uplink": Uplink,
    "server": Server, "downlink": Downlink, "compressor": Compressor, "aggregator": Aggregator,
    "task": Task, "partition": Partition, "callback": Callback, "metric": Metric,
}  # fmt: skip  # kind → what its choices derive from; their folders are in `core.catalog`
AXES = ("drift", "optimizer", "uplink", "server", "downlink")
ADOPTING = ("uplink", "downlink")  # for these a compressor stands for the choice that uses it
_known: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}


def register(cls: C) -> C:
    """Registers a method, projector, metric or another kind of choice under the name of the file it is in.

    A second class of a kind in the same file gets the name of the class, in snake case.

    Args:
        cls: A class that derives from the base class of its kind, such as `fedspan.Method`; its fields are settings.

    Returns:
        The class itself, so that this serves as a decorator.
    """
    kind = kind_of(cls)
    if kind is None:
        bases = ", ".join(base.__name__ for base in KINDS.values())
        raise SpecError(f"{cls.__name__} cannot be registered; derive it from one of {bases}")
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        raise SpecError(
            f"the {kind} {cls.__name__} lacks {', '.join(lacking)}, which every {kind} needs"
        )
    if bare := sorted(_annotated(cls) - {f.name for f in settings(cls)}):
        raise SpecError(
            f"{', '.join(bare)} of {cls.__name__} would be no setting: put @dataclass(frozen=True, kw_only=True) "
            "between @fedspan.register and the class"
        )
    for owner in cls.__mro__[1:]:
        fixed = {*vars(owner), *inspect.get_annotations(owner)} - _annotated(owner)
        for hidden in fixed & {f.name for f in settings(cls)}:
            raise SpecError(
                f"the setting {hidden!r} of {cls.__name__} hides what {owner.__name__} has under this name; rename the "
                "setting"
            )
    if kind in AXES:
        _check_functions(cls, kind)
    name, folder, what = cls.__module__.rsplit(".", 1)[-1], FOLDERS[kind], "file"
    if name == "__main__":
        name = Path(getattr(sys.modules[name], "__file__", None) or cls.__name__.lower()).stem
    held = _known[kind].get(name, cls)
    if held.__module__ == cls.__module__ and held.__qualname__ != cls.__qualname__:
        name, what = snake_case(cls.__name__), "class"  # a second one of the file
    own = cls.__module__.startswith(f"{folder}.")
    if not own and importlib.util.find_spec(f"{folder}.{name}") is not None:
        raise SpecError(
            f"{cls.__name__} would replace fedspan's own {kind} {name!r}; rename its {what}"
        )
    _known[kind][name] = cls
    if "__init__" in vars(cls):
        _suggest_names(cls)
    return cls


def _check_functions(cls: type, kind: str) -> None:
    """Refuse names of a choice that are neither settings nor those of its axis, and other parameters than it has."""
    base, article = KINDS[kind], f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    known = [
        name for name in dir(base) if name[0] != "_" and inspect.isfunction(getattr(base, name))
    ]
    inherited = {name for owner in cls.__bases__ for name in dir(owner)}
    inherited |= {field.name for field in settings(cls)}
    for name, own in vars(cls).items():
        if name[0] == "_":
            continue
        if name not in inherited and not cls.__module__.startswith("fedspan."):
            raise SpecError(
                f"{name!r} of {cls.__name__} is no function of {article}{did_you_mean(name, known)}, which has "
                f"{', '.join(known)}; give a setting its type (`{name}: float = …`), and begin the name of a helper "
                "with _"
            )
        if not inspect.isfunction(own):
            continue
        if name in known and inspect.isfunction(wanted := getattr(base, name)):
            names = [*inspect.signature(wanted).parameters]
            try:
                inspect.signature(own).bind(*names)
            except TypeError:
                raise SpecError(
                    f"`{name}` of {cls.__name__} takes ({', '.join(inspect.signature(own).parameters)}); it must take "
                    f"({', '.join(names)})"
                ) from None


def _suggest_names(cls: Any) -> None:
    """Makes a class refuse settings that it does not have, and name the nearest one."""
    init, known = cls.__init__, inspect.signature(cls.__init__).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown(cls, name, f"{cls.__name__} has no setting")
        init(self, *args, **kwargs)

    cls.__init__ = checked


def unknown(cls: type, name: object, what: str) -> SpecError:
    """The error about a setting that a class does not have, with the nearest one that it has."""
    names = sorted(f.name for f in settings(cls))
    return SpecError(
        f"{what} {shown(name)}{did_you_mean(name, names)}; it has {', '.join(names) or 'none'}"
    )


def _annotated(cls: type) -> set[str]:
    """The names that a class annotates as its own fields."""
    own = inspect.get_annotations(cls)
    return {name for name, hint in own.items() if name[0] != "_" and "ClassVar" not in str(hint)}


def settings(cls: type) -> list[dataclasses.Field[Any]]:
    """The settings of a class; a class that is no dataclass has none."""
    return [f for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []


def registered_in(module: str) -> list[type]:
    """The classes that a module registers."""
    return [cls for known in _known.values() for cls in known.values() if cls.__module__ == module]


def kind_of(cls: Any) -> str | None:
    """The kind that a class is of, such as "method"."""
    bases = getattr(cls, "__mro__", ())
    return next((kind for kind, base in KINDS.items() if base in bases), None)


def choices(kind: str) -> dict[str, type]:
    """Name → class of everything that is registered of a kind."""
    _discover(FOLDERS[kind])
    return dict(sorted(_known[kind].items()))


def accepted(kind: str) -> dict[str, type]:
    """Name → class of what may be named for a kind: its choices, and compressors that stand for one of them."""
    return choices("compressor") | choices(kind) if kind in ADOPTING else choices(kind)


@functools.cache
def _discover(folder: str) -> None:
    for module in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{folder}.{module.name}")


def is_registered(value: object) -> bool:
    """Whether a value's class has a registered name."""
    return any(type(value) in known.values() for known in _known.values())


def name_of(value: object) -> str:
    """The registered name of a value's class."""
    for known in _known.values():
        for name, cls in known.items():
            if cls is type(value):
                return name
    raise SpecError(
        f"{type(value).__name__} is not registered; put @fedspan.register above the class"
    )


def summary(cls: type) -> str:
    """The one-line description of a choice: the first paragraph of its module's docstring."""
    return first_paragraph(sys.modules[cls.__module__].__doc__ or cls.__doc__)


def registered_name(kind: str, name: Any, where: str) -> str:
    """The name under which a choice is registered; "FedAvg" and "Early-Stopping" are read as fedavg, early_stopping."""
    known = accepted(kind)
    if isinstance(name, str) and name not in known:
        plain = {one.replace("_", ""): one for one in known}
        name = plain.get(re.sub(r"[\W_]", "", name.lower()), name)
    one_of(where, name, known)
    return str(name)
