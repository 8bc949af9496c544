"""Comparisons: each variant at its own best point, same seeds, judged by round and by byte; studies of networks."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fedspan.api.spec import run
from rich.console import Console
from test_data import have

from fedspan.core.errors import CheckpointError, SpecError
from fedspan.engine import history
from fedspan.study import paper_benchmark as benchmark
from fedspan.study import tables
from fedspan.study.budget import Budget
from fedspan.study.command import minutes
from fedspan.study.curves import Curve, Tail
from fedspan.study.outcome import Outcome
from fedspan.study.paper_benchmark import Benchmark, Part, verdicts
from fedspan.study.plan import Comparison, Variant, folder_of, jobs_of, over
from fedspan.study.pool import execute

QUIET = Console(quiet=True)
BASE: dict[str, Any] = {
    "rounds": 8,
    "eval_every": 2,
    "method": {"name": "ssf", "rank": 0.25, "local_steps": 4},
    "task": {"name": "classification", "data": "digits", "clients": 5, "least": 64, "per_class": 40},
}
FEDAVG = {"name": "fedavg", "local_steps": 4}
VARIANTS = [
    Variant("fedavg", "FedAvg", "#E69F00", {"method": FEDAVG}, {"method.lr": [1e-6, 0.3, 1e9]}),
    Variant("ssf", "SSF", "#0072B2", {}, {"method.lr": [0.3]}),
]


def plan(**changes: Any) -> Comparison:
    return Comparison(
        **({"name": "c", "base": BASE, "variants": VARIANTS, "seeds": 2, "tune_rounds": 4, "tail": 2} | changes)
    )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    runs = tmp_path_factory.mktemp("runs")
    execute(plan().tuning(runs), 1, QUIET, "")
    execute(plan().final(runs, Outcome(plan(), runs).chosen()), 1, QUIET, "")
    return Outcome(plan(), runs)


def test_the_best_point_is_chosen_and_divergence_is_not(outcome: Outcome) -> None:
    trials = outcome.trials(VARIANTS[0])
    assert [trial.end.diverged for trial in trials] == [0, 0, 1]
    assert outcome.chosen() == {"fedavg": {"method.lr": 0.3}, "ssf": {"method.lr": 0.3}}
    assert not outcome.at_edge(VARIANTS[0])
    assert outcome.trials(VARIANTS[1]) == []


def test_a_chosen_point_at_an_end_of_the_grid_is_marked(outcome: Outcome) -> None:
    small = Variant("fedavg", "FedAvg", "#000000", VARIANTS[0].table, {"method.lr": [1e-6, 0.3]})
    edge = Outcome(plan(variants=[small]), outcome.runs)
    assert edge.at_edge(small)
    assert tables.point_of(edge, small) == "lr 0.3*"


def test_later_seeds_do_not_change_the_choice(outcome: Outcome) -> None:
    """Tuning reads its own seed and its own rounds, though the same folder now holds more."""
    again = Outcome(plan(), outcome.runs)
    assert [t.end.seeds for t in again.trials(VARIANTS[0])] == [1, 1, 1]
    assert outcome.curve(VARIANTS[0]).values.shape == (2, 5)
    folder = folder_of(plan().spec(VARIANTS[0], {"method.lr": 0.3}), outcome.runs)
    first = Curve.read([folder / "seed-0" / "history.jsonl"], "accuracy")
    assert again.trials(VARIANTS[0])[1].end.mean == pytest.approx(first.values[0, 1:3].mean())


def test_equal_bytes(outcome: Outcome) -> None:
    """SSF sends less, so at its bytes FedAvg is read off an earlier round."""
    fedavg, ssf = VARIANTS
    budget = outcome.budget("up")
    assert budget == outcome.curve(ssf).up[-1] < outcome.curve(fedavg).up[-1]
    assert outcome.at(ssf, "up", budget).mean == outcome.final(ssf).mean
    rows = int((outcome.curve(fedavg).up <= budget).sum())
    kept = outcome.curve(fedavg).values[:, :rows][:, -2:]
    assert outcome.at(fedavg, "up", budget).mean == pytest.approx(kept.mean())
    assert outcome.best(ssf).mean == pytest.approx(outcome.curve(ssf).values.max(1).mean())


def test_another_cost_may_want_another_step(outcome: Outcome) -> None:
    """Read off early, a grid's best point need not be the one that wins in the end; points are told apart by tuning."""
    fedavg, ssf = VARIANTS
    for rounds in (2, 4):
        tails = {t.point["method.lr"]: t.curve.until(rounds).tail(2) for t in outcome.trials(fedavg)}
        best = max((lr for lr, tail in tails.items() if tail.whole), key=lambda lr: tails[lr].mean)
        wanted = outcome.at(fedavg, "round", rounds) if best == 0.3 else tails[best]  # 0.3 was chosen and has all seeds
        assert outcome.tuned_at(fedavg, "round", rounds) == wanted
    assert outcome.tuned_at(ssf, "round", 4) == outcome.at(ssf, "round", 4)


def test_a_budget_of_bytes_is_also_told_in_rounds_and_in_both_directions(outcome: Outcome) -> None:
    """The columns stand for what the least costly run has spent, at the best step for that."""
    up = outcome.budget("up")
    within = Outcome(plan(budget=Budget({"up": up})), outcome.runs)
    header, rows = tables.main(within)
    rounds, total = within.budget("round"), within.budget("total")
    assert header[4:6] == [f"{Budget({'total': total}).words()}, best of grid", f"{rounds:g} rounds, best of grid"]
    expected = [tables.shown("accuracy", within.tuned_at(v, "total", total)) for v in VARIANTS]
    assert [row[4] for row in rows] == expected


def test_tables_say_it(outcome: Outcome) -> None:
    header, rows = tables.main(outcome)
    assert [row[0] for row in rows] == ["FedAvg", "SSF"]
    assert "accuracy after 8 rounds, %" in header
    assert f"{100 * outcome.final(VARIANTS[1]).mean:.1f} ± " in rows[1][2]
    _, tuned = tables.tuning(outcome)
    assert [row[3:] for row in tuned][2] == ["diverged", ""]
    assert [row[4] for row in tuned] == ["", "chosen", ""]
    text = tables.markdown((header, rows))
    assert text.count("\n") == 4
    lines = list(csv.DictReader(tables.curves_csv([outcome.series(v) for v in VARIANTS]).splitlines()))
    assert len(lines) == 2 * 2 * 5
    assert {line["run"] for line in lines} == {"FedAvg", "SSF"}


def test_what_is_done_is_not_run_again(outcome: Outcome) -> None:
    jobs = plan().final(outcome.runs, outcome.chosen())
    assert all(job.complete() for job in jobs)
    stamps = [path.stat().st_mtime for job in jobs for path in job.histories()]
    execute(jobs, 1, QUIET, "")
    assert stamps == [path.stat().st_mtime for job in jobs for path in job.histories()]
    assert not plan(base=BASE | {"rounds": 10}).final(outcome.runs, outcome.chosen())[0].complete()


def test_only_the_runs_of_a_comparison_are_counted(outcome: Outcome, tmp_path: Path) -> None:
    """The folder may hold runs of other studies; each run counts once, though tuning and the end share it."""
    shutil.copytree(outcome.runs, tmp_path / "runs")
    here = Outcome(plan(), tmp_path / "runs")
    files = {file for job in here.jobs() for file in job.histories()}
    assert len(files) == 6  # three points on the first seed, one of them again on the second, and two seeds of SSF
    whole = sum(history.read(file)[1][-1]["seconds"] for file in files)
    assert 60 * minutes([here]) == pytest.approx(whole)
    shutil.copytree(here.jobs()[0].folder, tmp_path / "runs" / "other" / "seed-0")
    assert 60 * minutes([here, here]) == pytest.approx(whole)


def test_missing_runs_and_metrics_are_named(outcome: Outcome, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="run the comparison again"):
        Outcome(plan(), tmp_path).chosen()
    with pytest.raises(SpecError, match="no metric 'f1'; it has loss, accuracy"):
        Outcome(plan(metric="f1"), outcome.runs).chosen()
    with pytest.raises(SpecError, match="no variants"):
        plan(variants=[])


def test_tables_laid_over_tables() -> None:
    base = {"a": 1, "method": {"name": "ssf", "rank": 0.2}, "task": {"x": 1, "y": 2}}
    assert over(base, {"task": {"y": 3}})["task"] == {"x": 1, "y": 3}
    assert over(base, {"method": {"refresh": 5}})["method"] == {"name": "ssf", "rank": 0.2, "refresh": 5}
    assert over(base, {"method": {"name": "ssf", "projector": {}}})["method"] == {"name": "ssf", "projector": {}}
    assert base["task"] == {"x": 1, "y": 2}


def test_seeds_of_the_toy_are_one_job(tmp_path: Path) -> None:
    toy = over(BASE, {"task": {"name": "regression"}, "method": {"name": "fedavg", "lr": 0.01}})
    spec = Comparison(name="t", base=toy, variants=VARIANTS, seeds=3).spec(Variant("a", "a", "", {}, {}), {})
    assert [job.seeds for job in jobs_of(spec, tmp_path, 3)] == [3]


def ends(**means: tuple[float, float]) -> Any:
    """An outcome with given final accuracies and spreads."""

    class Fixed:
        def final(self, variant: Variant) -> Tail:
            return Tail(*means[variant.name], 0, 3)

    return Fixed()


def test_an_order_holds_only_beyond_the_spread() -> None:
    variants = [Variant(name, name, "", {}, {}) for name in ("a", "b", "c", "d")]
    part = Part(plan(variants=variants), "", "", [["a", "b", "c"], ["b", "c", "d"]], {})
    notes = verdicts(part, ends(a=(0.5, 0.01), b=(0.45, 0.01), c=(0.449, 0.02), d=(0.6, 0.01)))
    assert notes[0] == "a > b: holds (+5.0 ± 1.4 points)"
    assert "within the spread (+0.1" in notes[1]
    assert "reversed (-15.1" in notes[2]
    assert len(notes) == 3
    losses = Part(plan(variants=variants, metric="perplexity", goal="min"), "", "", [["a", "b"]], {})
    (note,) = verdicts(losses, ends(a=(20.0, 0.3), b=(21.0, 0.4)))
    assert note == "a < b: holds (-1.00 ± 0.50 of perplexity)"
    (note,) = verdicts(losses, ends(a=(21.0, 0.3), b=(20.0, 0.4)))
    assert note == "a < b: reversed (+1.00 ± 0.50 of perplexity)"
    (note,) = verdicts(losses, ends(a=(20.6, 0.3), b=(21.0, 0.4)))
    assert note == "a < b: within the spread (-0.40 ± 0.50 of perplexity)"
    assert "one seed" in verdicts(part, ends(**{n: (0.5, float("nan")) for n in "abcd"}))[0]


@pytest.mark.parametrize("name", ["mnist", "cifar100"])
def test_every_study_of_networks_runs_in_small(name: str, tmp_path: Path) -> None:
    have("mnist" if name == "mnist" else "cifar100_mini")
    study = Benchmark.load(name, "smoke", None)
    if name == "mnist":  # all parts in the slow form
        study = Benchmark(study.name, study.scale, study.title, study.about, study.parts[:1] + study.parts[4:5], 1)
    benchmark.reproduce(study, tmp_path, jobs=1, again=False, console=QUIET)
    page, text = (tmp_path / "index.html").read_text(), (tmp_path / "tables.md").read_text()
    for part in study.parts:
        assert part.title.replace("'", "&#39;") in page
        assert part.title in text
        assert (tmp_path / "figures" / f"{part.comparison.name}.png").stat().st_size > 5_000
        assert len((tmp_path / "tables" / f"{part.comparison.name}.csv").read_text().splitlines()) > 3
    assert page.count('<figure class="chart"') == len(study.parts)
    assert f"fedspan reproduce {name} --scale smoke" in page


@pytest.mark.parametrize("name", ["mnist", "cifar100", "nlp"])
def test_every_scale_makes_valid_specs(name: str) -> None:
    """Every point of every grid, whatever its scale, is a spec; on CIFAR-100 SSF's reaches to 1/ρ times SCAFFOLD's."""
    for scale in ("smoke", "laptop", *(["paper"] if name == "cifar100" else [])):
        study = Benchmark.load(name, scale, None)
        for part in study.parts:
            for variant in part.comparison.variants:
                for point in variant.points():
                    assert part.comparison.spec(variant, point).rounds >= 2
        grids = {v.name: v.grid["method.lr"] for v in study.parts[0].comparison.variants}
        if scale != "smoke" and name == "cifar100":
            assert max(grids["ssf"]) >= 5 * max(grids["scaffold"])
    with pytest.raises(SpecError, match="scale"):
        Benchmark.load(name, "huge", None)


@pytest.mark.parametrize("name", ["ssf", "scaffold"])
def test_the_papers_benchmark_takes_its_first_rounds(name: str, tmp_path: Path) -> None:
    """ResNet-110 with BatchNorm on all 100 classes, as at the paper's scale but for fewer steps on fewer images."""
    have("cifar100_mini")
    part = Benchmark.load("cifar100", "paper", 1).parts[0]
    few = {"rounds": 2, "task": {"data": "cifar100_mini", "batch": 4, "test_per_class": 1}}
    variant = next(v for v in part.comparison.variants if v.name == name)
    one = Comparison(name="p", base=over(part.comparison.base, few), variants=[variant], seeds=1)
    rows = run(one.spec(variant, variant.points()[0] | {"method.local_steps": 1}), tmp_path / "run").rows[0]
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert all(np.isfinite(row["loss"]) for row in rows)
    sent = rows[-1]["up_bytes"] / (2 * 4 * 4)  # numbers a client and round
    assert 1_700_000 < sent < 1_760_000 if name == "scaffold" else sent < 400_000
