"""Tables of a study as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from fedspan.study import tables as compare
from fedspan.study.paper_results import Cell, Results, shown
from fedspan.study.paper_study import Part
from fedspan.study.tables import number

SIGNS = {True: "✓", False: "✗", None: ""}


def markdown(results: Results, part: Part) -> str:
    """One part as Markdown."""
    head = f"## {part.table['title']}\n\n{part.table['about']}\n\n"
    return head + compare.markdown(wide(results, part))


def wide(results: Results, part: Part) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of a part, one column a variant."""
    if part.kind == "search":
        return _search(results, part)
    if part.kind == "reach":
        return _reach(results, part)
    table = results.cells(part)
    names = list(dict.fromkeys(cell.variant for cells in table for cell in cells))
    rows = []
    for cells in table:
        by_name = {cell.variant: text(cell, tuned=part.kind == "tuned") for cell in cells}
        row = cells[0].row
        rows.append([f"{row['het']:g}", str(row["rank"]), *(by_name.get(name, "") for name in names)])
    return ["het", "r", *(results.study.label(name) for name in names)], rows


def text(cell: Cell, tuned: bool) -> str:
    """A cell in words: ours, the paper's, and whether they agree."""
    if tuned:
        return f"{shown(cell.ours)} at η = {cell.lr:g}{cell.note}"
    if cell.paper is None:
        return shown(cell.ours)
    paper = "NaN" if cell.paper == "nan" else number(float(cell.paper))
    return f"{shown(cell.ours)} (paper {paper}{_spaced(SIGNS[cell.verdict.holds])})"


def brief(cell: Cell) -> str:
    """A cell for the terminal: the mean, and the paper's number in brackets."""
    ours = "diverged" if cell.ours.diverged == cell.ours.seeds else number(cell.ours.mean)
    if cell.paper is None:
        return ours
    paper = "NaN" if cell.paper == "nan" else number(float(cell.paper))
    return f"{ours} ({paper}{_spaced(SIGNS[cell.verdict.holds])})"


def long(results: Results, part: Part) -> str:
    """One part as CSV, a line a cell."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    if part.kind == "search":
        table.writerow(["het", "lr", "final_error", "chosen", "paper"])
        steps = results.steps()
        for row in part.table["rows"]:
            for lr, error in results.searched()[row["het"]].items():
                table.writerow([row["het"], lr, f"{error:.6e}", steps[row["het"]] == lr, row["paper"]])
        return out.getvalue()
    if part.kind == "reach":
        table.writerow(["het", "rank", "target", "variant", "rounds", "mb_up", "mb_both"])
        for row in part.table["rows"]:
            for variant in part.variants(row):
                found = results.reach(part, row, variant) or ("", "", "")
                table.writerow([row["het"], row["rank"], row["target"], variant, *found])
        return out.getvalue()
    table.writerow(
        ["het", "rank", "variant", "lr", "tail_mean", "tail_sd", "seeds", "diverged", "paper", "reproduced", "note"]
    )
    for cells in results.cells(part):
        for c in cells:
            where: list[Any] = [c.row["het"], c.row["rank"], c.variant, c.lr]
            ours = [f"{c.ours.mean:.6e}", f"{c.ours.spread:.2e}", c.ours.seeds, c.ours.diverged]
            held = "" if c.verdict.holds is None else c.verdict.holds
            table.writerow([*where, *ours, c.paper or "", held, c.verdict.text or c.note])
    return out.getvalue()


def score(results: Results) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Variant → (cells that reproduce, cells compared) over all tables, and the cells that do not, in words."""
    counts: dict[str, tuple[int, int]] = {}
    missed = []
    for part in results.study.parts:
        for cell in (c for cells in results.cells(part) for c in cells) if part.kind == "table" else ():
            if cell.verdict.holds is None:
                continue
            good, total = counts.get(cell.variant, (0, 0))
            counts[cell.variant] = (good + cell.verdict.holds, total + 1)
            if not cell.verdict.holds:
                where = f"{results.study.label(cell.variant)}, het {cell.row['het']:g}, r = {cell.row['rank']}"
                missed.append(f"{where}: {cell.verdict.text}")
    return counts, list(dict.fromkeys(missed))


def score_line(results: Results) -> str:
    """How many of the paper's cells each column reproduces, in one line."""
    counts, _ = score(results)
    if not counts:
        return "A short form, so no verdicts: the paper's numbers are at 25,000 rounds."
    parts = ", ".join(f"{results.study.label(name)} {good} of {total}" for name, (good, total) in counts.items())
    return f"Cells within 15 % of the paper's tables: {parts}."


def _search(results: Results, part: Part) -> tuple[list[str], list[list[str]]]:
    grid, found, steps = part.table["grid"], results.searched(), results.steps()
    rows = []
    for row in part.table["rows"]:
        het, chosen = row["het"], steps[row["het"]]
        errors = [number(found[het][lr]).replace("NaN", "diverged") for lr in grid]
        rows.append([f"{het:g}", *errors, f"{chosen:g}", f"{row['paper']:g}{_spaced(SIGNS[chosen == row['paper']])}"])
    return ["het", *(f"η = {lr:g}" for lr in grid), "chosen", "paper"], rows


def _reach(results: Results, part: Part) -> tuple[list[str], list[list[str]]]:
    names = part.table["variants"]
    rows = []
    for row in part.table["rows"]:
        cells = [results.reach(part, row, name) for name in names]
        texts = ["not reached" if c is None else f"{c[1]:.3g} up, {c[2]:.3g} both" for c in cells]
        rows.append([f"{row['het']:g}", str(row["rank"]), f"{row['target']:g}", *texts])
    return ["het", "r", "error", *(f"{results.study.label(name)}, MB" for name in names)], rows


def _spaced(sign: str) -> str:
    return f" {sign}" if sign else ""
