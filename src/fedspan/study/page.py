"""The self-contained HTML page of a report: text, charts, tables, and the command that made it.

web/page.html is the template, into which page.css and the scripts are put; nothing is loaded from elsewhere. Charts are
plain data, which web/chart.js draws: every metric against every cost, a group of lines per row of a part. Client memory
does not grow with the rounds, so against memory every series is one mark: its result.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tomli_w
from markupsafe import Markup, escape

from fedspan.core.method import DETAILS
from fedspan.engine.history import higher_is_better
from fedspan.study.curves import AXES, BYTES, Floats, over_seeds, rounded
from fedspan.study.model import Part
from fedspan.study.report import Report, Section
from fedspan.study.results import Entries, Entry, by_row
from fedspan.study.tables import MEMORY, MEMORY_NOTE, scale_of, titled, unit_of
from fedspan.study.tuning import by_seed

WEB = Path(__file__).parent / "web"
# In the order of their definitions.
SCRIPTS = ("dom", "drawing", "reading", "download", "hours", "chart", "tables", "page")
FEWER = 70  # rows on each axis of a line, where a part has several rows


def render(report: Report) -> str:
    """Return a report as a page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["coded"] = coded
    return environment.from_string((WEB / "page.html").read_text("utf-8")).render(
        report=report,
        charts=charts,
        specs=specs,
        drawing=drawing,
        style=_own("page.css"),
        script=Markup("\n").join(_own(f"{name}.js") for name in SCRIPTS),
    )


def coded(text: str) -> Markup:
    """Return text in which words between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped just here)


def _own(name: str) -> Markup:
    return Markup((WEB / name).read_text("utf-8"))  # noqa: S704 (our own file)


def drawing(path: Path) -> Markup:
    """Return a figure of matplotlib in the page's own ink and on its own paper, which a theme may change."""
    text = path.read_text("utf-8").replace("#000000", "currentColor")
    text = text.replace("fill: #ffffff", "fill: none")
    return Markup(f"<svg{text.partition('<svg')[2]}")  # noqa: S704 (our own file)


def specs(section: Section) -> list[tuple[str, str]]:
    """Return the spec of every series, without the seed, as TOML."""
    found = []
    for entry in section.entries:
        if entry.row == 0:
            plain = {key: value for key, value in entry.series.spec.items() if key != "seed"}
            found.append((entry.label, tomli_w.dumps(plain)))
    return found


def charts(section: Section) -> list[tuple[str, str, Markup]]:
    """Return (kind, name, data) of the charts of a section."""
    if section.part is None:
        return []
    found = [("", section.title, chart(section.part, section.entries))]
    if memory := by_memory(section.part, section.entries):
        found.append((" marks", f"{section.title}, by client memory", memory))
    made = []
    for kind, name, data in found:  # no text can end the script element
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
        made.append((kind, name, Markup(text)))  # noqa: S704
    return made


def chart(part: Part, entries: Entries) -> dict[str, Any]:
    """Return everything that can be switched between. It starts with the part's metric against uplink or the budget.

    A part with several rows shows its own metric only, and fewer points of each line, which keeps the page small. What
    a tested correction found is drawn below every metric.
    """
    several = len(part.rows) > 1
    metrics = {}
    for name in dict.fromkeys(
        [part.metric, *(key for one in entries for key in one.series.metrics)]
    ):
        if name == part.metric or not several or name in DETAILS:
            goal = "min" if higher_is_better(name, part.metrics) is False else "max"
            goal = part.goal if name == part.metric else goal
            metrics[name] = {"label": titled(name), "goal": goal, "log": goal == "min"}
    unit, size = unit_of(entries)
    linked = all(None not in work_of(one) for one in entries)
    scales = {
        axis: size if axis in BYTES else 1.0
        for axis in AXES
        if all(np.isfinite(one.series.spent[axis]).all() for one in entries)
    }
    budget = part.budget.limits if part.budget else {}
    limits = {axis: most / scales[axis] for axis, most in budget.items()}
    lines = []
    for _, here in by_row(part, entries):
        for n, entry in enumerate(here):
            one = entry.series.thin(FEWER) if several else entry.series
            gone = [  # seeds that diverged or failed, in words
                f"seed {seed} {'failed' if failed else f'diverged at round {t}'}"
                for seed, t, failed in zip(one.seeds, one.diverged, one.failed, strict=True)
                if failed or t is not None
            ]
            line = {
                "name": one.label,
                "color": one.color,
                "seeds": len(one.seeds),
                "gone": gone,
                "x": {axis: rounded(one.spent[axis] / size) for axis, size in scales.items()},
                "y": {name: _drawn(name, v) for name, v in one.metrics.items() if name in metrics},
                "row": entry.row,
                # each line has a marker; a dash tells lines of one color apart
                "dash": [other.series.color for other in here[:n]].count(one.color),
                "marker": n,
            }
            if linked:
                line |= zip(("cohort", "steps"), work_of(entry), strict=True)
            lines.append(line)
    axes = [axis for axis in AXES if axis in scales or (linked and axis == "hours")]
    return {
        "axes": {a: {"label": AXES[a].format(unit), "log": a in BYTES} for a in axes},
        "bytes": size,
        "metrics": metrics,
        "start": {"x": next(iter(limits), "up"), "y": part.metric},
        "limits": limits,
        "rows": [row.label for row in part.rows] if several else [],
        "series": lines,
    }


def _drawn(metric: str, values: Floats) -> dict[str, Any]:
    """Return mean, lowest and highest over seeds, and the number of the first rows that every seed has."""
    names = ("mean", "low", "high") if len(values) > 1 else ("mean",)
    over = over_seeds(scale_of(metric) * values)
    found: dict[str, Any] = {key: rounded(row) for key, row in zip(names, over, strict=False)}
    return found | {"whole": int(np.isfinite(values).all(0).cumprod().sum())}


def work_of(entry: Entry) -> tuple[int | None, int | None]:
    """Return the clients of a round and their local steps, as a run has recorded them or its spec has them."""
    spec, method = entry.series.spec, entry.series.spec.get("method", {})
    steps = None if "epochs" in spec else method.get("local_steps")
    cohort = entry.clients_per_round or spec.get("clients_per_round")
    return cohort, entry.local_steps or steps


def by_memory(part: Part, entries: Entries) -> dict[str, Any] | None:
    """Return every metric against client memory, one mark per series; None if no memory is known."""
    known = [entry for entry in entries if entry.client_memory is not None]
    if not known:
        return None
    drawn = chart(part, known)
    for line, entry in zip(drawn["series"], known, strict=True):
        line["x"] = {"memory": rounded([(entry.client_memory or 0) / 1e6])}
        for name in line["y"]:  # the results of the seeds, as a curve of one row
            ends = by_seed(part, entry.series.curve(name))
            line["y"][name] = _drawn(name, np.array(ends)[:, None])
    return drawn | {
        "axes": {"memory": {"label": MEMORY, "log": False}},
        "start": {"x": "memory", "y": part.metric},
        "limits": {},
        "about": MEMORY_NOTE.replace("`", ""),
    }
