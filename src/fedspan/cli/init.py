"""`fedspan init`: a small project that runs at once, to be filled with data of your own."""

import keyword
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Literal

import typer

TEMPLATES = Path(__file__).parent / "templates"
NAME = "my_project"  # what the templates call the project
FOLDERS = ("tests", "data", "out", "runs")  # of a project, besides its package


def command(
    name: Annotated[Path, typer.Argument(metavar="NAME")],
    kind: Literal["tabular", "custom"] = "tabular",
) -> None:
    """Write a small project that runs at once.

    Args:
        name: Directory of the project; also its Python name.
        kind: tabular: a table for each client; custom: a model and data in Python.
    """
    from fedspan.core.errors import SpecError
    from fedspan.core.files import make_dir, write_atomic

    package = name.resolve().name.replace("-", "_")
    if re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", package) is None or keyword.iskeyword(package):
        raise SpecError(
            f"`NAME` must be a Python name in lower case, such as my_model, got {name.name!r}"
        )
    if name.exists() and (not name.is_dir() or any(name.iterdir())):
        raise SpecError(f"{str(name)!r} is not empty; choose another name")
    whose = ""
    if package in FOLDERS:
        whose = "a folder of the project"
    elif package in sys.stdlib_module_names or getattr(
        PathFinder.find_spec(package), "origin", None
    ):
        whose = "an installed package, which it would hide"
    if whose:
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
    """Return the files of a project: path in it → content."""
    files = dict[str, str]()
    for folder in (TEMPLATES / "common", TEMPLATES / kind):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                files[path.relative_to(folder).as_posix()] = path.read_text("utf-8")

    def named(text: str) -> str:
        hyphens = NAME.replace("_", "-")  # names of Flower apps have no underscores
        text = text.replace(hyphens, package.replace("_", "-"))
        return text.replace(NAME, package).replace(NAME.upper(), package.upper())

    return {named(path): named(text) for path, text in files.items()}
