"""A series: one spec under one or several seeds, read from histories. One line of a chart, one row of a table.

`find` collects series from any directories that hold runs and names each by what sets it apart from the others.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedspan.core.errors import CheckpointError, SpecError
from fedspan.core.spec import flat
from fedspan.engine import history
from fedspan.engine.loop import Line
from fedspan.engine.provenance import OUTCOME, check_run
from fedspan.study.curves import POINTS, Curve, Floats, metrics_of, thinned
from fedspan.study.jobs import identity_of
from fedspan.study.model import Table, setting

Run = tuple[Table, tuple[Line, ...]]  # resolved spec and rows
COSTS = ("rounds", "up", "down", "seconds")


@dataclass(frozen=True, eq=False)
class Series:
    """Curves of every metric; if all seeds failed, there is one empty curve without a name."""

    label: str
    color: str  # empty: chosen when it is drawn
    spec: Table  # resolved
    seeds: tuple[int, ...]
    curves: dict[str, Curve]
    unfinished: dict[int, int] = field(default_factory=dict)  # seed → round, if it can go on

    @staticmethod
    def of(
        label: str, color: str, spec: Table, seeds: Sequence[int], runs: Sequence[Sequence[Line]]
    ) -> Series:
        """From the rows of every seed; a seed that failed has none."""
        known = [metrics_of(rows) for rows in runs if rows]
        metrics = (
            [name for name in known[0] if all(name in one for one in known)] if known else [""]
        )
        lasts = {seed: rows[-1] for seed, rows in zip(seeds, runs, strict=True) if rows}
        far = {s: last["round"] for s, last in lasts.items() if not last.get("diverged")}
        curves = {metric: Curve.of(runs, metric) for metric in metrics}
        common = min(
            (lasts[seeds[n]]["round"] for n in next(iter(curves.values())).alive()), default=None
        )
        if common is not None:
            curves = {name: curve.until(common) for name, curve in curves.items()}
        unfinished = {seed: t for seed, t in far.items() if t < spec["rounds"]}
        return Series(label, color, spec, tuple(seeds), curves, unfinished)

    @property
    def metrics(self) -> list[str]:
        return [name for name in self.curves if name]

    def curve(self, metric: str) -> Curve:
        """The curve of a metric, as far as all seeds are that are still alive."""
        found = self.curves.get(metric, self.curves.get(""))
        if found is None:
            raise SpecError(
                f"{self.label!r} has no metric {metric!r}; it has {', '.join(self.curves)}"
            )
        return found

    def thin(self, points: int = POINTS) -> Series:
        """The series with as many rows as a chart can show."""
        keep = thinned(len(self.curve(next(iter(self.curves))).rounds), points)
        return replace(
            self, curves={name: curve.at_rows(keep) for name, curve in self.curves.items()}
        )

    def to_json(self) -> Table:
        """Plain values, rounded to six digits; label and color are kept elsewhere."""
        one = next(iter(self.curves.values()))
        costs = {name: rounded(getattr(one, name)) for name in COSTS}
        values = {
            name: [rounded(seed) for seed in curve.values] for name, curve in self.curves.items()
        }
        ends = {"diverged": one.diverged, "failed": one.failed}
        return {"spec": self.spec, "seeds": list(self.seeds)} | costs | ends | {"metrics": values}

    @staticmethod
    def from_json(table: Table, label: str, color: str) -> Series:
        """What `to_json` wrote."""
        plain: Table = {name: np.array(table[name], float) for name in COSTS}
        plain |= {"diverged": table["diverged"], "failed": table["failed"]}
        curves = {
            name: Curve(values=np.array(values, float), **plain)
            for name, values in table["metrics"].items()
        }
        return Series(label, color, table["spec"], tuple(table["seeds"]), curves)


def rounded(values: Floats, digits: int = 6) -> list[float | int | None]:
    """Numbers with so many digits for JSON; what is not finite is null."""
    short = (float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values)
    return [int(value) if value is not None and value.is_integer() else value for value in short]


def find(places: Sequence[Path]) -> list[tuple[str, list[Series]]]:
    """All runs below some directories: what sets a task apart, and the series on it. Seeds of a spec are one series."""
    groups: dict[str, dict[int, Run]] = {}
    for place in places:
        files = sorted(place.rglob(history.NAME)) if place.is_dir() else [place]
        for run_dir in dict.fromkeys(_run_dir(file.parent) for file in files):
            folders = [file.parent for file in sorted(run_dir.glob(f"seed-*/{history.NAME}"))]
            check_run(run_dir, [run_dir] if (run_dir / history.NAME).exists() else folders)
        found = [_read(file) for file in files]
        if not any(rows for _, rows in found):
            raise CheckpointError(
                f"{str(place)!r} holds no {history.NAME} with rows; give the directory of a run"
            )
        for header, rows in found:
            spec, seeds = header["spec"], groups.setdefault(identity_of(header["spec"]), {})
            if rows and len(rows) > len(seeds.get(spec["seed"], (spec, ()))[1]):
                seeds[spec["seed"]] = spec, tuple(rows)
    tasks: dict[str, list[dict[int, Run]]] = {}
    for seeds in groups.values():
        if seeds:
            first, _ = next(iter(seeds.values()))
            tasks.setdefault(json.dumps(_task(first), sort_keys=True), []).append(
                dict(sorted(seeds.items()))
            )
    names = _different([flat(json.loads(task)) for task in tasks])
    return [
        (name or "Runs", _named(group)) for name, group in zip(names, tasks.values(), strict=True)
    ]


def _run_dir(folder: Path) -> Path:
    """The directory of the run to which a history belongs; seeds of one computation share the one above theirs."""
    shared = (
        folder.name.startswith("seed-")
        and not (folder / OUTCOME).exists()
        and (folder.parent / OUTCOME).exists()
    )
    return folder.parent if shared else folder


def _read(file: Path) -> tuple[Line, list[Line]]:
    """A history whose spec says what is shown of it."""
    header, rows = history.read(file)
    if not {"method", "rounds", "seed"} <= header["spec"].keys():
        raise CheckpointError(
            f"line 1 of {str(file)!r} has no spec with a method, rounds and a seed; run it again"
        )
    return header, rows


def _named(groups: list[dict[int, Run]]) -> list[Series]:
    specs = [next(iter(seeds.values()))[0] for seeds in groups]
    return [
        Series.of(label, "", specs[n], tuple(seeds), [rows for _, rows in seeds.values()])
        for n, (label, seeds) in enumerate(zip(labels(specs), groups, strict=True))
    ]


def labels(specs: Sequence[Table]) -> list[str]:
    """The method of each spec, with the settings in which it differs from others of that method."""
    out = [""] * len(specs)
    for name in dict.fromkeys(spec["method"]["name"] for spec in specs):
        places = [n for n, spec in enumerate(specs) if spec["method"]["name"] == name]
        texts = _different(
            [
                flat({k: v for k, v in specs[n].items() if k not in ("rounds", "seed")})
                for n in places
            ]
        )
        for place, text in zip(places, texts, strict=True):
            out[place] = f"{name}, {text}" if text else name
    return out


def _task(spec: Table) -> Table:
    """What a run was made on; a run of `fit` names the model and the data by their sizes only."""
    return (
        dict(spec["task"])
        if "task" in spec
        else {k: spec[k] for k in ("model", "data") if k in spec}
    )


def _different(tables: Sequence[Table]) -> list[str]:
    """Of each table the values in which it differs from the others."""
    keys = [key for table in tables for key in table]
    differing = [
        k for k in dict.fromkeys(keys) if len({json.dumps(table.get(k)) for table in tables}) > 1
    ]
    return [", ".join(setting(k, t[k]) for k in differing if k in t) for t in tables]
