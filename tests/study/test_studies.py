"""The studies that come with fedspan: every scale is valid, and every study runs in small."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from rich.console import Console

from fedspan.api.run import run
from fedspan.cli import reproduce
from fedspan.core.errors import DataError, FedspanError, SpecError
from fedspan.core.spec import read_toml
from fedspan.data import sets
from fedspan.study import conduct, model, report
from fedspan.study.model import Part, Study, laid_over
from fedspan.study.tuning import Runs

QUIET = Console(quiet=True)
ROOT = Path(__file__).parents[2]
SCALES = {
    "flamby-brca": ["smoke", "full"],
    "flamby-heart": ["smoke", "full"],
    "mnist": ["smoke", "laptop"],
    "nlp": ["smoke", "laptop", "full"],
    "toy": ["smoke", "paper"],
} | {
    "cifar100": ["smoke", "laptop", "paper"],
    "options": ["smoke", "laptop", "full", "regression"],
    "privacy": ["smoke", "laptop"],
    "preconditioner": ["smoke", "laptop", "full"],
    "bytes": ["smoke", "laptop"],
    "control": ["smoke", "laptop", "full"],
    "flamby-brca": ["smoke", "full"],
}


def test_the_studies_there_are() -> None:
    assert model.names() == sorted(SCALES)
    for name in SCALES:
        assert name in str(reproduce.command.__doc__)
    with pytest.raises(SpecError, match="`study` must be one of"):
        model.committed("theory")


OWN = str(ROOT / "studies/a9a/a9a.toml")


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, one) for name, scales in SCALES.items() for one in scales]
    + [(OWN, "smoke"), (OWN, "full")],
)
def test_every_scale_makes_valid_specs(name: str, scale: str) -> None:
    """Every point of every grid in every row; and the study survives being written to a file."""
    study = model.committed(name, scale)
    for part in study.parts:
        free = dataclasses.replace(part, budget=None)  # a budget of bytes is planned on the data
        for row, variant in free.cells():
            for point in variant.points():
                assert free.spec(variant, point, row).rounds >= 2
        for names in part.claims:
            assert {part.variant(one).name for one in names} == set(names)
        for row in part.rows:
            assert {part.variant(one).name for one in row.published} == set(row.published)
    assert model.study_of(tomllib.loads(tomli_w.dumps(model.table_of(study)))) == study
    assert all(part.seeds == 7 for part in model.committed(name, scale, 7).parts)
    with pytest.raises(SpecError, match="scale"):
        model.committed(name, "huge")


def test_ssf_is_tuned_to_larger_steps_on_cifar100() -> None:
    """Its grid reaches to 1/ρ times that of SCAFFOLD."""
    part = model.committed("cifar100").parts[0]
    grids = {variant.name: variant.grid["method.lr"] for variant in part.variants}
    assert max(grids["ssf"]) >= 5 * max(grids["scaffold"])


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks/map").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_maps_are_studies_too(file: Path) -> None:
    (part,) = model.study_of(read_toml(file)).parts
    free = dataclasses.replace(
        part, budget=None
    )  # a budget of bytes is planned on the data, which may not be here
    for row, variant in free.cells():
        for point in variant.points():
            free.spec(variant, point, row)
    assert part.budget is not None


@pytest.mark.parametrize("name", ["mnist", "cifar100"])
def test_studies_of_networks_run_in_small(name: str, tmp_path: Path) -> None:
    study = model.committed(name, "smoke")
    if name == "mnist":  # two of seven parts
        study = dataclasses.replace(study, parts=study.parts[:1] + study.parts[4:5])
    conduct.conduct(
        study, tmp_path, jobs=1, formats=report.FORMATS, line="fedspan reproduce", console=QUIET
    )
    page, text = (tmp_path / "index.html").read_text(), (tmp_path / "tables.md").read_text()
    for part in study.parts:
        assert part.title.replace("'", "&#39;") in page
        assert part.title in text
        assert (tmp_path / "figures" / f"{part.name}.png").stat().st_size > 5_000
    assert page.count('<figure class="chart"') == len(study.parts)
    assert ("published, final" in text) == (name == "cifar100")


@pytest.mark.parametrize(
    "name", ["options", "nlp", "preconditioner", "privacy", "bytes", "control", OWN]
)
def test_every_other_study_runs_in_small_on_what_comes_with_fedspan(
    name: str, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as here:
        here.setenv("FEDSPAN_DATA", str(tmp_path / "none"))
        study = model.committed(name, "smoke")
        found = conduct.conduct(
            study, tmp_path, jobs=1, formats=["md"], line="fedspan reproduce", console=QUIET
        )
    assert not [
        line for entries in found.entries.values() for entry in entries for line in entry.failures
    ]


def test_a_study_without_its_data_names_the_command_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path / "none"))
    out = tmp_path / "out"
    wanted = {
        "mnist": "mnist",
        "cifar100": "cifar100",
        "privacy": "mnist",
        "options": "cifar100 mnist",
    }
    for name, command_line in wanted.items():
        with pytest.raises(DataError, match=f"run `fedspan data get {command_line}` first"):
            conduct.reproduce(
                name, out, scale="laptop", seeds=1, jobs=1, again=False, console=QUIET
            )
    assert not out.exists()
    (out / "runs").mkdir(parents=True)
    with pytest.raises(DataError, match="run `fedspan data get mnist` first"):
        conduct.reproduce("mnist", out, scale="laptop", seeds=1, jobs=1, again=True, console=QUIET)
    assert (out / "runs").exists()  # nor is anything deleted


def test_a_study_with_damaged_data_names_the_command_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSPAN_DATA", str(tmp_path))
    (tmp_path / "text").mkdir()
    for study, data, files in (
        ("mnist", "mnist", ["mnist_by_writer.npz"]),
        ("mnist", "mnist", [file.name for file in sets.find("mnist").files]),  # the official ones
        (
            "preconditioner",
            "shakespeare",
            ["text/shakespeare_roles.jsonl.gz", *sets.find("stories260k").made],
        ),
    ):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes(b"damaged")
        with pytest.raises(DataError, match=f"run `fedspan data get {data}`"):
            conduct.reproduce(
                study, tmp_path / "out", scale=None, seeds=1, jobs=1, again=False, console=QUIET
            )
        assert not (tmp_path / "out").exists()
        for file in files:
            (tmp_path / file).unlink()


def test_a_study_of_which_every_run_failed_ends_in_one_line(tmp_path: Path) -> None:
    study = model.committed("mnist", "smoke")
    wrong = {"task": {"classes": 20}}
    few = [dataclasses.replace(part, base=laid_over(part.base, wrong)) for part in study.parts[:2]]
    study = dataclasses.replace(study, parts=few)
    with pytest.raises(
        FedspanError, match=r"every run failed, the first one so: `task.classes` is 20"
    ):
        conduct.conduct(study, tmp_path, jobs=1, formats=report.FORMATS, line="", console=QUIET)
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize("name", ["ssf", "scaffold"])
def test_the_published_benchmark_takes_its_first_rounds(name: str, tmp_path: Path) -> None:
    """ResNet-110 with BatchNorm as at the paper's scale, but with fewer steps and clients, on digits."""
    (part,) = model.committed("cifar100", "paper", 1).parts
    few = {
        "rounds": 2,
        "batch_size": 4,
        "task": {"data": "digits", "partition": {"clients": 2, "classes_per_client": 5}},
    }
    part = dataclasses.replace(part, base=laid_over(part.base, few))
    variant = part.variant(name)
    point = variant.points()[0]
    small = dataclasses.replace(part, set={"method.local_steps": 1})
    rows = run(small.spec(variant, point), tmp_path / "run").runs[0]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert all(np.isfinite(row["loss"]) for row in rows)
    sent = rows[-1]["up_bytes"] / (2 * 2 * 4)  # numbers per client and round
    assert 1_700_000 < sent < 1_760_000 if name == "scaffold" else sent < 400_000


# ---- the regression study

FEW = {"rounds": 5, "eval_every": 1}


def tiny() -> Study:
    """A few rounds of everything but the search, which must find the published step sizes."""
    study = model.committed("toy", "smoke", 2)
    others = [dataclasses.replace(part, base=laid_over(part.base, FEW)) for part in study.parts[1:]]
    return dataclasses.replace(study, parts=[study.parts[0], *others])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy")
    conduct.conduct(tiny(), out, jobs=1, formats=["html", "md"], line="", console=QUIET)
    return out


def test_the_search_finds_the_published_steps(toy: Path) -> None:
    runs, search = Runs(tiny(), toy / "runs"), tiny().parts[0]
    for cell in runs.cells:
        if cell.part.name == search.name:
            assert cell.point == cell.row.published["scaffold"]


def test_parts_share_their_runs(toy: Path) -> None:
    """Full-dimensional methods are the same run at every rank."""
    runs = Runs(tiny(), toy / "runs")
    dirs = {job.run_dir for job in runs.jobs()}
    assert len(dirs) < 0.7 * len(runs.jobs())
    assert {path.parents[1] for path in (toy / "runs").rglob("history.jsonl")} == dirs


def test_the_published_numbers_are_all_there(toy: Path) -> None:
    """Three tables of 3, 5 and 3 rows; four methods each, two of them in two versions."""
    methods = {"scaffold", "scaffold-paper", "fedavg", "ssf-paper", "fedsub", "fedsub-stale"}
    wanted = {"heterogeneity": 3, "dimension": 5, "stability": 3}
    by_name: dict[str, Part] = {part.name: part for part in tiny().parts}
    for name, rows in wanted.items():
        assert [set(row.published) for row in by_name[name].rows] == [methods] * rows
    text = (toy / "tables.md").read_text()
    assert text.count("published NaN") == 2 * 4
    assert "✓" not in text  # a short run is not judged


def test_every_part_of_the_toy_is_on_the_page(toy: Path) -> None:
    page = (toy / "index.html").read_text()
    for part in tiny().parts:
        title: Any = part.title
        assert title in page
    assert len(page) < 1.5e6
