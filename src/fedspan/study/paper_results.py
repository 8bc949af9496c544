"""What a study's runs came to: curves read from their histories, tail means, and verdicts against the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedspan.core.errors import CheckpointError
from fedspan.study import pool
from fedspan.study.curves import Curve, Tail
from fedspan.study.paper_study import Case, Study
from fedspan.study.tables import number

CLOSE = 0.15  # a cell within 15 % of the paper's counts as reproduced


@dataclass(frozen=True)
class Verdict:
    """Ours against the paper's number."""

    holds: bool | None  # None: nothing to compare
    text: str


def shown(tail: Tail) -> str:
    """A tail error the way the tables write it."""
    return tail.text(number(tail.mean), number(tail.spread, 0))


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
            files = self.study.job(case, self.folder).histories()
            held = self._curves[case.key] = Curve.read(files, "rel_err")
        if held.rounds[-1] < case.rounds and None in held.diverged:
            there = int(held.rounds[-1])
            raise CheckpointError(f"run {case.key!r} has {there} of {case.rounds} rounds; reproduce again")
        return held.until(case.rounds)

    def tail(self, case: Case) -> Tail:
        """The tail error of a case."""
        curve = self.curve(case)
        return curve.tail(max(1, int(len(curve.rounds) * self.study.settings["tail"])))

    def seconds(self) -> float:
        """Computing time of the study's runs."""
        cases = [*self.study.searches(), *self.study.cases(self.steps())]
        return pool.seconds(self.study.job(case, self.folder) for case in cases)

    def searched(self) -> dict[float, dict[float, float]]:
        """Final error of each candidate step at each level: het → lr → mean over seeds, nan where any seed diverged."""
        out: dict[float, dict[float, float]] = {}
        for case in self.study.searches():
            out.setdefault(case.het, {})[case.lr] = float(self.curve(case).values[:, -1].mean())
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
        below = np.flatnonzero(curve.values.mean(0) < row["target"])
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
