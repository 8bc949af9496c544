"""One self-contained HTML page of sections: words, tables and figures, with the command that made it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from fedspan.runtimes.folder import versions

TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Cell:
    """An entry of a table; `small` stands below it, `mark` colours that."""

    main: str
    small: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Grid:
    """A table; with a `title` it is folded away."""

    header: list[str]
    rows: Sequence[Sequence[Cell | str]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    about: str
    grids: list[Grid] = field(default_factory=list)
    figures: list[Path] = field(default_factory=list)  # SVG files
    notes: list[str] = field(default_factory=list)


def render(
    title: str,
    lead: Sequence[str | Markup],
    missed: Sequence[str],
    sections: Sequence[Section],
    command: str,
    cost: str,
) -> str:
    """The page as text; figures are put in as SVG."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text()).render(
        title=title,
        lead=lead,
        missed=missed,
        sections=[_section(one) for one in sections],
        command=command,
        footer=f"{cost} {', '.join(f'{k} {v}' for k, v in versions().items())}",
    )


def coded(text: str) -> Markup:
    """`words` as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped just here)


def _section(section: Section) -> dict[str, object]:
    drawings = [f"<svg{path.read_text().partition('<svg')[2]}" for path in section.figures]
    grids = [
        {
            "header": g.header,
            "title": g.title,
            "rows": [[Cell(c) if isinstance(c, str) else c for c in r] for r in g.rows],
        }
        for g in section.grids
    ]
    notes = [coded(note) for note in section.notes]
    return {"title": section.title, "about": coded(section.about), "grids": grids, "drawings": drawings, "notes": notes}
