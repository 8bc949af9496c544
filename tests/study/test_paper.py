"""The paper's study: every part runs in a short form, and verdicts say what was seen."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedspan.core.errors import CheckpointError
from fedspan.study import paper_reproduction as reproduction
from fedspan.study import paper_tables as tables
from fedspan.study.curves import Curve, Tail
from fedspan.study.paper_results import Results, judge, shown
from fedspan.study.paper_study import Case, Study, names
from fedspan.study.pool import execute
from fedspan.study.tables import number


def tiny(seeds: int = 2) -> Study:
    """25,000 rounds become 5, and the search 500 rounds still: it must find the paper's steps."""
    study = Study.load("toy", seeds, "smoke")
    study.settings["quick"]["rounds_divisor"] = 5000
    study.settings["base"]["eval_every"] = 1
    return study


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    reproduction.reproduce(tiny(), folder, jobs=1, again=False, console=Console(quiet=True))
    return folder


def test_every_part_gives_its_table_figure_and_place_on_the_page(out: Path) -> None:
    page, text = (out / "index.html").read_text(), (out / "tables.md").read_text()
    for part in tiny().parts:
        assert part.table["title"] in page
        assert part.table["title"] in text
        rows = list(csv.DictReader((out / "tables" / f"{part.name}.csv").read_text().splitlines()))
        assert len(rows) >= len(part.table["rows"])
        if part.kind != "search":
            assert (out / "figures" / f"{part.name}.png").stat().st_size > 5_000
            assert "<svg" in (out / "figures" / f"{part.name}.svg").read_text()
    assert page.count("<svg") == sum(part.kind != "search" for part in tiny().parts)
    for outside in ("http://", "https://", "src=", "<link", "@import"):
        assert outside not in page.replace("http://www.w3.org/", "").replace("https://matplotlib.org/", "").replace(
            "http://purl.org/", ""
        ).replace("http://creativecommons.org/", ""), outside


def test_the_search_finds_the_papers_steps(out: Path) -> None:
    assert Results(tiny(), out / "runs-quick").steps() == {0.1: 1e-2, 0.5: 1e-2, 2.0: 1e-3}


def test_what_is_done_is_not_run_again(out: Path) -> None:
    def stamps() -> dict[str, float]:
        return {str(p): p.stat().st_mtime for p in (out / "runs-quick").rglob("history.jsonl")}

    before = stamps()
    reproduction.reproduce(tiny(), out, jobs=1, again=False, console=Console(quiet=True))
    assert stamps() == before
    assert len(before) > 200


def test_runs_are_shared_between_parts() -> None:
    cases = tiny().cases({0.1: 1e-2, 0.5: 1e-2, 2.0: 1e-3})
    keys = [case.key for case in cases]
    assert len(keys) == len(set(keys))
    assert Case("scaffold", 2.0, None, 1e-3, 5) in cases
    assert Case("scaffold", 2.0, None, 1e-3, 1) not in cases  # the beginning of the one above


def test_a_shorter_run_is_the_beginning_of_a_longer_one(out: Path) -> None:
    results = Results(tiny(), out / "runs-quick")
    long, short = (results.curve(Case("ssf", 2.0, 20, 1e-3, rounds)) for rounds in (5, 1))
    assert short.rounds.tolist() == [0, 1]
    assert (short.values == long.values[:, :2]).all()
    with pytest.raises(CheckpointError, match="has 5 of 9 rounds"):
        results.curve(Case("ssf", 2.0, 20, 1e-3, 9))
    late = Curve(np.arange(3.0), np.array([[1.0, 2.0, np.nan]]), np.zeros(3), np.zeros(3), np.zeros(3), [2], [False])
    assert late.until(1).diverged == [None]
    assert late.until(2).tail(1).diverged == 1


def test_a_run_that_has_grown_is_read_again(out: Path, tmp_path: Path) -> None:
    """The search reads the first rounds of runs that later parts make longer."""
    case, longer = (Case("scaffold", 2.0, None, 1e-3, rounds) for rounds in (40, 60))
    study, results = tiny(), Results(tiny(), tmp_path)
    execute([study.job(case, tmp_path)], 1, Console(quiet=True), "")
    assert results.curve(case).rounds[-1] == 40
    assert not study.job(longer, tmp_path).complete()
    execute([study.job(longer, tmp_path)], 1, Console(quiet=True), "")
    assert study.job(longer, tmp_path).complete()
    assert results.curve(longer).rounds[-1] == 60


def test_bytes_to_reach_a_level(out: Path) -> None:
    results = Results(tiny(), out / "runs-quick")
    part = next(part for part in tiny().parts if part.kind == "reach")
    row = part.table["rows"][0] | {"target": 0.9}
    curve = results.curve(results.study.case("fedavg", row, 1e-2, 5))
    found = results.reach(part, row, "fedavg")
    assert found is not None
    place = list(curve.rounds).index(found[0])
    assert curve.values.mean(0)[place] < 0.9 <= curve.values.mean(0)[place - 1]
    assert found[1] == curve.up[place] / 1e6
    assert results.reach(part, row | {"target": 1e-9}, "fedavg") is None


def test_verdicts() -> None:
    close, far, dead = Tail(1.14e-3, 1e-5, 0, 3), Tail(1.2e-3, 1e-5, 0, 3), Tail(math.nan, math.nan, 3, 3)
    some = Tail(1e-3, 1e-5, 1, 3)
    assert judge(close, 1e-3).holds is True
    assert judge(far, 1e-3).holds is False
    assert judge(far, 1e-3).text == "+20 %"
    assert judge(dead, "nan").holds is True
    assert judge(close, "nan").holds is False
    assert judge(some, "nan").holds is False
    assert judge(some, 1e-3).holds is False
    assert judge(close, None).holds is None
    assert (shown(dead), shown(some)) == ("diverged", "1.00e-3 ± 1e-5 (1 of 3 diverged)")
    assert number(6.234e-3) == "6.23e-3"


def test_the_papers_numbers_are_all_there() -> None:
    """Three tables of 3, 5 and 3 rows; four methods each."""
    wanted = {"toy_2_heterogeneity": 3, "toy_3_dimension": 5, "toy_4_stability": 3}
    for part in tiny().parts:
        if part.name in wanted:
            assert len(part.table["rows"]) == wanted[part.name]
            for row in part.table["rows"]:
                methods = {"scaffold", "scaffold-paper", "fedavg", "ssf-paper", "fedsub", "fedsub-stale"}
                assert set(row["paper"]) == methods
    assert names() == ["cifar100", "mnist", "nlp", "theory", "toy"]


def test_a_long_study_counts_its_score(out: Path) -> None:
    """Pretend the short runs were the long ones: every compared cell gets a verdict."""
    study = tiny()
    object.__setattr__(study, "quick", False)
    study.settings["base"]["rounds"] = 5
    for part in study.parts:
        if part.kind != "search" and "rounds" in part.table:
            part.table["rounds"] //= 5000
    results = Results(study, out / "runs-quick")
    counts, missed = tables.score(results)
    assert {total for _, total in counts.values()} == {11}
    assert set(counts) == {"scaffold", "scaffold-paper", "fedavg", "ssf-paper", "fedsub", "fedsub-stale"}
    assert missed
    assert "Full-FedAvg" in tables.score_line(results)
