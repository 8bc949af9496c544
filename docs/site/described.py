"""An extension of griffe, which reads the docstrings for mkdocstrings."""

from __future__ import annotations

import inspect
import re
import sys
import typing
from pathlib import Path
from typing import Any

import griffe

from fedspan.cli._fields import settings

sys.path.insert(0, str(Path(__file__).parent))
import api_reference


class Described(griffe.Extension):
    """Gives mkdocstrings what stands beside the fields of a dataclass, and the algorithm in the file of a method."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Completes the docstrings of the classes that the reference shows."""
        shown = {
            api_reference.value(name)
            for name in re.findall(r"^::: (.*)$", "\n".join(api_reference.pages().values()), re.M)
        }
        bases = {
            base
            for found in shown
            if isinstance(found, type)
            for base in found.__mro__
            if _ours(base)
        }
        for found in bases:
            cls, rows = (
                pkg[f"{found.__module__}.{found.__name__}".removeprefix(f"{api_reference.ROOT}.")],
                settings(found),
            )
            plain_fields(cls, found, rows)
            if found in shown and (rows or api_reference.is_choice(found)):
                cls.docstring = griffe.Docstring(
                    full_docstring(found, rows), parent=cls, parser="google"
                )


def _ours(cls: type) -> bool:
    return cls.__module__.startswith(f"{api_reference.ROOT}.")


def plain_fields(cls: griffe.Class, found: type, rows: list[tuple[str, str, str, str]]) -> None:
    """Shows a type alias as its members and a constant as its value, as `fedspan list NAME` does."""
    for name, kind, default, _ in rows:
        one = cls.members.get(name)
        if not isinstance(one, griffe.Attribute):
            continue  # inherited
        is_alias = not isinstance(typing.get_type_hints(found)[name], type)
        one.annotation = (
            kind if is_alias and re.fullmatch(r"[A-Z]\w+", str(one.annotation)) else one.annotation
        )
        one.value = default if re.fullmatch(r"[A-Z_]+", str(one.value)) else one.value


def full_docstring(cls: type, rows: list[tuple[str, str, str, str]]) -> str:
    """The docstring of a class with every setting in its `Args:`, and with that of its file if it is a choice."""
    own = re.sub(r"^Args:\n(?:[ ]+.*\n?|\n)+", "", inspect.getdoc(cls) or "", flags=re.M).strip()
    file = (
        (inspect.getdoc(sys.modules[cls.__module__]) or "") if api_reference.is_choice(cls) else ""
    )
    first, _, rest = file.partition("\n\n")
    described = [f"    {name}: {words}" for name, _, _, words in rows if words]
    arguments = "\n".join(["Args:", *described]) if described else ""
    return "\n\n".join(part for part in (first, own, rest, arguments) if part)
