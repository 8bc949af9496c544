"""Whether stopping hopeless settings early changes which setting wins: the tunings of the committed studies, replayed.

    python benchmarks/halving.py [--studies options privacy mnist] [--jobs 1] [--made]
    python benchmarks/halving.py --replay

The committed results of a study have the end of every run of its tuning, but not the curves by which a run is stopped.
This makes the runs again up to the last stage, and those to the end that the committed study stopped. It applies the
rule of `fedspan.engine.tuner` to the curves and compares the winners. Runs are kept in out/halving, and curves in
tests/study/tuning_curves.json, from which --replay and a test do the same without a run. With --made only grids count
whose runs are there already.

Parts in which the rule never stops anything are left out: the toy problem, whose figures show the whole grid, the
language models, which are evaluated too rarely, and private runs, whose noise depends on their length. So are the parts
of `options` on CIFAR-100: their committed results were made with the rule, and it stopped nothing there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench
import numpy as np
from rich.console import Console

from fedspan.data import datasets
from fedspan.engine import history
from fedspan.engine.loop import Line
from fedspan.engine.tuner import STAGES, halve, stage_end
from fedspan.study import results
from fedspan.study.curves import Series
from fedspan.study.execute import execute
from fedspan.study.jobs import Job, jobs_of
from fedspan.study.model import Part, Study, Variant, settings
from fedspan.study.results import Entry
from fedspan.study.tuning import Runs, Tried

ROOT = Path(__file__).parents[1]
CURVES = ROOT / "tests" / "study" / "tuning_curves.json"
WITHOUT = {("options", "disjoint"), ("options", "dirichlet")}
Needed = tuple[Part, Entry, list[list[Job]]]  # a variant's grid and the runs of each point
Grid = dict[
    str, Any
]  # one line of CURVES: a variant's grid, with the curve and the end of each point


def needed_by(name: str) -> list[Needed]:
    """The runs of a study's grids."""
    known = results.load(ROOT / "docs" / "results" / name)
    found = [(part, entry) for part in known.study.parts for entry in known.entries[part.name]]
    return [
        (part, entry, runs_of(name, part, entry))
        for part, entry in found
        if (name, part.name) not in WITHOUT
    ]


def jobs_in(needed: list[Needed]) -> list[Job]:
    """All runs."""
    return [job for *_, trials in needed for trial in trials for job in trial]


def grids(name: str, needed: list[Needed], jobs: int, made: bool) -> Iterator[Grid]:
    """Makes the runs of a study's grids."""
    if not made:
        execute(jobs_in(needed), jobs, Console())
    for part, entry, trials in needed:
        if trials and all(job.complete() for trial in trials for job in trial):
            spec = part.tuning_spec(
                part.variant(entry.variant), entry.tried[0].point, part.rows[entry.row]
            )
            about = {
                "study": name,
                "part": part.name,
                "variant": entry.variant,
                "goal": "max" if part.tune_sign > 0 else "min",
            }
            yield about | {
                "tail": part.tail,
                "rounds": spec.rounds,
                "eval_every": spec.eval_every,
                "points": [one.point for one in entry.tried],
                "curves": [values(part, trial) for trial in trials],
                "ends": [
                    end_of(part, one, trial) for one, trial in zip(entry.tried, trials, strict=True)
                ],
            }


def runs_of(name: str, part: Part, entry: Entry) -> list[list[Job]]:
    """The runs of each point: up to the last stage, or to the end if the committed study stopped it before."""
    variant, row = part.variant(entry.variant), part.rows[entry.row]
    place = ROOT / "out" / "halving" / name
    cells = Runs(Study(name, [part]), place).cells
    cell = next(one for one in cells if one.row is row and one.variant is variant)
    if not cell.stages:
        return []
    specs = [part.tuning_spec(variant, one.point, row) for one in entry.tried]
    lengths = [
        spec.rounds if one.dropped else stage_end(spec.rounds, spec.eval_every, max(STAGES))
        for spec, one in zip(specs, entry.tried, strict=True)
    ]
    trials = [
        jobs_of(replace(s, rounds=t), place, part.tuning_seeds)
        for s, t in zip(specs, lengths, strict=True)
    ]
    return trials


def values(part: Part, trial: list[Job]) -> list[list[float]]:
    """The deciding metric of each seed at every evaluation; shorter where it diverged."""
    seeds = [[row for row in rows if not row.get("diverged")] for rows in rows_of(trial)]
    return [[float(f"{row[part.tune_metric]:.7g}") for row in rows] for rows in seeds]


def end_of(part: Part, one: Tried, trial: list[Job]) -> float | None:
    """The result of a point at the end of its tuning; None if not every seed has one."""
    end = one.end
    if one.dropped:
        spec, rows = trial[0].spec.table(), rows_of(trial)
        end = part.result(Series.of("", "", spec, range(len(rows)), rows).curve(part.tune_metric))
    return end.mean if end.whole else None


def rows_of(trial: list[Job]) -> list[list[Line]]:
    """The history of each seed, no longer than its job."""
    files = [(file, job.spec.rounds) for job in trial for file in job.histories()]
    return [
        [row for row in history.read(file)[1] if row["round"] <= rounds] for file, rounds in files
    ]


def winners(grid: Grid) -> tuple[int, int, float]:
    """(the best point of the whole grid, the best with early stopping, the share of the rounds that it saves)."""
    variant = Variant(grid["variant"], grid["variant"], "", {}, {})
    part = Part(
        name=grid["part"], base={}, variants=[variant], goal=grid["goal"], tail=grid["tail"]
    )
    curves = [curve_of(seeds, grid) for seeds in grid["curves"]]
    lengths, sign = [grid["rounds"]] * len(curves), 1 if grid["goal"] == "max" else -1

    def values(n: int, rounds: int) -> Any:
        return -sign * curves[n].until(rounds).values

    lengths = halve(lengths, [grid["eval_every"]] * len(curves), values, part.last)
    ends = [
        -math.inf if end is None else end if grid["goal"] == "max" else -end for end in grid["ends"]
    ]
    everyone = range(len(curves))
    whole = max(everyone, key=lambda n: ends[n])
    early = max(everyone, key=lambda n: (lengths[n] == grid["rounds"], ends[n]))
    return whole, early, 1 - sum(lengths) / (len(lengths) * grid["rounds"])


def curve_of(seeds: list[list[float]], grid: Grid) -> Series:
    """The curve of one point; a seed with fewer values than the last stage has evaluations diverged at the next one."""
    last = stage_end(grid["rounds"], grid["eval_every"], max(STAGES))
    rows = max(len(seed) for seed in [*seeds, [0.0] * (last // grid["eval_every"] + 1)])
    rounds = grid["eval_every"] * np.arange(rows, dtype=float)
    table = np.array([seed + [math.nan] * (rows - len(seed)) for seed in seeds])
    diverged = [None if len(seed) == rows else int(rounds[len(seed)]) for seed in seeds]
    everyone, failed = tuple(range(len(seeds))), [False] * len(seeds)
    return Series("", "", {}, everyone, {"round": rounds}, {"": table}, diverged, failed)


def main() -> None:
    """Make the runs, or read their curves, and print the winners."""
    parser = bench.arguments(__doc__)
    parser.add_argument("--studies", nargs="+", default=["options", "privacy", "mnist"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--made", action="store_true", help="run nothing; only grids whose runs are there"
    )
    parser.add_argument("--replay", action="store_true", help="from the committed curves")
    given = parser.parse_args()
    given.replay |= given.short
    known = (
        [json.loads(line) for line in CURVES.read_text("utf-8").splitlines()]
        if CURVES.exists()
        else []
    )
    needed = {name: needed_by(name) for name in given.studies if not given.replay}
    if not given.made:
        datasets.check(
            data
            for some in needed.values()
            for job in jobs_in(some)
            for data in job.spec.task.requires()
        )
    for name, some in needed.items():
        known = [grid for grid in known if grid["study"] != name] + list(
            grids(name, some, given.jobs, given.made)
        )
        CURVES.write_text("".join(json.dumps(grid) + "\n" for grid in known), "utf-8")
    same = 0
    for grid in known:
        whole, early, saved = winners(grid)
        same += whole == early
        chosen = " | ".join(settings(grid["points"][n]) for n in (whole, early))
        print(f"| {grid['study']} | {grid['part']} | {grid['variant']} | {chosen} | {saved:.0%} |")
    print(f"{same} of {len(known)} grids have the same winner")


if __name__ == "__main__":
    bench.start(main)
