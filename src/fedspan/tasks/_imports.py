"""A user's own Python code that a spec names: a module beside the spec file, or one that is installed."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedspan.core.errors import FedspanError, SpecError, one_line
from fedspan.core.plugins import execute_file
from fedspan.core.seeds import torch_generator

EXTRAS = {
    "sklearn": "vision",
    "PIL": "vision",
    "pandas": "pandas",
    "transformers": "nlp",
}  # module → extra that has it


def load_module(name: str, folder: str | None, key: str = "task.module") -> ModuleType:
    """Imports a module by its import name or as a file; whatever it raises is an error of the spec.

    `folder` is on the path for the import of a name, and only for that.
    """
    load: Callable[[], ModuleType] = functools.partial(importlib.import_module, name)
    added: str | None = None
    if name.endswith(".py"):
        file, own = Path(folder or ".") / name, f"fedspan_custom_{Path(name).stem}"
        if not file.is_file():
            raise SpecError(f"`{key}` {str(file)!r} does not exist")
        if getattr(sys.modules.get(own), "__file__", None) == str(file):
            return sys.modules[own]
        name, load = file.name, functools.partial(execute_file, own, file)
    elif folder is not None:
        _forget_others(name, Path(folder))
        added = folder
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # the file may be new
    try:
        return load()
    except FedspanError:
        raise
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        remedy = f"; pip install 'fedspan[{extra}]'" if extra else ""
        raise SpecError(f"`{key}` {name!r} cannot be imported: {error}{remedy}") from None
    except SystemExit as error:
        raise SpecError(
            f"`{key}` {name!r} calls sys.exit when it is imported; remove the call"
        ) from error
    except Exception as error:
        raise SpecError(f"`{key}` {name!r} cannot be imported: {one_line(error)}") from error
    finally:
        if added is not None:
            sys.path.remove(added)


def model_from(name: str, folder: str | None, seed: int) -> nn.Module:
    """What the function of a name such as `my_model:make` returns; its initial weights are decided by the seed."""
    where, _, function = name.partition(":")
    module = load_module(where, folder, "task.model")
    make: Any = getattr(module, function, None)
    if not callable(make):
        found = "no function" if make is None else f"a {type(make).__name__}, not a function,"
        raise SpecError(f"`task.model` {name!r}: the module {where!r} has {found} {function!r}")
    with torch_generator(seed):
        model = called(make, f"`task.model` {name!r}: {function}")
    return checked_model(model, f"`task.model` {name!r} must return")


def checked_model(model: Any, what: str) -> nn.Module:
    """Refuses what cannot be trained; `what` begins the error, as in "`model` must be"."""
    if not isinstance(model, nn.Module):
        raise SpecError(f"{what} a torch.nn.Module, got {type(model).__name__}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SpecError(
            f"{what} a model with weights, and this one is on the device 'meta', which holds none; load them on 'cpu'"
        )
    return model


def called(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """What a user's function returns; `what` names it where it does not take these arguments, or exits."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        wanted = "one argument, the client's number" if arguments else "no argument"
        raise SpecError(f"{what}() must take {wanted}: {error}") from None
    except ValueError:
        pass  # a builtin has no signature
    try:
        return function(*arguments)
    except FedspanError:
        raise
    except SystemExit as error:
        raise SpecError(f"{what}() calls sys.exit; remove the call") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(getattr(function, "__code__", None), "co_filename", None)
        own = [frame for frame in frames if frame.filename == file]
        frame = (own or frames)[-1]  # of the user's file, not of a library that it calls
        place = f"line {frame.lineno} of {Path(frame.filename).name}"
        hint = ""
        if arguments and isinstance(error, FileNotFoundError):
            hint = "; set `clients` in the spec to the number of clients that have data"
        raise SpecError(f"{what}() fails in {place}: {one_line(error)}{hint}") from error


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
