"""A study as text: shared settings, method variants and parts (tables, figures, searches), and the runs they need.

Two parts that need the same run share it, and a shorter run is read off a longer one, whose beginning it is. Each run
covers all seeds as one batched computation.
"""

from __future__ import annotations

import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedspan.api.spec import Spec
from fedspan.core.errors import at_least, one_of
from fedspan.core.extras import needs
from fedspan.study.pool import Job

SPECS = Path(__file__).parent / "specs"


def names() -> list[str]:
    """The studies there are: files of specs/ without a part's number."""
    return sorted(file.stem for file in SPECS.glob("*.toml") if "_" not in file.stem)


def kind(name: str) -> str:
    """What kind of study NAME is: `tables` of the paper, a `benchmark` of networks, or a `trial` of its theory."""
    one_of("study", name, names())
    return str(tomllib.loads((SPECS / f"{name}.toml").read_text())["kind"])


def made(folder: Path) -> Path:
    """The folder, which is there now."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def prepared(runs: Path, jobs: int, again: bool) -> Path:
    """The folder of a study's runs, once all that it needs is there; `again` forgets the earlier ones."""
    at_least("jobs", jobs, 1)
    needs("plot", "jinja2", "matplotlib")
    if again:
        shutil.rmtree(runs, ignore_errors=True)
    return runs


def command(name: str, out: Path, *, jobs: int, seeds: int | None, scale: str) -> str:
    """The command that makes a study again; without `seeds` each part has its own number of them."""
    asked = "" if seeds is None else f" --seeds {seeds}"
    return f"fedspan reproduce {name} --scale {scale}{asked} --jobs {jobs} --out {shlex.quote(out.name)}"


@dataclass(frozen=True)
class Case:
    """One run of a part: which variant, where, with what step, and how long."""

    variant: str
    het: float
    rank: int | None
    lr: float
    rounds: int

    @property
    def key(self) -> str:
        """Its folder name, whatever its length."""
        rank = "" if self.rank is None else f"_r{self.rank}"
        return f"{self.variant}{rank}_het{self.het:g}_lr{self.lr:g}"


@dataclass(frozen=True)
class Part:
    """One table, figure or search of a study, as its file says it."""

    name: str
    table: dict[str, Any]

    @property
    def kind(self) -> str:
        """search, table, reach or tuned."""
        return str(self.table["kind"])

    def variants(self, row: dict[str, Any]) -> list[str]:
        """The variants of a row, in order."""
        found: list[str] = row.get("variants") or self.table.get("variants") or [self.table["variant"]]
        return found


@dataclass(frozen=True)
class Study:
    """All parts of a study, in long or short form."""

    name: str
    settings: dict[str, Any]
    parts: list[Part]
    seeds: int
    quick: bool

    @staticmethod
    def load(name: str, seeds: int | None, scale: str | None) -> Study:
        """The study NAME: specs/NAME.toml and specs/NAME_*.toml. Its scales are `paper` and, in short, `smoke`."""
        one_of("study", name, names())
        scale = scale or "paper"
        one_of("scale", scale, ("paper", "smoke"))
        quick = scale == "smoke"
        if seeds is not None:
            at_least("seeds", seeds, 1)
        settings = tomllib.loads((SPECS / f"{name}.toml").read_text())
        files = sorted(SPECS.glob(f"{name}_*.toml"))
        parts = [Part(file.stem, tomllib.loads(file.read_text())) for file in files]
        return Study(name, settings, parts, seeds or (settings["quick"]["seeds"] if quick else 3), quick)

    def part(self, kind: str) -> Part:
        """The first part of a kind."""
        return next(part for part in self.parts if part.kind == kind)

    def color(self, variant: str) -> str:
        """A variant's color, the same in every figure."""
        return str(self.settings["variants"][variant]["color"])

    def label(self, variant: str) -> str:
        """A variant's name for people."""
        return str(self.settings["variants"][variant]["label"])

    def rounds(self, part: Part) -> int:
        """How long a part's runs are; the search keeps its length in the short form."""
        full = int(part.table.get("rounds", self.settings["base"]["rounds"]))
        short = self.quick and part.kind != "search"
        return max(1, full // int(self.settings["quick"]["rounds_divisor"])) if short else full

    def case(self, variant: str, row: dict[str, Any], lr: float, rounds: int) -> Case:
        """The run of a variant in a row; full-dimensional methods know no rank."""
        projector = self.settings["variants"][variant]["method"].get("projector", {"name": "identity"})
        subspace = projector["name"] != "identity"
        return Case(variant, row["het"], row["rank"] if subspace else None, lr, rounds)

    def spec(self, case: Case) -> Spec:
        """The spec of one run."""
        base = self.settings["base"]
        method = dict(self.settings["variants"][case.variant]["method"])
        if case.rank is not None:
            method["projector"] = {**method["projector"], "rank": case.rank}
        table = base | {
            "rounds": case.rounds,
            "method": method | {"lr": case.lr, "local_steps": 5},
            "task": base["task"] | {"het": case.het},
        }
        return Spec.from_table(table)

    def job(self, case: Case, runs: Path) -> Job:
        """The same as a job for the pool."""
        return Job(self.spec(case), runs / case.key, self.seeds)

    def searches(self) -> list[Case]:
        """The runs that decide which step the others take."""
        part = self.part("search")
        rows, grid = part.table["rows"], part.table["grid"]
        return [self.case(part.table["variant"], row, lr, self.rounds(part)) for row in rows for lr in grid]

    def cases(self, steps: dict[float, float]) -> list[Case]:
        """All other runs, each in the longest form that any part needs, longest first."""
        found: dict[str, Case] = {}
        for part in self.parts:
            if part.kind == "search":
                continue
            for row in part.table["rows"]:
                for variant in part.variants(row):
                    for lr in part.table["grid"] if part.kind == "tuned" else [steps[row["het"]]]:
                        one = self.case(variant, row, lr, self.rounds(part))
                        if one.key not in found or one.rounds > found[one.key].rounds:
                            found[one.key] = one
        return sorted(found.values(), key=lambda case: -case.rounds)
