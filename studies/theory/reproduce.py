"""The theory on trial: a study whose parts measure claims. specs/NAME.toml holds them all.

Every part is a set of runs with `diagnostics`, so that what the lemmas speak of stands in their histories.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from fedspan.api.spec import FOUND, Spec, with_values
from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import at_least, one_of
from fedspan.engine import history
from fedspan.study.paper_study import SPECS, command, made, prepared
from fedspan.study.pool import Job, execute

Floats = npt.NDArray[np.float64]
Point = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of a part: where it stands in the grid, and its rows over seeds."""

    point: Point
    spec: Spec
    rounds: Floats
    metrics: dict[str, Floats]  # (seeds, rows)

    def mean(self, name: str) -> Floats:
        """A metric's mean over seeds."""
        found: Floats = self.metrics[name].mean(0)
        return found


@dataclass(frozen=True)
class Part:
    """A claim or several that are measured by the same runs."""

    name: str
    title: str
    about: str
    specs: list[tuple[Point, Spec]]

    def jobs(self, runs: Path, seeds: int) -> list[Job]:
        """Its runs for the pool."""
        return [Job(spec, runs / f"{self.name}-{_key(point)}", seeds) for point, spec in self.specs]

    def read(self, runs: Path, seeds: int) -> list[Run]:
        """The same once they are made; a step that was found is filled in."""
        return [_read(point, job) for (point, _), job in zip(self.specs, self.jobs(runs, seeds), strict=True)]


@dataclass(frozen=True)
class Trial:
    """All parts at one scale."""

    name: str
    scale: str
    title: str
    about: str
    seeds: int
    parts: list[Part]

    @staticmethod
    def load(name: str, scale: str | None, seeds: int | None) -> Trial:
        """The study NAME; at the scale `smoke` its runs are a tenth as long."""
        table = tomllib.loads((SPECS / f"{name}.toml").read_text())
        scale = scale or "paper"
        one_of("scale", scale, table["scales"])
        if seeds is not None:
            at_least("seeds", seeds, 1)
        size = table["scales"][scale]
        parts = [_part(part, table["base"], size["divisor"]) for part in table["parts"]]
        return Trial(name, scale, table["title"], table["about"], seeds or size["seeds"], parts)


def _part(table: dict[str, Any], base: dict[str, Any], divisor: int) -> Part:
    specs = []
    for values in itertools.product(*table["grid"].values()):
        point = dict(zip(table["grid"], values, strict=True))
        whole = with_values(base, table.get("set", {}) | point)
        whole["rounds"] = max(20, whole["rounds"] // divisor)
        whole["eval_every"] = max(1, min(whole["eval_every"], whole["rounds"] // 10))
        if "keep" in table:
            method = whole["method"]
            method["server_lr"] = table["keep"] / (method["lr"] * method["local_steps"])
        specs.append((point, Spec.from_table(whole)))
    return Part(table["name"], table["title"], table["about"], specs)


def _key(point: Point) -> str:
    return "-".join(f"{key.rpartition('.')[2]}{value}" for key, value in point.items())


def _read(point: Point, job: Job) -> Run:
    found = [history.read(path)[1] for path in job.histories()]
    rows = min(len(one) for one in found)
    names = [name for name in found[0][0] if name not in history.PLAIN]
    spec = job.spec
    if spec.lr_from is not None:
        values = json.loads((job.folder / FOUND).read_text())["values"]
        spec = dataclasses.replace(spec, method=dataclasses.replace(spec.method, **values), lr_from=None)  # type: ignore[type-var]
    metrics = {name: np.array([[row[name] for row in one[:rows]] for one in found], float) for name in names}
    return Run(point, spec, np.array([row["round"] for row in found[0][:rows]], float), metrics)


def reproduce(study: Trial, out: Path, *, jobs: int, again: bool, console: Console) -> None:
    """Make the runs, judge the claims, and write table, figures and page. Runs that are complete are kept."""
    runs = prepared(out / f"runs-{study.scale}", jobs, again)
    from fedspan.study import page
    from fedspan.study import paper_trial_figures as trial_figures
    from fedspan.study.paper_claims import JUDGES, Claim

    began = time.monotonic()
    execute([job for part in study.parts for job in part.jobs(runs, study.seeds)], jobs, console, "runs")
    minutes = (time.monotonic() - began) / 60

    sections, claims = [], list[Claim]()
    for part in study.parts:
        found = part.read(runs, study.seeds)
        judged = JUDGES[part.name](found)
        claims += judged
        drawing = trial_figures.draw(part.name, found, made(out / "figures") / part.name)
        grid = page.Grid(list(HEADER), [one.cells() for one in judged])
        sections.append(page.Section(part.title, part.about, [grid], [] if drawing is None else [drawing]))
    write_atomic(out / "tables.md", _markdown(study, claims).encode())
    line = command(study.name, out, jobs=jobs, seeds=study.seeds, scale=study.scale)
    missed = [f"{one.text}: predicted {one.predicted}, observed {one.observed}" for one in claims if not one.holds]
    cost = f"{_seconds(study, runs) / 60:.1f} core-minutes of rounds."
    text = page.render(study.title, [study.about], missed, sections, line, cost)
    write_atomic(out / "index.html", text.encode())
    shown = Table(*HEADER, title=study.title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for one in claims:
        shown.add_row(*one.cells())
    console.print(shown)
    console.print(f"{minutes:.1f} minutes. The page: {out / 'index.html'}", highlight=False)


HEADER = ("claim", "predicted", "observed", "holds")


def _seconds(study: Trial, runs: Path) -> float:
    """What the rounds took; the seeds of a run share one clock."""
    jobs = [job for part in study.parts for job in part.jobs(runs, study.seeds)]
    return sum(float(history.read(job.histories()[0])[1][-1]["seconds"]) for job in jobs)


def _markdown(study: Trial, claims: list[Any]) -> str:
    lines = [f"# {study.title}", "", f"{study.about} {study.seeds} seeds, scale `{study.scale}`.", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(one.cells()) + " |" for one in claims)]) + "\n"
