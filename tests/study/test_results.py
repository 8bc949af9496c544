"""Results as data: a report is made from two files alone, and runs are found by what decides their numbers."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedspan.core import registry
from fedspan.core.errors import CheckpointError, FedspanError, SpecError
from fedspan.core.spec import Spec
from fedspan.engine.run_dir import lock_dir
from fedspan.study import conduct, jobs, report, results
from fedspan.study.model import study_of
from fedspan.study.request import requested
from fedspan.study.tuning import Runs
from support.comparisons import BASE, spec_file
from support.files import damage
from support.loops import SMALL

QUIET = Console(quiet=True)
ROWS = {
    "title": "Rows",
    "about": "Two levels of `het`.",
    "metric": "rel_err",
    "seeds": 2,
    "within": 0.15,
    "base": {k: v for k, v in BASE.items() if k != "method"} | {"task": SMALL | {"het": "$het"}},
    "variants": {
        "fedavg": {"method": {"name": "fedavg"}, "color": "#E69F00"},
        "ssf": {"label": "SSF | small", "method": {"name": "ssf", "space": {"name": "gaussian", "rank": "$rank"}}},
    },
    "set": {"method.local_steps": 2},
    "parts": {
        "search": {"title": "Search", "variants": ["fedavg"], "grid": {"method.lr": [0.01, 0.05]},
                   "rows": [{"het": 0.0, "published": {"fedavg": {"method.lr": 0.05}}}, {"het": 1.0}]},
        "ranks": {"title": "Ranks", "tuned_in": "search.fedavg", "tail": 0.5, "rows": [
            {"het": 0.0, "rank": 3, "published": {"fedavg": 0.5, "ssf": "nan"}}, {"het": 1.0, "rank": 6}]},
        "bytes": {"title": "Bytes", "tuned_in": "search.fedavg",
                  "rows": [{"het": h, "rank": 3, "target": 0.9} for h in (0.0, 1.0)]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with rows, and a plain comparison."""
    place = tmp_path_factory.mktemp("made")
    formats = list(report.FORMATS)
    conduct.conduct(
        study_of(ROWS), place / "rows", jobs=1, formats=formats, line="fedspan …", console=QUIET
    )
    plain = requested(
        spec_file(place), methods=["fedavg,ssf as A | B"], grids=["lr=0.01,0.05"], seeds=2
    )
    conduct.conduct(plain, place / "plain", resume=False, console=QUIET, line="", formats=formats)
    return place


@pytest.mark.parametrize("name", ["rows", "plain"])
def test_a_report_needs_no_runs(made: Path, name: str, tmp_path: Path) -> None:
    """Page and tables come out to the byte as when the study was made."""
    for file in (results.STUDY, results.CURVES):
        shutil.copy(made / name / file, tmp_path)
    report.report([tmp_path], tmp_path / "again", list(report.FORMATS), None, "")
    for file in ("index.html", "tables.md", "results.csv"):
        assert (tmp_path / "again" / file).read_bytes() == (made / name / file).read_bytes(), file
    drawn = sorted(path.name for path in (made / name / "figures").iterdir())
    assert sorted(path.name for path in (tmp_path / "again" / "figures").iterdir()) == drawn


def test_every_part_has_its_table_figure_and_section(made: Path) -> None:
    page, text = ((made / "rows" / name).read_text() for name in ("index.html", "tables.md"))
    for title, name in (("Search", "search"), ("Ranks", "ranks"), ("Bytes", "bytes")):
        assert f"<h2>{title}</h2>" in page
        assert f"## {title}" in text
        assert (made / "rows" / "figures" / f"{name}.png").stat().st_size > 5_000
    assert page.count('<figure class="chart"') == 3
    assert "| het | rank | fedavg | SSF \\| small |" in text
    assert "published lr 0.05" in text
    assert "kB up" in text
    assert "Published numbers that our results reproduce within 15 %" in text
    assert "Two levels of <code>het</code>" in page
    for outside in ("http://", "https://", "src=", "<link", "@import", "url("):
        assert outside not in page.replace("http://www.w3.org/2000/svg", "").replace(
            "url(#inside", ""
        ), outside


def test_numbers_survive_the_files(made: Path) -> None:
    """Results in full, although curves are thinned."""
    loaded = results.load(made / "rows")
    fresh = results.collect(study_of(ROWS), made / "rows" / "runs", "")
    for name, entries in fresh.entries.items():
        for ours, theirs in zip(entries, loaded.entries[name], strict=True):
            assert (ours.variant, ours.row, ours.point) == (
                theirs.variant,
                theirs.row,
                theirs.point,
            )
            assert ours.final.mean == pytest.approx(theirs.final.mean, rel=1e-7)
            assert ours.final.spread == pytest.approx(theirs.final.spread, rel=1e-6)
            assert ours.reached == theirs.reached
            assert [one.point for one in ours.tried] == [one.point for one in theirs.tried]


def test_shared_runs_are_written_once(made: Path) -> None:
    data = json.loads(gzip.decompress((made / "rows" / results.CURVES).read_bytes()))
    assert sum(map(len, data["parts"].values())) == 2 + 4 + 4
    assert len(data["runs"]) == 2 + 3  # FedAvg at two levels; SSF at rank 3 twice and at rank 6


def test_long_curves_are_thinned_and_results_are_not(tmp_path: Path) -> None:
    table = {key: ROWS[key] for key in ("metric", "variants", "set")} | {"seeds": 1, "tail": 0.5}
    base = BASE | {
        "rounds": 900,
        "eval_every": 1,
        "method": {"name": "fedavg", "lr": 0.02, "local_steps": 1},
    }
    study = study_of(table | {"base": base, "variants": {"fedavg": {}}})
    conduct.conduct(study, tmp_path, jobs=1, formats=["md"], line="", console=QUIET)
    (entry,) = results.load(tmp_path).entries["comparison"]
    assert len(entry.series.curve("rel_err").rounds) < 250
    runs = Runs(study, tmp_path / "runs")
    whole = runs.cells[0].curve
    assert len(whole.rounds) == 901
    assert entry.final.mean == pytest.approx(whole.values[0, -450:].mean(), rel=1e-7)


@pytest.mark.parametrize(
    "change",
    [lambda data: gzip.compress(b'{"parts": {}}'), lambda data: data[:-9], lambda data: b"{}"],
)
def test_damaged_data_is_named(
    made: Path, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    shutil.copy(made / "rows" / results.STUDY, tmp_path)
    (tmp_path / results.CURVES).write_bytes(change((made / "rows" / results.CURVES).read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"curves.json.gz' does not hold the results of study.toml"
    ):
        results.load(tmp_path)


COMMITTED = Path(__file__).parents[2] / "docs/results"


@pytest.mark.parametrize(
    "study", sorted(COMMITTED.rglob(results.STUDY)), ids=lambda path: path.parent.name
)
def test_the_data_of_a_committed_study_is_small_and_makes_its_tables(
    tmp_path: Path, study: Path
) -> None:
    """`fedspan report DIR --format html,md` makes them again."""
    assert all(path.stat().st_size < 1_000_000 for path in study.parent.rglob("*"))
    report.report([study.parent], tmp_path, ["md"], None, "")
    assert (tmp_path / "tables.md").read_text() == (study.parent / "tables.md").read_text()


@pytest.mark.parametrize("name", ["bytes", "control", "mnist", "options", "regression", "toy"])
def test_specs_of_committed_runs_are_read(name: str) -> None:
    """A setting that goes must go from the records too, or their runs can never be made again."""
    found = results.load(COMMITTED / name)
    for entries in found.entries.values():
        for entry in entries:
            Spec.from_table(entry.series.spec)


def test_the_committed_pages_have_one_look() -> None:
    """That of `fedspan report`; `python studies/theory/reproduce.py` writes the page of the theory."""
    pages = sorted(COMMITTED.rglob("index.html"))
    assert len(pages) >= 16
    assert {page.parent for page in pages} == {page.parent for page in COMMITTED.rglob("tables.md")}
    looks = {re.findall(r"<style>(.*?)</style>", page.read_text(), re.S)[0] for page in pages}
    assert len(looks) == 1
    assert all('<section class="verdict"' in page.read_text() for page in pages)


def test_a_study_of_several_parts_is_not_compared(made: Path) -> None:
    with pytest.raises(SpecError, match="is a study of 3 parts"):
        requested(made / "rows" / results.STUDY)


# ---- what decides the numbers


def test_a_setting_that_is_added_later_does_not_hide_old_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version of a method and of the task has one more setting each, with a default."""
    study = requested(spec_file(tmp_path), seeds=1)
    (part,) = study.parts
    conduct.make_runs(study, tmp_path / "runs", jobs=1, console=QUIET)
    before = Runs(study, tmp_path / "runs").final()
    for kind, name in (("method", "ssf"), ("task", "regression")):
        old: Any = registry.choices(kind)[name]
        new = dataclasses.make_dataclass(
            old.__name__, [("later", float, dataclasses.field(default=1.0))], bases=(old,), frozen=True, kw_only=True,
            namespace={"__module__": old.__module__},
        )  # fmt: skip
        monkeypatch.setitem(registry._known[kind], name, new)
    spec = part.spec(part.variants[0], {})
    assert spec.table()["method"]["later"] == spec.table()["task"]["later"] == 1.0
    after = Runs(study, tmp_path / "runs").final()
    assert [job.run_dir for job in after] == [job.run_dir for job in before]
    assert all(job.complete() for job in after)
    changed = part.spec(part.variants[0], {"method.later": 2.0})
    assert jobs.place_of(changed, tmp_path) != jobs.place_of(spec, tmp_path)


def test_seed_length_and_engine_do_not_decide_where_a_run_is(tmp_path: Path) -> None:
    spec, *others = (
        Spec.from_table(BASE | more)
        for more in (
            {},
            {"rounds": 99},
            {"seed": 3},
            {"engine": {"simulate": "loop"}},
            {"method": BASE["method"]},
        )
    )
    assert {jobs.place_of(one, tmp_path) for one in others} == {jobs.place_of(spec, tmp_path)}
    assert jobs.place_of(Spec.from_table(BASE | {"batch_size": 5}), tmp_path) != jobs.place_of(
        spec, tmp_path
    )


def test_a_study_that_another_process_makes_is_left_alone(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "plain", tmp_path / "plain")
    before = {
        name: (tmp_path / "plain" / name).read_bytes() for name in (results.STUDY, results.CURVES)
    }
    with lock_dir(tmp_path / "plain"), pytest.raises(SpecError, match="another process"):
        conduct.conduct(
            study_of(ROWS), tmp_path / "plain", jobs=1, formats=["md"], line="", console=QUIET
        )
    assert {name: (tmp_path / "plain" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("how", ["delete", "cut", "empty", "zeros", "double", "flip"])
@pytest.mark.parametrize("name", ["curves.json.gz", "study.toml"])
def test_damaged_results_are_refused(name: str, how: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "plain", tmp_path / "o", ignore=shutil.ignore_patterns("runs"))
    damage(tmp_path / "o" / name, how)
    with pytest.raises(FedspanError) as refused:
        results.load(tmp_path / "o")
    assert "\n" not in str(refused.value)


def test_no_flipped_bit_of_a_studys_file_is_believed(made: Path, tmp_path: Path) -> None:
    """A number that became another one is found by the hash that the curves hold; only a comment may change."""
    for name in ("study.toml", "curves.json.gz"):
        shutil.copy(made / "plain" / name, tmp_path)
    raw, whole, refused = (tmp_path / "study.toml").read_bytes(), results.load(tmp_path).study, 0
    for place in range(0, len(raw), len(raw) // 60):
        (tmp_path / "study.toml").write_bytes(
            raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        )
        try:
            assert results.load(tmp_path).study == whole
        except FedspanError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("how", ["delete", "cut", "flip"])
@pytest.mark.parametrize("name", ["history.jsonl", "result.json"])
def test_damaged_runs_are_run_again_or_refused(
    name: str, how: str, made: Path, tmp_path: Path
) -> None:
    """A comparison that is resumed with a damaged run gives the same results, or says which file is damaged."""
    shutil.copytree(made / "plain", tmp_path / "plain")
    damage(min((tmp_path / "plain").rglob(name)), how)
    plain = requested(
        spec_file(tmp_path), methods=["fedavg,ssf as A | B"], grids=["lr=0.01,0.05"], seeds=2
    )
    try:
        conduct.conduct(
            plain, tmp_path / "plain", resume=True, console=QUIET, line="", formats=["md"]
        )
    except FedspanError as error:
        said = str(error)
    else:
        said = ""
        before, after = (results.load(place / "plain") for place in (made, tmp_path))
        ends = [
            [(one.variant, one.ends) for one in found.entries["comparison"]]
            for found in (before, after)
        ]
        assert ends[0] == ends[1]
    assert "\n" not in said
    assert (how == "flip" and name == "history.jsonl") <= bool(said), (
        "a changed line is never read as a result"
    )
