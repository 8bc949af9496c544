"""What decides a run besides its settings: code, data and initial weights of the user's own.

A spec names a plugin's method, a data module or a data file, and each may change while the spec stays the same. Their
fingerprints keep runs of the old ones apart from runs of the new ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fedspan.core import building, registry
from fedspan.core.digest import source_of
from fedspan.core.errors import DataError
from fedspan.core.json_log import read_table, write_table
from fedspan.core.spec import Spec, flat
from fedspan.core.task import Task
from fedspan.tasks.custom import Custom, Objects, _digest

FILE = "fingerprint.json"
SAMPLED = (
    1 << 20
)  # bytes of a large file that are looked at: at its start, in its middle and at its end
_of_tasks: dict[str, dict[str, str]] = {}  # what a spec file names is read once per process


def fingerprint(spec: Spec) -> dict[str, str]:
    """What it is of → hash, for everything that is the user's own; empty if all comes with fedspan."""
    own = {f"source of {type(value).__name__}": _source(type(value)) for value in _choices(spec)}
    if isinstance(spec.task, Custom) and spec.task.objects is not None:
        return own | _of_objects(spec.task.objects)
    table = building.describe(spec.task)
    key = json.dumps(table)
    if key not in _of_tasks:
        _of_tasks[key] = _of_files(table) | _of_module(spec.task)
    return own | _of_tasks[key]


def digest(found: Mapping[str, str]) -> str:
    """A short hash of a fingerprint."""
    return _hash(json.dumps(found, sort_keys=True).encode(), 4)


def changed(runs: Path, found: Mapping[str, str]) -> list[str]:
    """What has changed since the runs in a directory were made. Notes the new fingerprint there."""
    path = runs / FILE
    before = (
        read_table(path, remedy="put it back, or delete it and the runs beside it")
        if path.exists()
        else {}
    )
    if found:
        runs.mkdir(parents=True, exist_ok=True)
        write_table(path, {**before, **found})
    return [what for what, value in found.items() if before.get(what, value) != value]


def _of_objects(given: Objects) -> dict[str, str]:
    """Of a model and data in Python."""
    found = vars(given).get("fingerprint")
    if found is None:
        data = {
            "clients' data": given.clients,
            "test data": given.test,
            "validation data": given.validation,
        }
        weights = {"initial weights": dict(given.model.state_dict())}
        found = {name: _digest(one) for name, one in (weights | data).items()}
        vars(given)["fingerprint"] = found  # every run of a comparison asks for it
    return dict(found)


def _of_files(table: Mapping[str, Any]) -> dict[str, str]:
    """Of the files that a task names."""
    named = {
        str(value): Path(value)
        for value in flat(table).values()
        if isinstance(value, str) and len(value) < 1000
    }
    return {f"file {name!r}": _of_file(path) for name, path in named.items() if path.is_file()}


def _of_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for place in sorted({0, size // 2, max(0, size - SAMPLED)}):
            file.seek(place)
            parts.append(file.read(SAMPLED))
    return _hash(f"{size} ".encode() + b"".join(parts))


def _of_module(task: Task) -> dict[str, str]:
    """Of what the functions of a task's module give here."""
    if not isinstance(task, Custom) or task.clients is None:
        return {}
    read = task.material(0, torch.float32)
    found = {"test data": _digest(read.test()), "validation data": _digest(read.validation())}
    with contextlib.suppress(DataError, OSError):  # data that is on other machines
        found["clients' data"] = _digest(list(read.examples(range(task.clients))))
    return found


def _choices(value: Any) -> Iterator[Any]:
    """Every method, projector, metric and so on in a value whose class does not come with fedspan."""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _choices(inner)
    elif dataclasses.is_dataclass(value):
        if registry.kind_of(type(value)) is not None and not type(value).__module__.startswith(
            "fedspan."
        ):
            yield value
        for one in dataclasses.fields(value):
            yield from _choices(getattr(value, one.name))


def _source(cls: type) -> str:
    """A hash of the file that a class is in; of a script that is run, of the class alone."""
    file = None if cls.__module__ == "__main__" else inspect.getsourcefile(cls)
    if file is None or not Path(file).is_file():
        return source_of(cls)
    return _hash(Path(file).read_bytes())


def _hash(data: bytes, size: int = 8) -> str:
    return hashlib.blake2b(data, digest_size=size).hexdigest()
