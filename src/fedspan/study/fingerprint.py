"""What decides a run besides its settings: code, data and initial weights of the user's own.

A spec names a plugin's method or a data module, and both may change while the spec stays the same. Their fingerprints
keep runs of the old ones apart from runs of the new ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedspan.core import registry
from fedspan.core.checkpoint import write_atomic
from fedspan.core.spec import Spec

FILE = "fingerprint.json"


def fingerprint(spec: Spec) -> dict[str, str]:
    """What it is of → hash, for everything that is the user's own; empty if all comes with fedspan."""
    own = {f"source of {type(value).__name__}": _source(type(value)) for value in _choices(spec)}
    return own | spec.task.fingerprint()


def digest(found: Mapping[str, str]) -> str:
    """A short hash of a fingerprint."""
    return hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=4).hexdigest()


def changed(runs: Path, found: Mapping[str, str]) -> list[str]:
    """What has changed since the runs in a directory were made. Notes the new fingerprint there."""
    path = runs / FILE
    before = json.loads(path.read_text()) if path.exists() else {}
    if found:
        runs.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**before, **found}, indent=1).encode())
    return [what for what, value in found.items() if before.get(what, value) != value]


def _choices(value: Any) -> Iterator[Any]:
    """Every method, projector, metric and so on in a value whose class does not come with fedspan."""
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _choices(inner)
    elif dataclasses.is_dataclass(value):
        if registry.kind_of(type(value)) is not None and not type(value).__module__.startswith("fedspan."):
            yield value
        for one in dataclasses.fields(value):
            yield from _choices(getattr(value, one.name))


def _source(cls: type) -> str:
    """A hash of the file that a class is in; of a script that is run, of the class alone."""
    file = None if cls.__module__ == "__main__" else inspect.getsourcefile(cls)
    if file is None or not Path(file).is_file():
        return registry.source_of(cls)
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
