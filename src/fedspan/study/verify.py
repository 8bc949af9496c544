"""`fedspan report --verify`: make a recorded run again from its spec, and compare the two histories value by value.

A run directory has its evaluations in full, which must come out bit for bit. The data of a study have them rounded, and
without the directories: then the rounded values must be the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedspan.api.run import run
from fedspan.core.callback import Callback
from fedspan.core.errors import FedspanError, SpecError, one_of
from fedspan.core.extras import versions
from fedspan.core.json_log import read_lines
from fedspan.core.spec import Spec, Table, with_values
from fedspan.data import datasets
from fedspan.engine import history
from fedspan.engine.loop import Line, Loop
from fedspan.study import results
from fedspan.study.curves import rounded
from fedspan.study.results import Entry, Results

UNCOMPARED = ("seconds", "events")


class Difference(NamedTuple):
    """A value that came out differently."""

    round: int
    key: str
    was: Any
    now: Any

    @property
    def size(self) -> float:
        """The difference as a share of the larger value; infinite if one of them is no number."""
        if self.was is None or self.now is None:
            return math.inf
        return float(abs(self.was - self.now) / max(abs(self.was), abs(self.now)))


@dataclass(frozen=True)
class Recorded:
    """A run as it was recorded.

    Attributes:
        spec: Its resolved spec with its seed.
        rows: Its evaluations.
        versions: What it was made with, if known.
        whole: Whether the values have all their digits, and not six.
    """

    spec: Table
    rows: list[Line]
    versions: Table
    whole: bool = True

    def built(self) -> Spec:
        """Return the spec; refused if the record cannot say all that decides the run."""
        spec = Spec.from_table(self.spec)
        if spec.dp is not None:
            raise SpecError("the noise of `privacy` is secret: no second run has the same")
        datasets.check(spec.task.requires())
        engine = dataclasses.replace(spec.engine, states_dir=None)  # which is that of the first run
        return dataclasses.replace(spec, engine=engine)

    def again(self, rounds: float = math.inf) -> list[Difference]:
        """Make the run again, up to a round if one is given, and return what differs."""
        spec, end = self.built(), min(rounds, self.rows[-1]["round"])
        with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
            more = [_Until(end)] if end < spec.rounds else []
            lines = run(spec, Path(place) / "run", callbacks=more, progress=False).runs[0]
        made, found = {line["round"]: line for line in lines}, []
        for row in self.rows:
            for key in row.keys() - set(UNCOMPARED) if row["round"] <= end else ():
                now = made.get(row["round"], {}).get(key)
                if not self.whole and now is not None:
                    (now,) = rounded([now])
                if row[key] != now:
                    found.append(Difference(row["round"], key, row[key], now))
        return sorted(found, key=lambda one: -one.size)


class _Until(Callback):
    """Ends a run after a round."""

    def __init__(self, rounds: float) -> None:
        self.rounds = rounds

    def on_round_end(self, run: Loop) -> None:
        if run.t >= self.rounds:
            run.end("the record ends here")


def of_file(path: Path) -> Recorded:
    """Return the run of a history file."""
    header, rows = history.read(path)
    lines, _ = read_lines(path)
    methods = {json.dumps(line["spec"]["method"]) for line in lines if "spec" in line}
    if len(methods) > 1:
        raise SpecError("it was continued with another learning rate")
    return Recorded(header["spec"], rows, header.get("versions", {}))


def of_entry(made: Results, entry: Entry, n: int) -> Recorded:
    """Return the n-th seed of an entry of a study's data."""
    series = entry.series
    spec = series.spec | {"seed": series.seeds[n]}
    if entry.found_lr:  # a step size that was searched for
        spec = with_values(spec, {"method.lr": entry.found_lr[min(n, len(entry.found_lr) - 1)]})
    columns = {name: rounded(values[n]) for name, values in series.metrics.items()}
    if len(series.seeds) == 1:
        columns |= {f"{way}_bytes": rounded(series.spent[way]) for way in ("up", "down")}
    ends = series.rounds.astype(int).tolist()
    rows = [{"round": t} | {k: v[row] for k, v in columns.items()} for row, t in enumerate(ends)]
    gone = series.diverged[n]
    rows = [row for row in rows if gone is None or row["round"] <= gone]
    return Recorded(spec, rows, made.versions, whole=False)


def named(place: Path) -> dict[str, Callable[[], Recorded]]:
    """Return name → reader of every run in a directory: of its histories, or of the data of a study without them."""
    files = sorted(place.rglob(history.NAME))
    if files or not results.has_data(place):
        return {path.parent.relative_to(place).as_posix(): partial(of_file, path) for path in files}
    made, found = results.load(place), dict[str, Callable[[], Recorded]]()
    for part in made.study.parts:
        for entry in made.entries[part.name]:
            parts = [part.name, *([part.rows[entry.row].label] if len(part.rows) > 1 else [])]
            for n, seed in enumerate(entry.series.seeds):
                if not entry.series.failed[n]:
                    name = "/".join([*parts, entry.variant, f"seed-{seed}"])
                    found[name] = partial(of_entry, made, entry, n)
    return found


def verify(place: Path, name: str | None = None) -> tuple[str, bool]:
    """Make one run of a directory again, drawn at random or by its name.

    Returns:
        What came of it in words, and whether every value is that of the record.
    """
    runs = named(place)
    if not runs:
        raise SpecError(f"{str(place)!r} holds no runs; give the directory of a run or of a study")
    if name is not None:
        one_of("--verify-run", name, runs)
    refused = {}
    for chosen in random.sample([*runs], len(runs)) if name is None else [name]:
        one = runs[chosen]()
        try:
            one.built()
        except FedspanError as error:
            refused[chosen] = str(error)
            continue
        found = one.again()
        return f"{chosen} (of {len(runs)} runs): {words(one, found)}", not found
    first, why = next(iter(refused.items()))
    raise SpecError(f"no run of {str(place)!r} can be made again from its spec; {first}: {why}")


def words(one: Recorded, found: list[Difference]) -> str:
    """Return what came of a run that was made again."""
    if not found:
        digits = "bit for bit" if one.whole else "in the six digits of the record"
        return f"the same in all evaluations, {digits}"
    worst, rows = found[0], len({difference.round for difference in found})
    size = f" ({100 * worst.size:.2g} %)" if math.isfinite(worst.size) else ""
    text = f"differs in {rows} evaluations, most in {worst.key} after round {worst.round}: "
    text += f"recorded {worst.was}, now {worst.now}{size}"
    now = versions()
    other = [f"{k} {v} (here {now[k]})" for k, v in one.versions.items() if now.get(k, v) != v]
    return text + (f"; the record was made with {', '.join(other)}" if other else "")
