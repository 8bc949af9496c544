"""What a function is: its name and a hash of its source, its constants and its settings."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

SAMPLED = 64  # numbers of a tensor that are looked at


def source_of(function: Any) -> str:
    """A function's name and a hash of what it does, so that a changed one is noticed."""
    if isinstance(function, functools.partial):
        settings = _hash(_plain(function.args) + _plain(function.keywords))
        return f"partial({source_of(function.func)})#{settings}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        text = inspect.getsource(function if hasattr(function, "__code__") else type(function))
    except (OSError, TypeError):
        return f"{name} (source not known)"
    return f"{name}#{_hash(text + _held(function))}"


def _held(function: Any) -> str:
    """What a function or a callable object holds besides its source."""
    if not hasattr(function, "__code__"):
        return "" if isinstance(function, type) else _plain(function)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_set(cell)]
    fixed = [
        _plain(value) for value in cells if not isinstance(value, list | dict | set)
    ]  # those may be counted in
    return repr((_plain(function.__code__), _plain(function.__defaults__), fixed))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _plain(value: Any) -> str:
    """A value as a text that is the same in every process; objects of other kinds count by their type."""
    if isinstance(value, CodeType):
        return repr((value.co_code.hex(), value.co_names, [_plain(one) for one in value.co_consts]))
    if isinstance(value, torch.Tensor):
        numbers = value.detach().reshape(-1)
        return f"{tuple(value.shape)} {numbers[:: max(1, len(numbers) // SAMPLED)].tolist()}"
    if isinstance(value, np.ndarray):
        return _plain(value.tolist()) if value.size <= SAMPLED else f"{value.shape}"
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_plain, value)))
    if isinstance(value, Mapping):
        return repr([(str(key), _plain(one)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return repr([_plain(one) for one in value])
    if value is None or isinstance(
        value, str | bytes | int | float | complex | np.generic | torch.dtype
    ):
        return repr(value)
    if hasattr(value, "__code__"):
        return _plain(value.__code__)
    if isinstance(value, nn.Module):
        return module_text(value) + _plain(value.state_dict()) + _settings(value)
    return type(value).__qualname__ + _settings(value)


def module_text(module: nn.Module) -> str:
    """The structure of a module, without addresses of memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(module))


def _settings(value: Any) -> str:
    scalars = (str, int, float, tuple, torch.Tensor)
    own = {
        k: v
        for k, v in getattr(value, "__dict__", {}).items()
        if k[:1] != "_" and isinstance(v, scalars)
    }
    return _plain(own)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
