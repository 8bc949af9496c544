"""The experiments of theory.toml as specs, jobs and measured runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import at_least, one_of
from fedspan.core.spec import Spec, with_values
from fedspan.engine import history
from fedspan.engine.history import PLAIN
from fedspan.engine.provenance import LR
from fedspan.study.jobs import Job

Floats = npt.NDArray[np.float64]
Point = dict[str, Any]
FILE = Path(__file__).with_name("theory.toml")


@dataclass(frozen=True)
class Run:
    """One run of an experiment: its point of the grid, and its rows over seeds."""

    point: Point
    spec: Spec
    rounds: Floats
    metrics: dict[str, Floats]  # (seeds, rows)

    def mean(self, name: str) -> Floats:
        """A metric's mean over seeds."""
        found: Floats = self.metrics[name].mean(0)
        return found


@dataclass(frozen=True)
class Experiment:
    """Runs that measure one claim or several."""

    name: str
    title: str
    about: str
    specs: list[tuple[Point, Spec]]

    def jobs(self, runs: Path, seeds: int) -> list[Job]:
        """Its runs as jobs."""
        return [Job(spec, runs / f"{self.name}-{_key(point)}", seeds) for point, spec in self.specs]

    def read(self, runs: Path, seeds: int) -> list[Run]:
        """Its runs once they are complete; a step size that was found is filled in."""
        return [
            _read(point, job)
            for (point, _), job in zip(self.specs, self.jobs(runs, seeds), strict=True)
        ]


@dataclass(frozen=True)
class Trial:
    """All experiments at one scale."""

    scale: str
    title: str
    about: str
    seeds: int
    experiments: list[Experiment]


def load(scale: str = "paper", seeds: int | None = None) -> Trial:
    """The trial at a scale; runs of the scale `smoke` are a tenth as long."""
    table = tomllib.loads(FILE.read_text("utf-8"))
    one_of("scale", scale, table["scales"])
    if seeds is not None:
        at_least("seeds", seeds, 1)
    size = table["scales"][scale]
    experiments = [_experiment(one, table["base"], size["divisor"]) for one in table["experiments"]]
    return Trial(scale, table["title"], table["about"], seeds or size["seeds"], experiments)


def _experiment(table: dict[str, Any], base: dict[str, Any], divisor: int) -> Experiment:
    specs = []
    for values in itertools.product(*table["grid"].values()):
        point = dict(zip(table["grid"], values, strict=True))
        whole = with_values(base, table.get("set", {}) | point)
        whole["rounds"] = max(20, whole["rounds"] // divisor)
        whole["eval_every"] = max(1, min(whole["eval_every"], whole["rounds"] // 10))
        if "keep" in table:
            method = whole["method"]
            method["server"] = {"lr": table["keep"] / (method["lr"] * method["local_steps"])}
        if whole["method"]["name"] == "subavg":
            del whole["method"]["drift"]
        specs.append((point, Spec.from_table(whole)))
    return Experiment(table["name"], table["title"], table["about"], specs)


def _key(point: Point) -> str:
    return "-".join(f"{key.rpartition('.')[2]}{value}" for key, value in point.items())


def _read(point: Point, job: Job) -> Run:
    found = [history.read(path)[1] for path in job.histories()]
    rows = min(len(one) for one in found)
    names = [name for name in found[0][0] if name not in PLAIN]
    spec = job.spec
    if isinstance(spec.method.lr, str):
        values = json.loads((job.run_dir / LR).read_text("utf-8"))["values"]
        own: Any = spec.method
        server = dataclasses.replace(own.server, lr=values["server_lr"])
        own = dataclasses.replace(own, lr=values["lr"], server=server)
        spec = dataclasses.replace(spec, method=own)
    metrics = {
        name: np.array([[row[name] for row in one[:rows]] for one in found], float)
        for name in names
    }
    return Run(point, spec, np.array([row["round"] for row in found[0][:rows]], float), metrics)
