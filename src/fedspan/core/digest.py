"""Hashes by which a run knows again what it was made with: texts, files, arrays, and functions by what they do.

All are BLAKE2b in hexadecimal; only files are also hashed by SHA-256, as `sha256sum` prints it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SAMPLED = 64  # numbers of a tensor that are looked at
SIZE = 8  # bytes of a hash that only tells two things apart; 16 hold against damage of large files


def digest(*parts: str | bytes | memoryview, size: int = SIZE) -> str:
    """A hash of texts or bytes, one after the other."""
    found = hashlib.blake2b(digest_size=size)
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part)
    return found.hexdigest()


def digest_of_arrays(arrays: Mapping[str, Tensor], *parts: str, size: int = SIZE) -> str:
    """A hash of texts, and of named arrays with their types and shapes, in the order of their names."""
    found = list[str | memoryview](parts)
    for name in sorted(arrays):
        found += [f"{name} {arrays[name].dtype} {tuple(arrays[name].shape)}", raw(arrays[name])]
    return digest(*found, size=size)


def sha256(path: Path) -> str:
    """The hash of a file, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def raw(array: Tensor) -> memoryview:
    """The bytes of an array, without a copy."""
    flat = array.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def sampled(array: Tensor) -> list[Any]:
    """Some numbers of a tensor, evenly spread."""
    return list(array[..., :: max(1, array.shape[-1] // SAMPLED)].tolist())


def source_of(function: Any) -> str:
    """A function's name and a hash of what it does, so that a changed one is noticed."""
    if isinstance(function, functools.partial):
        settings = digest(_plain(function.args) + _plain(function.keywords), size=6)
        return f"partial({source_of(function.func)})#{settings}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        text = inspect.getsource(function if hasattr(function, "__code__") else type(function))
    except (OSError, TypeError):
        return f"{name} (source not known)"
    return f"{name}#{digest(text + _held(function), size=6)}"


def _held(function: Any) -> str:
    """What a function or a callable object holds besides its source."""
    if not hasattr(function, "__code__"):
        return "" if isinstance(function, type) else _plain(function)
    fixed = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell without a value
            if not isinstance(cell.cell_contents, list | dict | set):  # which may be counted in
                fixed.append(_plain(cell.cell_contents))
    return repr((_plain(function.__code__), _plain(function.__defaults__), fixed))


def _plain(value: Any) -> str:
    """A value as a text that is the same in every process; objects of other kinds count by their type."""
    if isinstance(value, CodeType):
        return repr((value.co_code.hex(), value.co_names, [_plain(one) for one in value.co_consts]))
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {sampled(value.detach().reshape(-1))}"
    if isinstance(value, np.ndarray):
        return _plain(value.tolist()) if value.size <= SAMPLED else f"{value.shape}"
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_plain, value)))
    if isinstance(value, Mapping):
        return repr([(str(key), _plain(one)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return repr([_plain(one) for one in value])
    if isinstance(value, str | bytes | int | float | complex | np.generic | torch.dtype | None):
        return repr(value)
    if hasattr(value, "__code__"):
        return _plain(value.__code__)
    text = type(value).__qualname__
    if isinstance(value, nn.Module):
        text = module_text(value) + _plain(value.state_dict())
    scalars, own = (str, int, float, tuple, Tensor), getattr(value, "__dict__", {})
    kept = {k: v for k, v in own.items() if k[:1] != "_" and isinstance(v, scalars)}
    return text + _plain(kept)


def module_text(module: nn.Module) -> str:
    """The structure of a module, without addresses of memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(module))
