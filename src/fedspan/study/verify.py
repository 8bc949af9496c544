"""`fedspan report --verify`: make a recorded run again from its spec, and compare the two histories value by value.

A run directory has its evaluations in full, which must come out bit for bit. The data of a study have them rounded, and
without the directories: then the rounded values must be the same.
"""

from __future__ import annotations

import dataclasses
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedspan.api.run import run
from fedspan.core.callback import Callback
from fedspan.core.errors import FedspanError, SpecError, one_of
from fedspan.core.extras import versions
from fedspan.core.spec import Spec, Table, with_values
from fedspan.data import datasets
from fedspan.engine import history
from fedspan.engine.loop import Line, Loop
from fedspan.study import results
from fedspan.study.curves import rounded
from fedspan.study.model import committed, names
from fedspan.study.results import Entry, Results

UNCOMPARED = {"seconds", "events"}
# Of a value that came out differently: the share of the larger one, the round, the key, what it was and what it is now.
Difference = tuple[float, int, str, Any, Any]


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
        end, found = min(rounds, self.rows[-1]["round"]), list[Difference]()
        with tempfile.TemporaryDirectory(prefix="fedspan-") as place:
            made = run(self.built(), Path(place) / "run", callbacks=[_Until(end)], progress=False)
        by_round = {line["round"]: line for line in made.runs[0]}
        for row in self.rows:
            for key in row.keys() - UNCOMPARED if row["round"] <= end else ():
                now = by_round.get(row["round"], {}).get(key)
                if not self.whole and now is not None:
                    (now,) = rounded([now])
                was = row[key]
                if was != now:
                    size = math.inf
                    if was is not None and now is not None:
                        size = abs(was - now) / max(abs(was), abs(now))
                    found.append((size, row["round"], key, was, now))
        return sorted(found, key=lambda one: -one[0])


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
    if "lr" in header:
        raise SpecError("it was continued with another learning rate")
    return Recorded(header["spec"], rows, header.get("versions", {}))


def of_entry(made: Results, entry: Entry, n: int) -> Recorded:
    """Return the n-th seed of an entry of a study's data."""
    if made.study.name in names():
        committed(made.study.name)  # registers the tasks and methods of its plugins
    series = entry.series
    spec = series.spec | {"seed": series.seeds[n]}
    if entry.found_lr:  # a step size that was searched for
        spec = with_values(spec, {"method.lr": entry.found_lr[min(n, len(entry.found_lr) - 1)]})
    gone = series.diverged[n]
    if gone is not None:
        series = series.at_rows(series.rounds <= gone)
    columns: Table = {"round": series.rounds.astype(int).tolist()}
    columns |= {name: rounded(values[n]) for name, values in series.metrics.items()}
    if len(series.seeds) == 1:
        columns |= {f"{way}_bytes": rounded(series.spent[way]) for way in ("up", "down")}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Recorded(spec, rows, made.versions, whole=False)


def named(place: Path) -> dict[str, Callable[[], Recorded]]:
    """Return name → reader of every run in a directory: of its histories, or of the data of a study without them."""
    files = sorted(place.rglob(history.NAME))
    if files or not results.has_data(place):
        return {path.parent.relative_to(place).as_posix(): partial(of_file, path) for path in files}
    made, found = results.load(place), dict[str, Callable[[], Recorded]]()
    for part in made.study.parts:
        for entry in made.entries[part.name]:
            series, row = entry.series, part.rows[entry.row].label
            for n, seed in enumerate(series.seeds):
                if not series.failed[n]:
                    words = [part.name, row, entry.variant, f"seed-{seed}"]
                    found["/".join(filter(None, words))] = partial(of_entry, made, entry, n)
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
    refused = ""
    for chosen in random.sample([*runs], len(runs)) if name is None else [name]:
        one = runs[chosen]()
        try:
            one.built()
        except FedspanError as error:
            refused = refused or f"{chosen}: {error}"
            continue
        found = one.again()
        return f"{chosen} (of {len(runs)} runs): {words(one, found)}", not found
    raise SpecError(f"no run of {str(place)!r} can be made again from its spec; {refused}")


def words(one: Recorded, found: list[Difference]) -> str:
    """Return what came of a run that was made again."""
    if not found:
        digits = "bit for bit" if one.whole else "in the six digits of the record"
        return f"the same in all evaluations, {digits}"
    size, t, key, was, now = found[0]
    share = f" ({100 * size:.2g} %)" if math.isfinite(size) else ""
    text = (
        f"differs in {len({t for _, t, *_ in found})} evaluations, most in {key} after round {t}: "
    )
    text += f"recorded {was}, now {now}{share}"
    here = versions()
    other = [f"{k} {v} (here {here[k]})" for k, v in one.versions.items() if here.get(k, v) != v]
    return text + (f"; the record was made with {', '.join(other)}" if other else "")
