"""Modules as plain values: how a model is built again, without pickle.

A container of torch's own layers is saved layer by layer. Any other class is saved by its import path and the arguments
of its constructor, which are read from attributes of the same names, or from a dictionary `arguments` of the module.
"""

import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedspan.core.errors import CheckpointError, one_line
from fedspan.core.seeds import torch_generator

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blueprint(module: nn.Module) -> dict[str, Any] | None:
    """Return how a module is built, or None if that cannot be said in plain values."""
    try:
        plan = _plan(module)
        made = build(json.loads(json.dumps(plan)))  # values of other types cannot be written
    except (TypeError, ValueError, CheckpointError):
        return None
    first, second = (
        {name: value.shape for name, value in one.state_dict().items()} for one in (made, module)
    )
    return plan if first == second else None


def _plan(module: nn.Module) -> dict[str, Any]:
    kind = type(module)
    path = f"{kind.__module__}:{kind.__qualname__}"
    if kind in CONTAINERS:
        return {"class": path, "parts": {key: _plan(one) for key, one in module.named_children()}}
    found = getattr(module, "arguments", None)
    if not isinstance(found, Mapping):
        found = dict[str, Any]()
        for name, parameter in inspect.signature(kind).parameters.items():
            if name == "bias" and name in module._parameters:  # torch's layers are asked by a bool
                found[name] = module.bias is not None
            elif hasattr(module, name) and name not in ("device", "dtype"):
                found[name] = getattr(module, name)
            elif parameter.default is parameter.empty:
                raise CheckpointError(f"{path} does not keep its argument {name!r}")
    if kind.__module__ == "__main__":
        raise CheckpointError(f"{path} is defined in a script, which cannot be imported")
    return {"class": path, "arguments": dict(found)}


def build(plan: Any) -> nn.Module:
    """Return a new module from `blueprint`'s values, which may come from a file.

    Raises:
        CheckpointError: The values are damaged, or the class cannot be imported or is no module.
    """
    if not isinstance(plan, dict) or not isinstance(plan.get("class"), str):
        raise CheckpointError(f"a model's blueprint must name a class, got {str(plan)[:60]!r}")
    where, _, name = plan["class"].partition(":")
    try:
        kind: Any = importlib.import_module(where)
        for part in name.split("."):
            kind = getattr(kind, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"the model's class {plan['class']!r} cannot be imported: {one_line(error)}; put it on the path, or give "
            "`model`"
        ) from None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise CheckpointError(f"{plan['class']!r} is no class of modules")
    try:
        if kind in CONTAINERS:
            parts = {str(key): build(part) for key, part in plan["parts"].items()}
            made: nn.Module = kind()
            for key, part in parts.items():
                made.add_module(key, part)
            return made
        arguments = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in plan["arguments"].items()
        }
        with torch_generator():  # its initial weights are drawn, and replaced
            return kind(**arguments)
    except CheckpointError:
        raise
    except Exception as error:  # of the class's own constructor
        raise CheckpointError(
            f"{plan['class']!r} cannot be built: {one_line(error)}; give `model`"
        ) from None
