"""`fedspan init`: a small project that runs at once, to be filled with data of your own."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

TEMPLATES = Path(__file__).parent / "templates"
NAME = "my_project"  # what the templates call the project
FOLDERS = ("tests", "data", "out", "runs")  # of a project, besides its package


class Kind(NamedTuple):
    """What differs between the kinds of project, besides `task.py`."""

    spec: dict[str, str]  # lines of spec.toml that are written otherwise
    data: str  # where one's own data goes


KINDS = {
    "tabular": Kind(
        {},
        """Make a directory `data` with a file `client-0.csv`, `client-1.csv`, … for each client and `test.csv`. A file
has a line of names, then one row per example: numbers, and the number of the class last. Set `FEATURES` and `CLASSES`
in `task.py`. Columns may have any scale: the model begins with `BatchNorm1d`, whose running means and variances are
averaged over the clients like weights, so that no data is pooled. With `privacy`, which refuses them, take it out and
divide each column by a constant of your own in `_read`. If all rows are in one file
with a column that says whose they are, you need no Python at all: set `[task]` to `name = "classification"` and
`data = { path = "rows.csv", target = "…", client = "…" }`.""",
    ),
    "images": Kind(
        {"lr = 0.5  ": "lr = 0.2  "},
        """Make a directory `data` with a directory `client-0`, `client-1`, … for each client and `test`. Each has a
sub-directory of images per class, named in `CLASSES`.""",
    ),
    "text": Kind(
        {"lr = 0.5  ": "lr = 5.0  "},
        """Make a directory `data` with a file `client-0.jsonl`, `client-1.jsonl`, … for each client and `test.jsonl`.
A line is a JSON object with a text and its class: `{"text": "…", "label": "bank"}`. The classes are named in
`CLASSES`.""",
    ),
    "custom": Kind(
        {"metrics = []": 'metrics = ["mae"]', "lr = 0.5  ": "lr = 0.1  "},
        """Make a directory `data` with a file `client-0.npz`, `client-1.npz`, … for each client and `test.npz`, each
with the arrays `x` and `y`; or let `data(client)` read from wherever your data is.""",
    ),
}


def command(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="Directory of the project; also its Python name.")
    ],
    kind: Annotated[
        Literal["tabular", "images", "text", "custom"],
        typer.Option("--kind", help="What the examples are."),
    ] = "tabular",
) -> None:
    """Write a small project that runs at once."""
    from fedspan.core.errors import SpecError
    from fedspan.core.files import make_dir, write_atomic

    package = name.resolve().name.replace("-", "_")
    if re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", package) is None or keyword.iskeyword(package):
        raise SpecError(
            f"`NAME` must be a Python name in lower case, such as my_model, got {name.name!r}"
        )
    if name.exists() and (not name.is_dir() or any(name.iterdir())):
        raise SpecError(f"{str(name)!r} is not empty; choose another name")
    installed = (
        package in sys.stdlib_module_names
        or getattr(PathFinder.find_spec(package), "origin", None) is not None
    )
    if package in FOLDERS or installed:
        whose = (
            "a folder of the project"
            if package in FOLDERS
            else "an installed package, which it would hide"
        )
        raise SpecError(
            f"`NAME` {name.name!r} is the name of {whose}; choose another, such as my_{package}"
        )
    for place, text in project(package, kind).items():
        make_dir((name / place).parent)
        write_atomic(name / place, text.encode())
    typer.echo(f"{name}: a project of kind {kind}; next:")
    tests = ["python -m pytest"] if PathFinder.find_spec("pytest") else []  # where it is installed
    for line in (f"cd {name}", "fedspan run spec.toml", *tests):
        typer.echo(f"    {line}")


def project(package: str, kind: str) -> dict[str, str]:
    """Path in the project → content."""
    common = TEMPLATES / "common"
    files = {
        str(p.relative_to(common)): p.read_text("utf-8")
        for p in sorted(common.rglob("*"))
        if _is_source(p)
    }
    files[f"{NAME}/task.py"] = (TEMPLATES / f"{kind}.py").read_text("utf-8")
    for old, new in KINDS[kind].spec.items():
        files["spec.toml"] = files["spec.toml"].replace(old, new)
    files["README.md"] = files["README.md"].replace("DATA_SECTION", KINDS[kind].data)
    return {_named(path, package): _named(text, package) for path, text in files.items()}


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _named(text: str, package: str) -> str:
    hyphens = NAME.replace("_", "-")  # names of Flower apps have no underscores
    text = text.replace(hyphens, package.replace("_", "-"))
    return text.replace(NAME, package).replace(NAME.upper(), package.upper())
