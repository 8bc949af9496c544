"""A spec under one or several seeds, read from its histories: one line of a chart, one row of a table.

`find` gathers them from any folders that hold runs and names each by what sets it apart from the others.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.core.errors import CheckpointError
from fedspan.engine import history
from fedspan.engine.history import Line
from fedspan.study.curves import Curve, metrics_of
from fedspan.study.plan import apart

Table = dict[str, Any]
Run = tuple[Table, tuple[Line, ...]]  # resolved spec and rows


@dataclass(frozen=True, eq=False)
class Series:
    """Rows of all seeds; a seed that failed has none."""

    label: str
    color: str  # empty: whoever draws it chooses
    table: Table  # the resolved spec
    seeds: tuple[int, ...]
    runs: tuple[tuple[Line, ...], ...]

    @functools.cached_property
    def metrics(self) -> list[str]:
        """What every seed reports."""
        known = [metrics_of(rows) for rows in self.runs if rows]
        return [name for name in known[0] if all(name in one for one in known)] if known else []

    @functools.cached_property
    def curves(self) -> dict[str, Curve]:
        """Every metric, as far as all seeds have come that are still going."""
        return {metric: self._curve(metric) for metric in self.metrics}

    def curve(self, metric: str) -> Curve:
        """One of them."""
        return self.curves[metric] if metric in self.curves else self._curve(metric)

    def _curve(self, metric: str) -> Curve:
        curve = Curve.of(self.runs, metric, [f"{self.label}, seed {seed}" for seed in self.seeds])
        return curve.until(min((self.runs[n][-1]["round"] for n in curve.alive()), default=int(curve.rounds[-1])))

    def unfinished(self) -> dict[int, int]:
        """Seed → round it stands at, where it is neither at its end nor diverged."""
        lasts = {seed: rows[-1] for seed, rows in zip(self.seeds, self.runs, strict=True) if rows}
        far = {seed: last["round"] for seed, last in lasts.items() if not last.get("diverged")}
        return {seed: t for seed, t in far.items() if t < self.table["rounds"]}


def find(folders: Sequence[Path]) -> list[tuple[str, list[Series]]]:
    """All runs below some folders: what sets a task apart, and the series on it. Seeds of one spec are one series."""
    groups: dict[str, dict[int, Run]] = {}
    for folder in folders:
        files = sorted(folder.rglob(history.NAME)) if folder.is_dir() else [folder]
        found = [history.read(file) for file in files]
        if not any(rows for _, rows in found):
            raise CheckpointError(
                f"{str(folder)!r} holds no {history.NAME} with rows; give a folder that a run has written"
            )
        for header, rows in found:
            table, seeds = header["spec"], groups.setdefault(apart(header["spec"]), {})
            if rows and len(rows) > len(seeds.get(table["seed"], (table, ()))[1]):
                seeds[table["seed"]] = table, tuple(rows)
    tasks: dict[str, list[dict[int, Run]]] = {}
    for seeds in groups.values():
        if seeds:
            first, _ = next(iter(seeds.values()))
            tasks.setdefault(json.dumps(_task(first), sort_keys=True), []).append(dict(sorted(seeds.items())))
    names = _different([flat(json.loads(task)) for task in tasks])
    return [(name or "Runs", _named(part)) for name, part in zip(names, tasks.values(), strict=True)]


def _named(groups: list[dict[int, Run]]) -> list[Series]:
    tables = [next(iter(seeds.values()))[0] for seeds in groups]
    return [
        Series(label, "", tables[n], tuple(seeds), tuple(rows for _, rows in seeds.values()))
        for n, (label, seeds) in enumerate(zip(labels(tables), groups, strict=True))
    ]


def labels(tables: Sequence[Table]) -> list[str]:
    """The method of each spec, with the settings in which it differs from others of that method."""
    out = [""] * len(tables)
    for name in dict.fromkeys(table["method"]["name"] for table in tables):
        places = [n for n, table in enumerate(tables) if table["method"]["name"] == name]
        texts = _different([flat({k: v for k, v in tables[n].items() if k not in ("rounds", "seed")}) for n in places])
        for place, text in zip(places, texts, strict=True):
            out[place] = f"{name}, {text}" if text else name
    return out


def flat(table: Table, prefix: str = "") -> Table:
    """Dotted key → value."""
    out: Table = {}
    for key, value in table.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _task(table: Table) -> Table:
    """What a run was made on; `fit` knows the model and the data by their measures only."""
    return dict(table["task"]) if "task" in table else {k: table[k] for k in ("model", "data") if k in table}


def _different(tables: Sequence[Table]) -> list[str]:
    """Of each table the values in which it differs from the others."""
    keys = [key for table in tables for key in table]
    differing = [k for k in dict.fromkeys(keys) if len({json.dumps(table.get(k)) for table in tables}) > 1]
    return [", ".join(setting(k, t[k]) for k in differing if k in t) for t in tables]


def setting(key: str, value: Any) -> str:
    """method.projector.rank = 20 → rank 20; a name stands for itself."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    last = key.rpartition(".")[2]
    return text if last == "name" else f"{last} {text}"
