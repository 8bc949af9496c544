"""What can be named in a spec, read from the source files without importing them.

Importing them means importing torch, which takes longer than everything that `fedspan list` does.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

FOLDERS = {
    "method": "fedspan.methods",
    "projector": "fedspan.projectors",
    "drift": "fedspan.drifts",
    "optimizer": "fedspan.optimizers",
    "uplink": "fedspan.uplinks",
    "server": "fedspan.servers",
    "downlink": "fedspan.downlinks",
    "compressor": "fedspan.compressors",
    "aggregator": "fedspan.aggregators",
    "task": "fedspan.tasks",
    "partition": "fedspan.data.partitions",
    "callback": "fedspan.callbacks",
    "metric": "fedspan.metrics",
}  # kind → the package with one file per choice


def summaries(kind: str) -> dict[str, str]:
    """Name → one-line description of fedspan's own choices of a kind."""
    found = {}
    for folder in importlib.import_module(FOLDERS[kind]).__path__:
        for module in pkgutil.iter_modules([folder]):
            source = Path(folder, f"{module.name}.py").read_text("utf-8")
            if not module.name.startswith("_") and "\n@register\n" in source:
                found[module.name] = first_paragraph(ast.get_docstring(ast.parse(source)))
    return dict(sorted(found.items()))


def class_summaries(file: str, names: tuple[str, ...]) -> dict[str, str]:
    """Name → first line of the docstring of classes in a file of this folder."""
    body = ast.parse(Path(__file__).with_name(file).read_text("utf-8")).body
    found = {one.name: ast.get_docstring(one) for one in body if isinstance(one, ast.ClassDef)}
    return {name: str(found[name]).splitlines()[0] for name in names}


def first_paragraph(docstring: str | None) -> str:
    """The first paragraph of a docstring in one line."""
    return " ".join((docstring or "").strip().split("\n\n")[0].split())
