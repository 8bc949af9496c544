"""The API reference: pages made from the package's own lists of public names, and a check that each name is described.

Names come from the packages' `__init__.py` and from the registry, so a new choice is in the reference without further
work. Descriptions come from docstrings and from the comments of fields, as in `fedspan list NAME`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any

import click
from typer.main import get_command

from fedspan.cli import app as command_line
from fedspan.cli._fields import settings
from fedspan.core import registry
from fedspan.core.namespace import listed

ROOT = "fedspan"
# Page of the package's own names → title, and where they are defined in the order in which they are shown.
GROUPS = {
    "running": (
        "Running",
        ("api.fit", "api.run", "study", "engine", "costs", "api", "core.errors"),
    ),
    "settings": ("Settings of a run", ("core.config", "core.privacy", "core.spec")),
    "huggingface": ("Hugging Face adapters", ("huggingface",)),
    "extending": ("Writing your own", ("",)),  # everything else
}


def namespaces() -> list[str]:
    """The packages that hold choices, such as `fedspan.methods`."""
    return [f"{ROOT}.{name}" for name, module in listed(ROOT).items() if module == ROOT]


def public(package: str) -> list[str]:
    """The public names of a package, in the order in which its source lists them; subpackages are left out."""
    return [f"{package}.{name}" for name, module in listed(package).items() if module != package]


def value(name: str) -> Any:
    """What a public name stands for."""
    package, _, last = name.rpartition(".")
    return getattr(importlib.import_module(package), last)


def is_choice(found: Any) -> bool:
    """Whether a spec can name it."""
    return isinstance(found, type) and any(
        found in registry.choices(kind).values() for kind in registry.KINDS
    )


def pages() -> dict[str, str]:
    """Path of a page → its Markdown, the overview first."""
    named = {
        f"reference/{page}.md": (title, "", names) for page, (title, names) in grouped().items()
    }
    for package in namespaces():
        title = package.removeprefix(f"{ROOT}.")
        about = inspect.getdoc(importlib.import_module(package)) or ""
        named[f"reference/{title}.md"] = (title.capitalize(), about, public(package))
    tasks = [f"{cls.__module__}.{cls.__qualname__}" for cls in registry.choices("task").values()]
    about = "The table `[task]` of a spec has the `name` of a task and its settings. `fit` uses the task `custom`."
    named["reference/tasks.md"] = ("Tasks", about, tasks)
    made = {
        page: f"# {title}\n\n{about}\n\n{''.join(map(entry, names))}"
        for page, (title, about, names) in named.items()
    }
    return {"reference/index.md": overview(named), **made, "reference/command-line.md": commands()}


def grouped() -> dict[str, tuple[str, list[str]]]:
    """Page → its title and its names, of the names that are in no namespace."""
    found: dict[str, tuple[str, list[str]]] = {
        page: (title, []) for page, (title, _) in GROUPS.items()
    }
    modules = listed(ROOT)
    order = [(page, f"{ROOT}.{place}") for page, (_, places) in GROUPS.items() for place in places]
    where = {
        name: next(o for o in order if modules[name.rpartition(".")[2]].startswith(o[1]))
        for name in public(ROOT)
    }
    for name in sorted(where, key=lambda name: order.index(where[name])):
        found[where[name][0]][1].append(name)
    return found


def overview(named: dict[str, tuple[str, str, list[str]]]) -> str:
    """The first page: every name with one line."""
    text = [
        "# API reference",
        "",
        "Names are imported as shown, such as `from fedspan.methods import SSF`.",
        "",
    ]
    for page, (title, _, names) in named.items():
        text += [
            f"## [{title}]({page.removeprefix('reference/')})",
            "",
            "| name | description |",
            "|---|---|",
        ]
        text += [f"| [`{name}`][{name}] | {summary(name)} |" for name in names] + [""]
    return "\n".join([*text, "## [Command line](command-line.md)", ""])


def summary(name: str) -> str:
    """One line on a public name."""
    found = value(name)
    text = (
        registry.summary(found)
        if is_choice(found)
        else " ".join(docstring(name).split("\n\n")[0].split())
    )
    return text.replace("|", "\\|")


def entry(name: str) -> str:
    """The section of a name, which mkdocstrings fills; a choice shows its settings, not its functions."""
    found = value(name)
    if not is_choice(found):
        return f"::: {name}\n\n"
    spec_name = found.__module__.rpartition(".")[2]
    options = "{ show_root_heading: false, show_root_toc_entry: false, members: [] }"
    title = f'## {name.rpartition(".")[2]} {{ #{name} }}\n\n`name = "{spec_name}"`'
    return f"{title}\n\n::: {name}\n    options: {options}\n\n"


def commands() -> str:
    """The page of the command line, from its own help texts."""
    text = ["# Command line", "", "`fedspan COMMAND --help` prints the same.", ""]
    for name, command in sorted(get_command(command_line.app).commands.items()):  # type: ignore[attr-defined]
        text += [
            f"## fedspan {name}",
            "",
            inspect.cleandoc(command.help or ""),
            "",
            "| argument | meaning |",
            "|---|---|",
        ]
        context = click.Context(command)
        for words, meaning in filter(
            None, (one.get_help_record(context) for one in command.params)
        ):
            text.append(f"| `{words}` | {meaning.replace('|', chr(92) + '|')} |")
        text.append("")
    return "\n".join(text)


def docstring(name: str) -> str:
    """The docstring of a public name; that of a plain value, such as a type alias, stands below its assignment."""
    package, _, last = name.rpartition(".")
    module = importlib.import_module(listed(package).get(last, package))
    found = value(name)
    if getattr(found, "__module__", None) == module.__name__:
        return inspect.getdoc(found) or ""
    body = ast.parse(inspect.getsource(module)).body
    for one, below in itertools.pairwise(body):
        if (
            isinstance(one, ast.Assign)
            and last in map(ast.unparse, one.targets)
            and isinstance(below, ast.Expr)
        ):
            return str(ast.literal_eval(below.value))
    return ""


def problems() -> Iterator[str]:
    """What the reference lacks: names without docstring, and arguments, fields and functions that are not described."""
    text = "\n".join(pages().values())
    for name in (name for package in (ROOT, *namespaces()) for name in public(package)):
        found, words = value(name), docstring(name)
        if f"::: {name}\n" not in text:
            yield f"{name} is not in the reference"
        if not words:
            yield f"{name} has no docstring"
        if inspect.isfunction(found):
            yield from _undescribed(name, found)
        elif isinstance(found, type) and found.__module__.startswith(ROOT):
            fields = [
                row[0]
                for row in settings(found)
                if not row[3] and not re.search(rf"^    {row[0]}: ", words, re.M)
            ]
            yield from (f"{name}: the field `{field}` has no description" for field in fields)
            own = {
                key: member
                for key, member in vars(found).items()
                if key[0] != "_" and inspect.isfunction(member)
            }
            yield from (
                f"{name}.{key} has no docstring"
                for key, one in own.items()
                if not inspect.getdoc(getattr(found, key))
            )


def _undescribed(name: str, function: Any) -> Iterator[str]:
    words = inspect.getdoc(function) or ""
    for one in inspect.signature(function).parameters:
        if not re.search(rf"^    (?:\w+, )*\*{{0,2}}{one}(?:, \w+)*: ", words, re.M):
            yield f"{name}: the argument `{one}` has no entry in `Args:`"
    if (
        typing.get_type_hints(function).get("return", type(None)) is not type(None)
        and "\nReturns:\n" not in words
    ):
        yield f"{name} does not say what it returns"
