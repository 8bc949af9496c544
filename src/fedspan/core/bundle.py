"""One shape for states and messages: named parts, each a tensor, a compressed vector, a log or a download of x."""

from __future__ import annotations

from typing import Any

from fedspan.core.errors import ProtocolError


class MissingPartError(ProtocolError, AttributeError):
    """A state or message lacks a part that the method needs."""


class Bundle:
    """Named parts that do not change: `Bundle(x=x, c=c).c`. A part that is None is left out."""

    def __init__(self, **parts: Any) -> None:
        own = self.__dict__
        for name, part in parts.items():
            if part is not None:
                own[name] = part

    def __getattr__(self, name: str) -> Any:
        has = ", ".join(vars(self)) or "none"
        raise MissingPartError(
            f"there is no part {name!r}, only {has}; both ends must run the same method and settings"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Bundle does not change; use replace({name}=…)")

    def __repr__(self) -> str:
        return f"Bundle({', '.join(vars(self))})"

    def get(self, name: str) -> Any:
        """Return a part, or None if it is not there."""
        return vars(self).get(name)

    def replace(self, **parts: Any) -> Bundle:
        """Return a bundle with other parts; one that is None is left out."""
        return Bundle(**{**vars(self), **parts})
