"""The short form of all speed benchmarks, as one table.

    python benchmarks/bench.py [toy simulation …] [--check]

Every file of this directory that defines `short()` takes part, each in a process of its own with one thread.
Prints the table and writes it to out/bench.md. With --check the exit status is 1 unless all rows are met.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str  # the problem and what is measured, with its unit: "SSF on the toy problem, µs per round"
    peer: str  # the other program and its figure: "NumPy 1650"; "" where there is none
    fedspan: str  # fedspan's figure, in the same unit
    ratio: float | None  # how many times better fedspan is, or its cost as a multiple; None: not measured here
    wanted: float  # the bound of the ratio
    larger_is_better: bool = True  # whether the ratio must be at least `wanted`, or at most

    @property
    def met(self) -> str:
        """Whether the ratio keeps its bound, as the table says it."""
        if self.ratio is None:
            return "not measured"
        return "yes" if (self.ratio >= self.wanted if self.larger_is_better else self.ratio <= self.wanted) else "NO"

    def cells(self) -> list[str]:
        """The texts of the columns."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        bound = f"{'≥' if self.larger_is_better else '≤'} {self.wanted:g}"
        return [self.what, self.peer, self.fedspan, ratio, bound, self.met]


def cpu_times(contestants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least CPU seconds of one call of each contestant. They take turns, so that a slow spell hits all of them."""
    for work in contestants.values():
        work()  # the first call pays for caches
    best = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeats):
        for name, work in contestants.items():
            gc.collect()
            began = time.process_time()
            work()
            best[name] = min(best[name], time.process_time() - began)
    return best


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = [["what", "peer", "fedspan", "ratio", "wanted", "met"], ["---"] * 6]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in head + [row.cells() for row in rows])


def files() -> list[str]:
    """The benchmarks that have a short form."""
    return sorted(path.stem for path in HERE.glob("*.py") if "def short()" in path.read_text() and path.stem != "bench")


def rows_of(name: str) -> list[Row]:
    """The rows of one file."""
    sys.path.insert(0, str(HERE))
    rows: list[Row] = importlib.import_module(name).short()
    return rows


def main() -> None:
    """Run the files, one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=f"which benchmarks; by default all: {', '.join(files())}")
    parser.add_argument("--check", action="store_true", help="exit with status 1 unless every row is met")
    args = parser.parse_args()
    if unknown := set(args.names) - set(files()):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(files())}")
    rows: list[Row] = []
    for name in args.names or files():
        with ProcessPoolExecutor(1, get_context("spawn")) as alone:
            rows += alone.submit(rows_of, name).result()
    text = table(rows)
    print(text)
    out = HERE.parent / "out"
    out.mkdir(exist_ok=True)
    (out / "bench.md").write_text(text + "\n")
    if args.check and any(row.met != "yes" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
