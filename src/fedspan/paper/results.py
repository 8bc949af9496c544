"""What a study's runs came to: curves read from their histories, tail means, and verdicts against the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedspan.core.errors import CheckpointError
from fedspan.paper.study import Case, Study
from fedspan.runtimes import history

CLOSE = 0.15  # a cell within 15 % of the paper's counts as reproduced
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One case over all seeds; rows after a divergence are nan."""

    rounds: Floats
    errors: Floats  # (seeds, rows)
    up: Floats  # (rows,), mean over seeds
    down: Floats
    diverged: list[int | None]  # round, for each seed
    seconds: float

    @staticmethod
    def read(folder: Path) -> Curve:
        """From the histories below a run's folder."""
        files = sorted(folder.glob("seed-*/history.jsonl"), key=lambda p: int(p.parent.name.split("-")[1]))
        runs = [history.read(file)[1] for file in files or [folder / history.NAME]]
        longest = max(runs, key=len)
        errors = np.full((len(runs), len(longest)), np.nan)
        for number, rows in enumerate(runs):
            values = [np.nan if row.get("diverged") else row["rel_err"] for row in rows]
            errors[number, : len(values)] = values
        return Curve(
            rounds=np.array([row["round"] for row in longest], float),
            errors=errors,
            up=np.array([row["up_bytes"] for row in longest], float),
            down=np.array([row["down_bytes"] for row in longest], float),
            diverged=[rows[-1]["round"] if rows[-1].get("diverged") else None for rows in runs],
            seconds=float(longest[-1]["seconds"]),
        )

    def until(self, rounds: int) -> Curve:
        """The beginning of the run; a seed that diverged later had not done so yet."""
        rows = int(np.searchsorted(self.rounds, rounds, side="right"))
        diverged = [t if t is not None and t <= rounds else None for t in self.diverged]
        return Curve(
            self.rounds[:rows], self.errors[:, :rows], self.up[:rows], self.down[:rows], diverged, self.seconds
        )

    def tail(self, share: float) -> Tail:
        """Mean over the last part of the evaluations, for each seed that did not diverge."""
        last = max(1, int(self.errors.shape[1] * share))
        alive = [number for number, t in enumerate(self.diverged) if t is None]
        means = self.errors[alive, -last:].mean(1) if alive else np.array([np.nan])
        spread = float(means.std(ddof=1)) if len(means) > 1 else math.nan
        return Tail(float(means.mean()), spread, len(self.diverged) - len(alive), len(self.diverged))


@dataclass(frozen=True)
class Tail:
    """Tail error over seeds: mean, standard deviation, and how many seeds diverged."""

    mean: float
    spread: float
    diverged: int
    seeds: int

    def __str__(self) -> str:
        if self.diverged == self.seeds:
            return "diverged"
        text = number(self.mean) if math.isnan(self.spread) else f"{number(self.mean)} ± {number(self.spread, 0)}"
        return f"{text} ({self.diverged} of {self.seeds} diverged)" if self.diverged else text


@dataclass(frozen=True)
class Verdict:
    """Ours against the paper's number."""

    holds: bool | None  # None: nothing to compare
    text: str


def number(value: float, digits: int = 2) -> str:
    """6.23e-3, the way the tables write it."""
    if not math.isfinite(value):
        return "NaN"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def judge(ours: Tail, paper: float | str | None) -> Verdict:
    """Whether a cell reproduces."""
    if paper is None:
        return Verdict(None, "")
    if paper == "nan":
        if ours.diverged == ours.seeds:
            return Verdict(True, "diverges, as in the paper")
        return Verdict(False, f"NaN in the paper; {ours.diverged} of {ours.seeds} seeds diverged here")
    if ours.diverged:
        return Verdict(False, f"diverged in {ours.diverged} of {ours.seeds} seeds; finite in the paper")
    change = ours.mean / float(paper) - 1
    return Verdict(abs(change) <= CLOSE, f"{change * 100:+.0f} %")


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    row: dict[str, Any]
    variant: str
    lr: float
    ours: Tail
    paper: float | str | None
    verdict: Verdict
    note: str = ""


class Results:
    """All curves of a study, read when first asked for."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self._curves: dict[str, Curve] = {}

    def curve(self, case: Case) -> Curve:
        """The curve of a case; read again when what was read before was a shorter form of the run."""
        held = self._curves.get(case.key)
        if held is None or (held.rounds[-1] < case.rounds and None in held.diverged):
            held = self._curves[case.key] = Curve.read(self.folder / case.key)
        if held.rounds[-1] < case.rounds and None in held.diverged:
            there = int(held.rounds[-1])
            raise CheckpointError(f"run {case.key!r} has {there} of {case.rounds} rounds; reproduce again")
        return held.until(case.rounds)

    def tail(self, case: Case) -> Tail:
        """The tail error of a case."""
        return self.curve(case).tail(self.study.settings["tail"])

    def seconds(self) -> float:
        """Computing time of all runs read so far."""
        return sum(curve.seconds for curve in self._curves.values())

    def searched(self) -> dict[float, dict[float, float]]:
        """Final error of each candidate step at each level: het → lr → mean over seeds, nan where any seed diverged."""
        out: dict[float, dict[float, float]] = {}
        for case in self.study.searches():
            out.setdefault(case.het, {})[case.lr] = float(self.curve(case).errors[:, -1].mean())
        return out

    def steps(self) -> dict[float, float]:
        """The step that the search chose for each level."""
        return {het: min(found, key=lambda lr: _or_inf(found[lr])) for het, found in self.searched().items()}

    def best(self, variant: str, row: dict[str, Any], grid: list[float], rounds: int) -> tuple[float, Tail, str]:
        """(step, tail, mark) of a variant at its own best step; `*` marks the edge of the grid."""
        tails = {lr: self.tail(self.study.case(variant, row, lr, rounds)) for lr in grid}
        lr = min(grid, key=lambda lr: _or_inf(tails[lr].mean) if not tails[lr].diverged else math.inf)
        return lr, tails[lr], "*" if lr in (grid[0], grid[-1]) else ""

    def reach(self, part: Any, row: dict[str, Any], variant: str) -> tuple[float, float, float] | None:
        """(rounds, MB up, MB both ways) until the mean error is first below the row's target; None: never."""
        curve = self.curve(self.study.case(variant, row, self.steps()[row["het"]], self.study.rounds(part)))
        below = np.flatnonzero(curve.errors.mean(0) < row["target"])
        if not len(below):
            return None
        first = below[0]
        return curve.rounds[first], curve.up[first] / 1e6, (curve.up[first] + curve.down[first]) / 1e6

    def cells(self, part: Any) -> list[list[Cell]]:
        """The table of a part: rows of cells."""
        steps, rounds = self.steps(), self.study.rounds(part)
        table = []
        for row in part.table["rows"]:
            cells = []
            for variant in part.variants(row):
                note = ""
                if part.kind == "tuned":
                    lr, ours, note = self.best(variant, row, part.table["grid"], rounds)
                else:
                    lr = steps[row["het"]]
                    ours = self.tail(self.study.case(variant, row, lr, rounds))
                paper = row.get("paper", {}).get(variant)
                verdict = Verdict(None, "short run") if self.study.quick and paper is not None else judge(ours, paper)
                cells.append(Cell(row, variant, lr, ours, paper, verdict, note))
            table.append(cells)
        return table


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
