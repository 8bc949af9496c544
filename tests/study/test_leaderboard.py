"""The leaderboard and the evidence: entries follow the registry, pages follow the results, and slices are run again."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shlex
from pathlib import Path

import evidence
import leaderboard
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedspan.cli.app import app
from fedspan.core import registry
from fedspan.study import results
from fedspan.study.budget import Budget
from fedspan.study.conduct import conduct

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on the hospitals, in a few rounds, as the leaderboard keeps them."""
    place = tmp_path_factory.mktemp("board")
    study = leaderboard.study("tcga_brca", ["fedavg", "ssf"])
    parts = []
    for part in study.parts:
        variants = [dataclasses.replace(v, grid={"method.lr": [0.03]}) for v in part.variants]
        assert part.budget is not None
        short = Budget.parse(
            [text for text in part.budget.texts() if "rounds" not in text] + ["rounds=10"]
        )
        parts.append(dataclasses.replace(part, variants=variants, seeds=1, budget=short))
    study = dataclasses.replace(study, parts=parts)
    conduct(
        study, place / "made", line="python leaderboard.py", formats=("html", "md"), console=QUIET
    )
    leaderboard.commit(place / "made", place / "kept" / "tcga_brca")
    return place / "kept"


@pytest.mark.parametrize("task", leaderboard.names())
def test_every_registered_method_plays_or_is_left_out_with_a_reason(task: str) -> None:
    assert set(registry.choices("method")) <= set(leaderboard.entries())
    table = leaderboard.table_of(task)
    assert set(table["left_out"]) <= set(leaderboard.entries())
    assert all(table["left_out"].values())
    assert re.search(r"^# Estimate: .*\d", leaderboard.text_of(task), re.M)
    if task == "tcga_brca":  # whose data come with fedspan
        study = leaderboard.study(task)
        for label in leaderboard.entries():
            assert (
                any(v.label == label for v in study.parts[0].variants)
                or f"{label}, " in study.about
            )
        assert {part.tune_by for part in study.parts} == {"validation_loss"}


def test_a_page_has_a_rank_and_a_link_for_every_number(made: Path) -> None:
    text = leaderboard.page(made)
    rows = re.findall(r"^\| (fedavg|ssf) \|(.*)\|$", text, re.M)
    assert [name for name, _ in rows] in (["fedavg", "ssf"], ["ssf", "fedavg"])
    for name, cells in rows:
        found = re.findall(
            r"(\d) ?\S* · \[([^]]+)\]\(results/leaderboard/tcga_brca/runs.md#(\w+)\)",
            cells.replace("*", ""),
        )
        assert len(found) == 3
        assert {anchor for *_, anchor in found} == {name}
    assert "python benchmarks/leaderboard.py a9a" in text  # which was not run


def test_the_command_of_a_number_makes_its_run_again(made: Path) -> None:
    lines = re.findall(r"^    fedspan (.*)$", (made / "tcga_brca/runs.md").read_text(), re.M)
    assert len(lines) == 6
    again = CliRunner().invoke(app, shlex.split(lines[-1]), standalone_mode=False)
    assert again.return_value == 0, again.output


def test_evidence_tells_a_changed_number_from_one_of_an_older_version(
    made: Path, tmp_path: Path
) -> None:
    place = made / "tcga_brca"
    found = list(evidence.slices(place, 60.0))
    assert [name.split("/")[0] for name, *_ in found] == ["rounds", "up", "total"]
    _, one, rounds = found[0]
    assert rounds == 10
    assert evidence.check(one, rounds)[0] == "same"
    data = json.loads(gzip.decompress((place / results.CURVES).read_bytes()))
    for run in data["runs"]:
        run["metrics"]["c_index"][0][1] += 0.01
    (tmp_path / results.STUDY).write_bytes((place / results.STUDY).read_bytes())
    for version, word in ((data["versions"]["fedspan"], "DIFFERS"), ("0.0.1", "older")):
        data["versions"]["fedspan"] = version
        (tmp_path / results.CURVES).write_bytes(gzip.compress(json.dumps(data).encode()))
        _, one, _ = next(evidence.slices(tmp_path, 60.0))
        assert evidence.check(one, 5)[0] == word
        assert evidence.check(one, 5, tolerance=0.1)[0] == "same"


def test_the_committed_page_is_made_of_the_committed_results() -> None:
    assert leaderboard.PAGE.read_text("utf-8") == leaderboard.page()
