"""A study of networks: parts that are comparisons on one data set, at a scale that a machine can bear.

specs/NAME.toml holds what the parts share and the scales; specs/NAME_*.toml one part each.
"""

from __future__ import annotations

import itertools
import math
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedspan.core.checkpoint import write_atomic
from fedspan.core.errors import at_least, one_of
from fedspan.study import command, tables
from fedspan.study.outcome import Outcome
from fedspan.study.paper_study import SPECS, made, prepared
from fedspan.study.paper_study import command as study_command
from fedspan.study.plan import Comparison, Variant, goal_of, over
from fedspan.study.report import Chapter


@dataclass(frozen=True)
class Part:
    """One comparison of a study, with what it is about and what is claimed of it."""

    comparison: Comparison
    title: str
    about: str
    claims: list[list[str]]  # variants in an order that is claimed, best first
    paper: dict[str, list[float]]  # variant → (final, best) of the paper's table


@dataclass(frozen=True)
class Benchmark:
    """All parts of a study at one scale."""

    name: str
    scale: str
    title: str
    about: str
    parts: list[Part]
    seeds: int | None  # of every part; None: each has its own number

    @staticmethod
    def load(name: str, scale: str | None, seeds: int | None) -> Benchmark:
        """The study NAME at a scale; `laptop` unless it is said."""
        shared = tomllib.loads((SPECS / f"{name}.toml").read_text())
        scale = scale or "laptop"
        one_of("scale", scale, shared["scales"])
        if seeds is not None:
            at_least("seeds", seeds, 1)
        size = shared["scales"][scale]
        files = sorted(SPECS.glob(f"{name}_*.toml"))
        parts = [_part(file.stem, tomllib.loads(file.read_text()), shared, size, seeds) for file in files]
        wanted = size.get("parts", [part.comparison.name for part in parts])
        parts = [part for part in parts if part.comparison.name in wanted]
        about = f"{shared['about'].strip()} {size['about'].strip()}"
        return Benchmark(name, scale, shared["title"], about, parts, seeds)


def _part(name: str, table: dict[str, Any], shared: dict[str, Any], size: dict[str, Any], seeds: int | None) -> Part:
    known = shared["variants"] | table.get("own", {})
    own = size.get(name, {})
    base = over(over(over(shared["base"], table.get("base", {})), size.get("base", {})), own.get("base", {}))
    steps = next(level["local_steps"] for level in (own, size, table, shared) if "local_steps" in level)
    metric = table.get("metric", "accuracy")
    comparison = Comparison(
        name=name,
        base=base,
        variants=[_variant(one, known[one], steps, size.get("points")) for one in table["variants"]],
        seeds=seeds or own.get("seeds", size["seeds"]),
        tune_rounds=own.get("tune_rounds", size.get("tune_rounds")),
        metric=metric,
        goal=goal_of(metric),
        tail=size.get("tail", shared.get("tail", 3)),
    )
    return Part(comparison, table["title"], table["about"], table.get("claims", []), table.get("paper", {}))


def _variant(name: str, table: dict[str, Any], steps: int, points: int | None) -> Variant:
    """`points` leaves only that many values of the middle of each grid, for scales that do not tune."""
    grid = {key: _middle(values, points) for key, values in table.get("grid", {}).items()}
    method = {**table.get("method", {}), "local_steps": steps}
    return Variant.from_table(name, table | {"method": method, "grid": grid})


def _middle(values: list[Any], points: int | None) -> list[Any]:
    if points is None or points >= len(values):
        return values
    start = (len(values) - points) // 2
    return values[start : start + points]


def reproduce(study: Benchmark, out: Path, *, jobs: int, again: bool, console: Console) -> None:
    """Tune, run and show a study in `out`. Runs that are complete there are kept, unfinished ones resumed."""
    runs = prepared(out / f"runs-{study.scale}", jobs, again)
    from fedspan.study import figures, page

    began = time.monotonic()
    outcomes = command.run([part.comparison for part in study.parts], runs, jobs=jobs, console=console)
    minutes = (time.monotonic() - began) / 60

    chapters = [_chapter(part, outcome) for part, outcome in zip(study.parts, outcomes, strict=True)]
    for part, outcome, chapter in zip(study.parts, outcomes, chapters, strict=True):
        name = part.comparison.name
        figures.draw(outcome, made(out / "figures") / name)
        figures.draw_memory(outcome, out / "figures" / f"{name}_memory")
        write_atomic(made(out / "tables") / f"{name}.csv", tables.curves_csv(chapter.series).encode())
        command.show(outcome, console, part.title)
        for note in chapter.notes:
            console.print(note, highlight=False)
    text = [f"# {study.title}\n\n{study.about}\n", *(chapter.markdown() for chapter in chapters)]
    write_atomic(out / "tables.md", "\n".join(text).encode())
    line = study_command(study.name, out, jobs=jobs, seeds=study.seeds, scale=study.scale)
    cost = f"{command.minutes(outcomes):.0f} core-minutes of computing."
    sections = [chapter.section() for chapter in chapters]
    write_atomic(out / "index.html", page.render(study.title, [study.about], [], sections, line, cost).encode())
    console.print(f"{minutes:.1f} minutes. The page: {out / 'index.html'}", highlight=False)


def _chapter(part: Part, outcome: Outcome) -> Chapter:
    """A part with the paper's numbers beside ours, and how its claim fares."""
    chapter = Chapter.of_outcome(part.title, part.about, outcome, _with_paper(tables.main(outcome), part))
    return replace(chapter, notes=[*verdicts(part, outcome), *chapter.notes])


def verdicts(part: Part, outcome: Outcome) -> list[str]:
    """Each step of the orders that are claimed: whether it is seen, beyond the spread over seeds."""
    by_name = {v.name: v for v in part.comparison.variants}
    pairs = [pair for chain in part.claims for pair in itertools.pairwise(chain)]
    return [_verdict(part, by_name[better], by_name[worse], outcome) for better, worse in dict.fromkeys(pairs)]


def _verdict(part: Part, better: Variant, worse: Variant, outcome: Outcome) -> str:
    one, two = outcome.final(better), outcome.final(worse)
    points = part.comparison.metric == "accuracy"
    unit, scale = ("points", 100.0) if points else (f"of {part.comparison.metric}", 1.0)
    up = 1 if part.comparison.goal == "max" else -1
    gap, spread = scale * (one.mean - two.mean), scale * math.hypot(one.spread, two.spread)
    known = not math.isnan(spread)  # a single seed has no spread, and no verdict
    if not known:
        word = "one seed"
    elif up * gap > spread:
        word = "holds"
    else:
        word = "reversed" if up * gap < -spread else "within the spread"
    around = f" ± {spread:.{1 if points else 2}f}" if known else ""
    return (
        f"{better.label} {'>' if up > 0 else '<'} {worse.label}: {word} ({gap:+.{1 if points else 2}f}{around} {unit})"
    )


def _with_paper(cells: tables.Cells, part: Part) -> tables.Cells:
    """The main table with the paper's final and best accuracy beside ours, where it has them."""
    header, rows = cells
    if not part.paper:
        return cells
    more = [part.paper.get(v.name) for v in part.comparison.variants]
    texts = [["", ""] if two is None else [f"{two[0]:.1f}", f"{two[1]:.1f}"] for two in more]
    return [*header, "paper, final", "paper, best"], [[*row, *text] for row, text in zip(rows, texts, strict=True)]
