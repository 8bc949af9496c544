"""Lazy names of a package: listed once, where type checkers read them, and imported when they are first used.

    if TYPE_CHECKING:
        from fedspan.methods.ssf import SSF as SSF
    else:
        __getattr__, __dir__, __all__ = lazy(__name__)

Type checkers and editors read the first branch. `lazy` reads the same lines from the package's source, so that
`fedspan.methods.SSF` imports one file, and tab completion knows all names without importing any.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

Names = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def lazy(package: str) -> Names:
    """`__getattr__`, `__dir__` and `__all__` of a package, from its `if TYPE_CHECKING:` block."""
    module, places = sys.modules[package], listed(package)

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=module
            )
        if places[name] == package:  # `from fedspan import methods as methods`: a package inside it
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*places, *(name for name in vars(module) if name.startswith("__"))})

    return get, names, sorted(places)


def listed(package: str) -> dict[str, str]:
    """Public name → module, as the package's source lists them in the form `from MODULE import NAME as NAME`."""
    source = pkgutil.get_data(package, "__init__.py") or b""
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }
