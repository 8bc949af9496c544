"""The self-contained HTML page of a report: text, charts, tables, and the command that made it.

web/page.html is the template, into which page.css and the scripts are put; nothing is loaded from elsewhere. Charts are
plain data, which web/chart.js draws: every metric against every cost, a group of lines per row of a part. Client memory
does not grow with the rounds, so against memory every series is one mark: its result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tomli_w
from markupsafe import Markup, escape

from fedspan.core.method import DETAILS
from fedspan.engine.history import higher_is_better
from fedspan.study.curves import BYTES, TITLES, Axis, Curve, Series, over_seeds, rounded
from fedspan.study.model import Part
from fedspan.study.report import Report, Section
from fedspan.study.results import Entry
from fedspan.study.tables import (
    MEMORY,
    MEMORY_NOTE,
    TextCell,
    TextTable,
    best_first,
    scale_of,
    titled,
    unit_of,
)

WEB = Path(__file__).parent / "web"
# In the order of their definitions.
SCRIPTS = ("dom", "drawing", "reading", "download", "chart", "tables", "page")
FEWER = 70  # rows on each axis of a line, where a part has several rows
DIGITS: dict[Axis, int] = {"seconds": 4, "up": 5, "total": 5}


def render(report: Report, live: str = "") -> str:
    """A report as a page; `live` is the stamp of a page that follows a run."""
    sections = [_section(one) for one in report.sections]
    about = report.title, [report.lead], sections, report.command, report.footer, report.missed
    return template(*about, verdict=report.told, live=live)


def template(
    title: str,
    lead: Sequence[str],
    sections: Sequence[Mapping[str, Any]],
    command: str,
    footer: str,
    missed: Sequence[str] = (),
    *,
    verdict: Sequence[str] = (),
    live: str = "",
) -> str:
    """A page of sections, each with a title, about, notes, charts, tables, drawings (SVG files) and specs."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    complete = []
    for section in sections:
        one: dict[str, Any] = {"drawings": [], "specs": [], "charts": [], "tables": [], "notes": []}
        one |= {"verdict": []} | dict(section)
        one["about"] = coded(one["about"])
        one |= {key: [coded(text) for text in one[key]] for key in ("verdict", "notes")}
        one["charts"] = [(kind, name, _data(drawn)) for kind, name, drawn in one["charts"]]
        one["drawings"] = [_drawing(path) for path in one["drawings"]]
        one["tables"] = [_celled(table) for table in one["tables"]]
        complete.append(one)
    return environment.from_string((WEB / "page.html").read_text("utf-8")).render(
        title=title,
        verdict=[coded(text) for text in verdict],
        lead=[coded(text) for text in lead],
        missed=missed,
        sections=complete,
        command=command,
        footer=footer,
        live=live,
        style=_own("page.css"),
        script=Markup("\n").join(_own(f"{name}.js") for name in SCRIPTS),
    )


def coded(text: str) -> Markup:
    """Text in which words between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped just here)


def _own(name: str) -> Markup:
    return Markup((WEB / name).read_text("utf-8"))  # noqa: S704 (our own file)


def _drawing(path: Path) -> Markup:
    """A figure of matplotlib in the page's own ink and on its own paper, which a theme may change."""
    text = path.read_text("utf-8").replace("#000000", "currentColor")
    text = text.replace("fill: #ffffff", "fill: none")
    return Markup(f"<svg{text.partition('<svg')[2]}")  # noqa: S704 (our own file)


def _celled(table: TextTable) -> TextTable:
    rows = [[TextCell(c) if isinstance(c, str) else c for c in row] for row in table.rows]
    return TextTable(table.header, [[*row] for row in rows], table.title)


def _data(value: dict[str, Any]) -> Markup:
    """JSON in which no text can end the script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704


def _section(section: Section) -> dict[str, Any]:
    part, entries = section.part, section.entries
    charts = [("", section.title, chart(part, entries))]
    memory = by_memory(part, entries)
    charts += [] if memory is None else [(" marks", f"{section.title}, by client memory", memory)]
    specs = []
    for entry in entries:
        if entry.row == 0:
            plain = {k: v for k, v in entry.series.spec.items() if k != "seed"}
            specs.append((entry.series.label, tomli_w.dumps(plain)))
    words = {name: getattr(section, name) for name in ("title", "about", "verdict", "notes")}
    return words | {"tables": section.tables, "charts": charts, "specs": specs}


# ---- charts


def chart(part: Part, entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything that can be switched between. It starts with the part's metric against uplink or the budget's axis.

    A part with several rows shows its own metric only, and fewer points of each line, which keeps the page small. What
    a tested correction found is drawn below every metric.
    """
    several = len(part.rows) > 1
    known = [part.metric, *(name for one in entries for name in one.series.metrics)]
    metrics = [
        name for name in dict.fromkeys(known) if not several or name in (part.metric, *DETAILS)
    ]
    goals = {n: "min" if higher_is_better(n, part.metrics) is False else "max" for n in metrics}
    goals[part.metric] = part.goal
    unit, size = unit_of(part, entries)
    timed = any(np.isfinite(one.series.curve(part.metric).seconds).any() for one in entries)
    axes = [axis for axis in TITLES if axis != "seconds" or timed]
    scales = {axis: size if axis in BYTES else 1.0 for axis in axes}
    budget = {} if part.budget is None else part.budget.limits
    limits = {axis: most / scales[axis] for axis, most in budget.items()}
    first = next((x for x in part.figure.get("x", []) if x in TITLES), next(iter(limits), "up"))
    lines = []
    for row in range(
        len(part.rows)
    ):  # each line has a marker; a dash tells lines of one color apart
        series = [entry.series for entry in entries if entry.row == row]
        series = [one.thin(FEWER) for one in series] if several else series
        best = best_first(part, series)
        colors = [series[n].color for n in best]
        dashes = {n: colors[:place].count(colors[place]) for place, n in enumerate(best)}
        for n, one in enumerate(series):
            drawn = _line(one, metrics, scales)
            lines.append(drawn | {"row": row, "dash": dashes[n], "marker": n})
    return {
        "axes": {axis: {"label": TITLES[axis].format(unit), "log": axis in BYTES} for axis in axes},
        "metrics": {
            n: {"label": titled(n), "goal": goals[n], "log": goals[n] == "min"} for n in metrics
        },
        "start": {"x": first, "y": part.metric},
        "limits": limits,
        "rows": [row.label for row in part.rows] if several else [],
        "series": lines,
    }


def by_memory(part: Part, entries: Sequence[Entry]) -> dict[str, Any] | None:
    """Every metric against client memory, one mark per series; None if no memory is known."""
    known = [entry for entry in entries if entry.client_memory is not None]
    if not known:
        return None
    drawn = chart(part, known)
    for line, entry in zip(drawn["series"], known, strict=True):
        line["x"] = {"memory": rounded(np.array([(entry.client_memory or 0) / 1e6]))}
        for name in line["y"]:  # the result of the seeds that are alive, as a curve of one row
            curve = part.inside(entry.series.curve(name))
            ends = curve.ends(part.last(len(curve.rounds)))
            values = over_seeds(scale_of(name) * ends[:, None])
            mark = dict(zip(("mean", "low", "high"), map(rounded, values), strict=True))
            line["y"][name] = mark | {"whole": int(len(ends) == len(curve.values))}
    return drawn | {
        "axes": {"memory": {"label": MEMORY, "log": False}},
        "start": {"x": "memory", "y": part.metric},
        "limits": {},
        "about": MEMORY_NOTE.replace("`", ""),
    }


def _line(one: Series, metrics: Sequence[str], scales: Mapping[Axis, float]) -> dict[str, Any]:
    known = {name: one.curve(name) for name in metrics if name in one.metrics}
    some = next(iter(known.values()), one.curve(metrics[0]))
    gone = []  # seeds that diverged or failed, in words
    for seed, t, failed in zip(one.seeds, some.diverged, some.failed, strict=True):
        if failed or t is not None:
            gone.append(f"seed {seed} {'failed' if failed else f'diverged at round {t}'}")
    return {
        "name": one.label,
        "color": one.color,
        "seeds": len(one.seeds),
        "gone": gone,
        "x": {axis: _costs(some, axis, scale) for axis, scale in scales.items()},
        "y": {name: _values(curve, scale_of(name)) for name, curve in known.items()},
    }


def _costs(curve: Curve, axis: Axis, scale: float) -> list[float | int | None] | float:
    """What was spent up to each row; one number, the cost of a round, if every round costs the same."""
    costs, rounds = curve.spent(axis) / scale, curve.rounds
    each = float(f"{costs[-1] / rounds[-1]:.9g}") if rounds[-1] else 0.0
    even = axis in BYTES and np.allclose(each * rounds, costs, rtol=2e-7, atol=0)
    return each if even else rounded(costs, DIGITS.get(axis, 6))


def _values(curve: Curve, scale: float) -> dict[str, Any]:
    """Mean, lowest and highest of the seeds that have a row, and how many rows all of them have."""
    missing = np.flatnonzero(~np.isfinite(curve.values).all(0))
    mean, low, high = over_seeds(scale * curve.values)
    found: dict[str, Any] = {"mean": rounded(mean, 5)}
    if len(curve.values) > 1:  # of one seed these are the mean
        found |= {"low": rounded(low, 4), "high": rounded(high, 4)}
    return found | {"whole": int(missing[0]) if len(missing) else len(curve.rounds)}
