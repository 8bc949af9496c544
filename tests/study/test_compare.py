"""`fedspan.compare` and `fedspan.tune`: a user's own model and data through the study engine."""

from __future__ import annotations

import csv
import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspan
from fedspan.callbacks import EarlyStopping
from fedspan.core.errors import FedspanError, SpecError
from fedspan.engine import history
from fedspan.methods import SSF, FedAvg, Scaffold
from fedspan.study import report
from fedspan.study.request import requested
from support.digits import CLIENTS, MODEL, SETTINGS, TEST, VALIDATION, digits

METHODS = {
    "FedAvg": FedAvg(local_steps=4),
    "SSF": SSF(rank=0.5, local_steps=4),
    "SCAFFOLD": "scaffold",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> fedspan.Comparison:
    tune = {"lr": [0.03, 0.3], "SSF": {"lr": [0.1, 0.3, 1.0]}}
    return fedspan.compare(
        METHODS, MODEL, CLIENTS, tune=tune, seeds=2, budget="up=60kB", validation=VALIDATION,
        run_dir=tmp_path_factory.mktemp("made") / "runs", **SETTINGS,
    )  # fmt: skip


def test_every_method_is_tuned_and_runs_within_the_budget(made: fedspan.Comparison) -> None:
    assert [row["method"] for row in made.rows] == ["FedAvg", "SSF", "SCAFFOLD"]
    assert all(0 < row["up_bytes"] <= 60_000 for row in made.rows)
    assert [len([one for one in made.tried if one["method"] == label]) for label in METHODS] == [
        2,
        3,
        2,
    ]
    assert set(made.settings) == set(METHODS)
    assert made.metric == "accuracy"
    assert made.best["SSF"] == SSF(rank=0.5, local_steps=4, lr=made.settings["SSF"]["lr"])


def test_the_users_model_stays_as_it_is(made: fedspan.Comparison) -> None:
    again, *_ = digits()
    assert all(
        torch.equal(a, b) for a, b in zip(MODEL.parameters(), again.parameters(), strict=True)
    )


def test_the_numbers_are_those_of_fit(made: fedspan.Comparison) -> None:
    """The same seeds and weights: a comparison is many calls of `fit`."""
    row = made.rows[0]
    ends = []
    for seed in (0, 1):
        model, *_ = digits()
        found = fedspan.fit(
            model, CLIENTS, method=made.best["FedAvg"], rounds=row["rounds"], seed=seed, **SETTINGS
        )
        ends.append(found.history[-1]["accuracy"])
    assert row["accuracy"] == pytest.approx(np.mean(ends), abs=1e-7)


def test_it_is_shown_in_many_ways(made: fedspan.Comparison, tmp_path: Path) -> None:
    assert made.verdict() in " ".join(repr(made).split())
    assert max(map(len, repr(made).splitlines())) <= 80  # a terminal breaks no word
    assert "<table>" in made._repr_html_()
    assert "validation accuracy on the first seed, not by the test set" in made.verdict()
    axis = made.plot(x="total_bytes")
    assert [line.get_label() for line in axis.get_lines()[:3]] == list(METHODS)
    assert "kB" in axis.get_xlabel()
    assert made.plot(x="round", metric="loss", ax=axis) is axis
    page = made.page(tmp_path / "new" / "index.html").read_text()
    assert "SCAFFOLD" in page
    assert "best accuracy on the test set, %" in page
    assert "your own model and data" not in page
    assert '"label":"test of the correction"' in page.replace(": ", ":")
    shown = re.findall(
        r"<li>(.*?)</li>", page.partition('class="verdict"')[2].partition("</ul>")[0]
    )
    assert html.unescape(" ".join(shown)) == made.verdict()  # one sentence per question
    pandas = pytest.importorskip("pandas")
    assert isinstance(made.to_pandas(), pandas.DataFrame)
    with pytest.raises(
        SpecError, match="`x` must be one of hours, round, seconds, total_bytes, up_bytes"
    ):
        made.plot(x="bytes")


def test_the_command_line_reports_it(made: fedspan.Comparison, tmp_path: Path) -> None:
    assert made.run_dir is not None
    report.report([made.run_dir], tmp_path, ["csv"], None, "")
    lines = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    assert [line["method"] for line in lines] == list(METHODS)
    assert float(lines[0]["accuracy"]) == pytest.approx(made.rows[0]["accuracy"], rel=1e-5)


def test_the_command_line_cannot_continue_it(made: fedspan.Comparison) -> None:
    assert made.run_dir is not None
    with pytest.raises(SpecError, match=r"continue it there, with fedspan.compare\(…, run_dir="):
        requested(made.run_dir / "study.toml")


def histories(place: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in place.rglob(history.NAME)}


def test_it_is_resumed_and_asked_for_more(tmp_path: Path) -> None:
    def compare(methods: Any, **more: Any) -> fedspan.Comparison:
        return fedspan.compare(
            methods, MODEL, CLIENTS, rounds=4, seeds=1, run_dir=tmp_path, **SETTINGS | more
        )

    one = compare([FedAvg(lr=0.1)])
    before = histories(tmp_path)
    with pytest.raises(
        SpecError, match="already holds a comparison; continue it with `resume=True`"
    ):
        compare([FedAvg(lr=0.1)])
    two = compare(
        ["fedavg", {"name": "scaffold", "lr": 0.1}],
        tune={"fedavg": {"lr": [0.1, 0.2]}},
        resume=True,
    )
    after = histories(tmp_path)
    assert {path: after[path] for path in before} == before
    assert len(after) == 3
    assert two.tried[0]["rounds"] == 4
    assert one.rows[0]["accuracy"] in [
        row["accuracy"] for row in compare([FedAvg(lr=0.1)], resume=True).rows
    ]


def changed(what: str) -> dict[str, Any]:
    model, clients, _, (x, y) = digits()
    if what == "weights":
        torch.manual_seed(1)
        model[0].reset_parameters()
    if what == "data":
        clients[2] = (clients[2][0] + 1, clients[2][1])
    return {
        "model": model,
        "clients": clients,
        "test": (x[1:], y[1:]) if what == "test" else (x, y),
    }


@pytest.mark.parametrize("what", ["weights", "data", "test"])
def test_what_changed_is_run_again(what: str, tmp_path: Path) -> None:
    plain = {
        "methods": [FedAvg(lr=0.1)],
        "rounds": 2,
        "seeds": 1,
        "run_dir": tmp_path,
        "resume": True,
        "progress": False,
    }
    fedspan.compare(**plain, **changed(""))
    fedspan.compare(**plain, **changed(""))
    assert len(histories(tmp_path)) == 1
    fedspan.compare(**plain, **changed(what))
    assert len(histories(tmp_path)) == 2


def test_without_validation_the_training_loss_decides(tmp_path: Path) -> None:
    found = fedspan.tune(
        FedAvg(local_steps=4), MODEL, CLIENTS, tune={"lr": [1e-4, 0.1]}, rounds=6, **SETTINGS
    )
    assert found.method == FedAvg(local_steps=4, lr=0.1)
    assert [(row["lr"], row["chosen"]) for row in found.rows] == [(1e-4, False), (0.1, True)]
    assert found.rows[1]["training_loss"] < found.rows[0]["training_loss"]
    assert "by the training loss on the first seed, not by the test set" in " ".join(
        repr(found).split()
    )


def test_without_any_other_data_the_training_loss_is_compared() -> None:
    found = fedspan.compare(
        [FedAvg(lr=0.1), FedAvg(lr=0.01)], MODEL, CLIENTS, rounds=4, seeds=2, batch_size=8
    )
    assert found.metric == "training_loss"
    assert found.rows[0]["training_loss"] < found.rows[1]["training_loss"]
    assert "fedavg-2" in found.verdict()


def test_a_test_set_that_favors_another_step_does_not_change_the_choice() -> None:
    """Every test label is wrong: the step that learns nothing has the best test accuracy."""
    x, y = TEST
    wrong = {**SETTINGS, "test": (x, (y + 1) % 5)}
    found = fedspan.tune(
        FedAvg(local_steps=4), MODEL, CLIENTS, tune={"lr": [1e-6, 0.1]}, rounds=10, **wrong
    )
    ends = [
        fedspan.fit(
            digits()[0], CLIENTS, method=FedAvg(local_steps=4, lr=lr), rounds=10, **wrong
        ).history[-1]["accuracy"]
        for lr in (1e-6, 0.1)
    ]
    assert ends[0] > ends[1]
    assert found.method == FedAvg(local_steps=4, lr=0.1)


def test_a_step_size_is_searched_and_told() -> None:
    found = fedspan.compare(
        {"A": FedAvg(local_steps=2)},
        MODEL,
        CLIENTS,
        tune={"lr": "search"},
        rounds=4,
        seeds=1,
        **SETTINGS,
    )
    lr = found.settings["A"]["lr"]
    assert isinstance(lr, float)
    assert found.best["A"] == FedAvg(local_steps=2, lr=lr)
    assert "Step sizes were searched by the training loss." in found.verdict()


def test_several_processes_share_the_objects() -> None:
    """A loss that cannot be pickled; the same numbers as in one process."""
    settings = SETTINGS | {
        "rounds": 4,
        "seeds": 2,
        "loss": lambda out, y: nn.functional.cross_entropy(out, y),
    }
    one, two = (
        fedspan.compare([FedAvg(lr=0.1), Scaffold(lr=0.1)], MODEL, CLIENTS, jobs=n, **settings)
        for n in (1, 2)
    )
    times = {"seconds": 0.0}
    assert [row | times for row in one.rows] == [row | times for row in two.rows]


def test_a_run_that_fails_is_told_with_its_reason() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and len(targets) > 4:  # not when it is first tried
            raise RuntimeError("the loss is broken")
        return nn.functional.cross_entropy(outputs, targets)

    with pytest.raises(
        FedspanError, match="every run failed, the first one so: RuntimeError: the loss is broken"
    ):
        fedspan.compare(
            [FedAvg(lr=0.1)], MODEL, CLIENTS, loss=broken, rounds=2, seeds=2, **SETTINGS
        )


def test_a_result_that_is_no_number_is_named_everywhere(tmp_path: Path) -> None:
    """A metric that is undefined for a method's model, which has not diverged: in the table, in words, on the page."""

    def spread(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        found = float(outputs.std())
        return found if found < 0.6 else float("nan")

    spread.higher_is_better = True  # type: ignore[attr-defined]
    settings = SETTINGS | {"metrics": [spread], "rounds": 4, "seeds": 2, "progress": False}
    found = fedspan.compare(
        {"low": FedAvg(lr=0.001), "high": FedAvg(lr=1.0)},
        MODEL,
        CLIENTS,
        metric="spread",
        **settings,
    )
    text = "high has no number as spread in 2 of 2 seeds."
    assert text in found.verdict()
    assert re.search(r"^high +NaN$", str(found), re.MULTILINE)
    assert [row["nan"] for row in found.rows] == [0, 2]
    page = found.page(tmp_path / "index.html").read_text()
    assert text in page
    assert ">NaN<" in page
    assert "of 2 NaN" not in page  # of none the best evaluation is known either


def test_a_run_that_a_callback_ended_is_not_made_again(tmp_path: Path) -> None:
    again = {
        "rounds": 30,
        "seeds": 1,
        "callbacks": [EarlyStopping("loss", patience=1, min_delta=10.0)],
    } | SETTINGS
    stamps = []
    for resume in (False, True):
        found = fedspan.compare(
            [FedAvg(lr=0.1)], MODEL, CLIENTS, run_dir=tmp_path, resume=resume, **again
        )
        assert found.rows[0]["rounds"] < 30
        stamps.append(histories(tmp_path))
    assert stamps[0] == stamps[1]


def test_a_spec_takes_the_place_of_model_and_data() -> None:
    task = {"name": "regression", "clients": 6, "dim": 6, "outputs": 4}
    table = {"rounds": 10, "method": {"name": "ssf", "lr": 0.02}, "task": task}
    found = fedspan.compare([FedAvg(lr=0.02), SSF(lr=0.02, rank=3)], table, seeds=2, eval_every=5)
    assert [row["rounds"] for row in found.rows] == [10, 10]
    assert found.metric == "rel_err"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tune": {"lr": []}}, "`tune` needs a list of 1 to 1,000 values for 'lr'"),
        (
            {"tune": {"lrr": [1.0]}},
            "`tune`: the method of A has no setting 'lrr' (did you mean 'lr'?)",
        ),
        (
            {"tune": {"B": {"lr": [1.0]}}},
            "`label of a grid` must be one of A, fedavg, got 'B'",
        ),
        ({"methods": {}}, "`methods` is empty"),
        (
            {"methods": "fedavg"},
            "`methods` must be a list of methods, got 'fedavg'; write ['fedavg']",
        ),
        ({"round": 3}, "there is no argument 'round' (did you mean 'rounds'?)"),
        ({"budget": "10MB"}, "a budget is written up=10MB, total=50MB or rounds=200, got '10MB'"),
        ({"budget": "up=1kB"}, "a budget of 1 kB up is less than one round of 'fedavg'"),
        ({"resume": True}, "`resume` needs the `run_dir`"),
        ({"metric": "acc"}, "`metric` must be one of accuracy, loss, got 'acc'"),
        ({"clients": None}, "`clients` is missing"),
        ({"jobs": 0}, "`jobs` must be a whole number of at least 1"),
        ({"seeds": 0}, "`seeds` must be a whole number of at least 1"),
    ],
)
def test_mistakes_name_the_argument(arguments: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {
        "methods": {"A": FedAvg(lr=0.1)},
        "model": MODEL,
        "clients": CLIENTS,
        "rounds": 2,
    }
    with pytest.raises(SpecError) as error:
        fedspan.compare(**usual | SETTINGS | arguments)
    assert words in str(error.value)
    assert "--" not in str(error.value)


def test_a_schedule_spans_each_methods_own_run(tmp_path: Path) -> None:
    """Within one budget SSF has more rounds than FedAvg; both cosines end with their run, and none is cut off."""
    methods = {
        "FedAvg": FedAvg(lr=0.1, schedule="cosine"),
        "SSF": SSF(rank=0.2, lr=0.1, schedule="cosine"),
    }
    settings: dict[str, Any] = SETTINGS | {"eval_every": 1, "seeds": 1, "run_dir": tmp_path}
    found = fedspan.compare(methods, MODEL, CLIENTS, budget="up=30kB", **settings)
    rounds = [row["rounds"] for row in found.rows]
    assert rounds[1] > 2 * rounds[0]
    for (label, method), row in zip(methods.items(), found.rows, strict=True):
        alone = fedspan.fit(digits()[0], CLIENTS, method=method, rounds=row["rounds"], **SETTINGS)
        assert row["accuracy"] == pytest.approx(alone.history[-1]["accuracy"], abs=1e-7), label
    longer = fedspan.compare(methods, MODEL, CLIENTS, budget="up=60kB", resume=True, **settings)
    assert longer.rows[0]["rounds"] > rounds[0]
    alone = fedspan.fit(
        digits()[0], CLIENTS, method=methods["FedAvg"], rounds=longer.rows[0]["rounds"], **SETTINGS
    )
    assert longer.rows[0]["accuracy"] == pytest.approx(alone.history[-1]["accuracy"], abs=1e-7)


def test_every_seed_is_within_the_budget(tmp_path: Path) -> None:
    """Downloads of SSF depend on who is drawn: the seeds differ, and none of them is read beyond the budget."""
    settings: dict[str, Any] = SETTINGS | {
        "eval_every": 1,
        "clients_per_round": 2,
        "seeds": 4,
        "run_dir": tmp_path,
    }
    found = fedspan.compare(
        {"SSF": SSF(rank=0.2, lr=0.1)}, MODEL, CLIENTS, budget="total=60kB", **settings
    )
    read = found.rows[0]["rounds"]
    rows = [history.read(path)[1] for path in tmp_path.rglob(history.NAME)]
    sent = [{row["round"]: row["up_bytes"] + row["down_bytes"] for row in one} for one in rows]
    assert len({one[read] for one in sent}) > 1
    assert all(one[read] <= 60_000 for one in sent)
    assert read == max(t for t in sent[0] if all(one[t] <= 60_000 for one in sent))
