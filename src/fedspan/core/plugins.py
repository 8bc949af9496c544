"""A user's own file: imported by its path, with one-line errors for what goes wrong in it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from types import CodeType, ModuleType

from fedspan.core import registry
from fedspan.core.errors import FedspanError, SpecError, one_line


def load_plugin(path: Path) -> list[type]:
    """Imports a user's own file, so that a spec can name what it registers.

    Returns:
        The classes that the file registers.

    Raises:
        SpecError: The file cannot be imported, registers nothing, or has the name of something else.
    """
    if not path.is_file():
        raise SpecError(f"plugin file {str(path)!r} does not exist")
    if path.suffix != ".py":
        raise SpecError(f"plugin file {str(path)!r} is not a Python file; its name must end in .py")
    if path.stem in sys.stdlib_module_names:
        raise SpecError(
            f"plugin file {path.name!r} has the name of a module of Python; rename the file"
        )
    if (other := _another(path)) is not None:
        raise SpecError(
            f"plugin file {str(path)!r} has the name of the module {other!r}; rename the file"
        )
    try:
        module = execute_file(path.stem, path)
    except FedspanError as error:
        raise SpecError(f"plugin file {str(path)!r}{_line(error, path)}: {error}") from error
    except SystemExit as error:
        raise SpecError(
            f"plugin file {str(path)!r}{_line(error, path)}: it ends Python; remove `exit`"
        ) from error
    except Exception as error:
        raise SpecError(
            f"plugin file {str(path)!r}{_line(error, path)}: {one_line(error)}"
        ) from error
    found = registry.registered_in(module.__name__)
    if not found:
        raise SpecError(f"plugin file {str(path)!r} registers nothing: {_remedy(module)}")
    return found


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compile a file as it is now: its cached bytecode may be of an earlier text with the same size and second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def execute_file(name: str, path: Path) -> ModuleType:
    """Import a user's own file as a module of this name; nothing of it stays if it fails."""
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found by the next import
        raise
    return module


def _another(path: Path) -> str | None:
    """Where another module of a plugin's name is, which the plugin would hide from every import; None: nowhere."""
    try:
        found = importlib.util.find_spec(path.stem)
    except (ImportError, ValueError):  # what is loaded has no spec, as in tests
        return None
    origin = None if found is None else found.origin
    same = origin is None or not Path(origin).exists() or Path(origin).samefile(path)
    return None if same else origin


def _line(error: BaseException, path: Path) -> str:
    """Where in the file an error arose."""
    if isinstance(error, SyntaxError):
        return f", line {error.lineno}" if error.lineno else ""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path
    ]
    return f", line {lines[-1]}" if lines else ""


def _remedy(module: ModuleType) -> str:
    """What to do about a file that registers nothing."""
    own = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__ == module.__name__
    ]
    if kinds := [
        cls.__name__ for cls in own if registry.kind_of(cls) and not inspect.isabstract(cls)
    ]:
        return f"put @fedspan.register above the class {kinds[-1]}"
    if callable(getattr(module, "command", None)):
        return "a plugin cannot add a command; commands are files in fedspan/cli"
    bases = ", ".join(base.__name__ for base in registry.KINDS.values())
    return f"it has no class that derives from one of {bases}"
