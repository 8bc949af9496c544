"""A user's own code: imported by path or by name, and called, with one-line errors for what goes wrong in it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedspan.core import registry
from fedspan.core.errors import FedspanError, SpecError, one_line

T = TypeVar("T")
EXTRAS = {"sklearn": "vision", "PIL": "vision", "pandas": "pandas", "transformers": "nlp"}
"""Module → extra that has it."""


def load_plugin(path: Path) -> list[type]:
    """Imports a user's own file, so that a spec can name what it registers. It can import modules of its folder.

    Returns:
        The classes that the file registers.

    Raises:
        SpecError: The file cannot be imported, registers nothing, or has the name of something else.
    """
    what = f"plugin file {str(path)!r}"
    if not path.is_file():
        raise SpecError(f"{what} does not exist")
    if path.suffix != ".py":
        raise SpecError(f"{what} is not a Python file; its name must end in .py")
    if path.stem in sys.stdlib_module_names:
        raise SpecError(f"{what} has the name of a module of Python; rename the file")
    if (other := _another(path)) is not None:
        raise SpecError(f"{what} has the name of the module {other!r}; rename the file")
    importlib.invalidate_caches()  # files beside it may be new
    sys.path.insert(0, folder := str(path.resolve().parent))
    try:
        module = guarded(lambda: _execute_file(path.stem, path), what, path)
    finally:
        sys.path.remove(folder)
    found = registry.registered_in(module.__name__)
    if not found:
        raise SpecError(f"{what} registers nothing: {_remedy(module)}")
    return found


def load_module(name: str, folder: str | None, key: str = "task.module") -> ModuleType:
    """Imports a module by its import name or as a file.

    `folder` is on the path for the import of a name, and only for that.
    """
    what = f"`{key}` {name!r}"
    importlib.invalidate_caches()  # the file may be new
    if name.endswith(".py"):
        file, own = Path(folder or ".") / name, f"fedspan_custom_{Path(name).stem}"
        if not file.is_file():
            raise SpecError(f"`{key}` {str(file)!r} does not exist")
        if getattr(sys.modules.get(own), "__file__", None) == str(file):
            return sys.modules[own]
        return guarded(lambda: _execute_file(own, file), f"{what} fails", file)
    if folder is not None:
        _forget_others(name, Path(folder))
        sys.path.insert(0, folder)
    try:
        return guarded(lambda: importlib.import_module(name), f"{what} cannot be imported")
    finally:
        if folder is not None:
            sys.path.remove(folder)


def called(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """Calls a user's function; errors name it as `what`."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        wanted = "one argument, the client's number" if arguments else "no argument"
        raise SpecError(f"{what}() must take {wanted}: {error}") from None
    except ValueError:
        pass  # a builtin has no signature
    code = getattr(function, "__code__", None)
    file = None if code is None else Path(code.co_filename)
    missing = "; set `clients` in the spec to the number of clients that have data"
    end = missing if arguments else ""
    return guarded(lambda: function(*arguments), f"{what}() fails", file, end)


def guarded(call: Callable[[], T], what: str, file: Path | None = None, missing: str = "") -> T:
    """Runs a user's code; whatever it raises becomes one line.

    The line begins with `what`, names the place in `file`, and ends with `missing` if the code found no file.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        if isinstance(error, SyntaxError):
            lines = [error.lineno]
        place = f" in line {lines[-1]} of {file.name}" if file and lines else ""
        why, remedy = one_line(error), ""
        if isinstance(error, SystemExit):
            why = "it ends Python; remove `exit`"
        elif isinstance(error, FileNotFoundError):
            remedy = missing
        elif isinstance(error, ModuleNotFoundError):
            extra = EXTRAS.get((error.name or "").partition(".")[0])
            remedy = f"; pip install 'fedspan[{extra}]'" if extra else ""
        kind = type(error) if isinstance(error, FedspanError) else SpecError
        raise kind(f"{what}{place}: {why}{remedy}") from error


def _forget_others(name: str, folder: Path) -> None:
    """A module of this name from another spec's directory is imported anew, with its neighbors."""
    top = name.partition(".")[0]
    here = {folder / f"{top}.py", folder / top / "__init__.py"}
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None or Path(file) in here or not any(path.is_file() for path in here):
        return
    old = Path(file).parent
    for other, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if other.partition(".")[0] == top or (place and Path(place).parent == old):
            del sys.modules[other]


def _execute_file(name: str, path: Path) -> ModuleType:
    """Import a user's own file as a module of this name; nothing of it stays if it fails."""
    with suppress(OSError):  # bytecode may be of an earlier text with the same size and second
        Path(importlib.util.cache_from_source(path)).unlink()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
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
    origin = "" if found is None else str(found.origin)
    return origin if Path(origin).is_file() and not Path(origin).samefile(path) else None


def _remedy(module: ModuleType) -> str:
    """What to do about a file that registers nothing."""
    for cls in vars(module).values():
        own = registry.kind_of(cls) and cls.__module__ == module.__name__
        if own and not inspect.isabstract(cls):
            return f"put @fedspan.register above the class {cls.__name__}"
    if callable(getattr(module, "command", None)):
        return "a plugin cannot add a command; commands are files in fedspan/cli"
    bases = ", ".join(base.__name__ for base in registry.KINDS.values())
    return f"it has no class that derives from one of {bases}"
