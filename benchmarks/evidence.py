"""A slice of every committed table, run again: one method, one seed and a few rounds against the recorded curve.

    python benchmarks/evidence.py                       # all of docs/results
    python benchmarks/evidence.py docs/results/toy --seconds 60

For every comparison of a study one entry is run as many rounds as took `--seconds` when it was recorded. What the data
are missing for, and what this version no longer runs, is named. The exit code is 1 if a result of this version of
fedspan differs; one of an older version is named as such. `fedspan report DIR --verify` makes whole runs again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import fedspan
from fedspan.core.errors import FedspanError
from fedspan.study import results
from fedspan.study.verify import Recorded, of_entry, words

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-3  # relative: other processors round differently
FAR = 10.0  # times the seconds that are given, beyond which not even one evaluation is made again


def slices(place: Path, seconds: float) -> Iterator[tuple[str, Recorded, int]]:
    """Yield an entry of every comparison of a study: its name, its record, and how many rounds are made again."""
    made = results.load(place)
    for number, part in enumerate(made.study.parts):
        able = [one for one in made.entries[part.name] if one.final.whole]
        if able:
            entry = able[number % len(able)]
            n, series = number % len(entry.series.seeds), entry.series
            took = np.nan_to_num(series.spent["seconds"], nan=seconds)  # as older records have it
            row = max(1, int((took < seconds).sum()) - 1)
            if row < len(took) and took[row] <= FAR * seconds:
                name = f"{part.name}/{entry.variant}/seed-{series.seeds[n]}"
                yield name, of_entry(made, entry, n), int(series.rounds[row])


def check(one: Recorded, rounds: int, tolerance: float = TOLERANCE) -> tuple[str, str]:
    """Return what became of a slice, in one word and in a sentence."""
    try:
        one.built()
    except FedspanError as error:
        return "cannot run", str(error)
    found = one.again(rounds)
    text = f"{rounds} rounds: {words(one, found)}"
    if not found or found[0][0] <= tolerance:
        return "same", text
    same = one.versions.get("fedspan") == fedspan.__version__
    return ("DIFFERS" if same else "older"), text


def main() -> int:
    """Make the slices again and print one line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=3.0, help="of computing per comparison")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = sorted(path.parent for path in (ROOT / "docs" / "results").rglob(results.STUDY))
    counts: dict[str, int] = {}
    start = time.monotonic()
    for place in given.places or found:
        title = place.resolve().relative_to(ROOT / "docs" / "results").as_posix()
        for name, one, rounds in slices(place, given.seconds):
            word, text = check(one, rounds)
            counts[word] = counts.get(word, 0) + 1
            print(f"{word:10} {title} {name}: {text}", flush=True)
    listed = ", ".join(f"{count} {word}" for word, count in counts.items())
    print(f"{listed}; {time.monotonic() - start:.0f} s")
    return 1 if counts.get("DIFFERS") else 0


if __name__ == "__main__":
    sys.exit(main())
