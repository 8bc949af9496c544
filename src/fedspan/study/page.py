"""The one page of fedspan: sections of words, charts, tables and figures, and the command that made it.

page.html is the frame, page.css and page.js are put into it; nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from fedspan.engine.run_dir import versions

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Cell:
    """An entry of a table; `small` stands below it, `mark` colors that."""

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
    chart: dict[str, Any] | None = None  # as compare/chart.py makes it
    specs: list[tuple[str, str]] = field(default_factory=list)  # label, TOML
    memory: dict[str, Any] | None = None  # a chart of marks, likewise


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
    return environment.from_string((HERE / "page.html").read_text()).render(
        title=title,
        lead=lead,
        missed=missed,
        sections=[_section(one) for one in sections],
        command=command,
        footer=f"{cost} {', '.join(f'{k} {v}' for k, v in versions().items())}".strip(),
        style=_own("page.css"),
        script=_own("page.js"),
    )


def coded(text: str) -> Markup:
    """`words` as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped just here)


def _own(name: str) -> Markup:
    return Markup((HERE / name).read_text())  # noqa: S704 (our own file)


def _section(section: Section) -> dict[str, object]:
    drawings = [Markup(f"<svg{path.read_text().partition('<svg')[2]}") for path in section.figures]  # noqa: S704 (ours)
    grids = [
        {
            "header": g.header,
            "title": g.title,
            "rows": [[Cell(c) if isinstance(c, str) else c for c in r] for r in g.rows],
        }
        for g in section.grids
    ]
    notes = [coded(note) for note in section.notes]
    return {
        "title": section.title,
        "about": coded(section.about),
        "grids": grids,
        "drawings": drawings,
        "notes": notes,
        "charts": [
            (kind, f"{section.title}{words}", _data(drawn))
            for kind, words, drawn in (("", "", section.chart), (" marks", ", by client memory", section.memory))
            if drawn is not None
        ],
        "specs": section.specs,
    }


def _data(value: dict[str, Any]) -> Markup:
    """JSON that no text in it can lead out of its script element."""
    return Markup(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))  # noqa: S704
