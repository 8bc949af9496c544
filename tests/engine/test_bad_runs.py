"""Calls that fail: what they leave behind, and what is said."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import fedspan
from fedspan.api import step_size
from fedspan.api.fit import spec_of
from fedspan.core.json_log import lines_text, read_table, write_table
from support.loops import Interrupt


def data(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(8, 3, generator=draw) for _ in range(3)]
    return [(one, (one[:, 0] > 0).long()) for one in inputs]


def fit(
    run_dir: Path | None = None, model: nn.Module | None = None, **settings: Any
) -> fedspan.Result:
    torch.manual_seed(0)
    settings = {
        "method": {"name": "fedavg", "lr": 0.1},
        "rounds": 2,
        "test": data(1)[0],
        "progress": False,
    } | settings
    return fedspan.fit(model or nn.Linear(3, 2), data(), run_dir=run_dir, **settings)


class Raises(fedspan.Callback):
    """A callback with a mistake in one of its functions."""

    def __init__(self, where: str) -> None:
        setattr(self, where, self.fail)

    def fail(self, *_: Any) -> None:
        raise ZeroDivisionError("a mistake")


def none(outputs: Any, targets: Any) -> Any:
    return None


BAD: dict[str, dict[str, Any]] = {
    "metric": {"metrics": ["r2"]},
    "none": {"metrics": [none]},
    "early_stopping": {"callbacks": [fedspan.callbacks.EarlyStopping("acuracy")]},
    "callback": {"callbacks": [Raises("on_run_start")]},
    "states": {"callbacks": [Raises("on_run_start")], "method": {"name": "scaffold", "lr": 0.1}},
    "search": {"callbacks": [Raises("on_run_start")], "method": {"name": "fedavg", "lr": "search"}},
    "seeds": {"callbacks": [Raises("on_run_start")], "seeds": 2},
}


@pytest.mark.parametrize("name", BAD)
def test_a_call_that_fails_before_its_first_round_leaves_nothing(name: str, tmp_path: Path) -> None:
    out, settings = tmp_path / "run", dict(BAD[name])
    if name == "states":
        settings["engine"] = fedspan.Engine(states_dir=str(tmp_path / "states"))
    with pytest.raises(Exception):  # noqa: B017, PT011
        fit(out, **settings)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    settings.pop("callbacks", None)
    settings.pop("metrics", None)
    assert fit(out, **settings).finished


def test_a_failed_call_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[Raises("on_run_start")])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("where", ["on_run_end", "on_evaluate_last", "on_round_end_last"])
def test_a_mistake_in_a_callback_does_not_cost_the_model(where: str) -> None:
    class Late(fedspan.Callback):
        def on_round_end(self, run: Any) -> None:
            assert where != "on_round_end_last" or run.t < 2

        def on_evaluate(self, run: Any, row: Any) -> None:
            assert where != "on_evaluate_last" or row.round < 2

        def on_run_end(self, run: Any, result: Any) -> None:
            raise AssertionError

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    with pytest.raises(AssertionError):
        fit(model=model, callbacks=[Late()])
    torch.manual_seed(0)
    assert torch.equal(model.weight, fit(model=nn.Linear(3, 2)).weights[0]["weight"])


def test_a_mistake_at_the_end_of_a_run_leaves_its_files(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[Raises("on_run_end")])
    assert fedspan.load(tmp_path).finished
    assert (tmp_path / "model.safetensors").exists()


def test_a_run_is_not_resumed_to_fewer_rounds_than_it_has(tmp_path: Path) -> None:
    class Stop(fedspan.Callback):
        def on_evaluate(self, run: Any, row: Any) -> None:
            run.stop = row.round == 2

    fedspan.run(spec_of_rounds(6), tmp_path, callbacks=[Stop()], progress=False)
    with pytest.raises(fedspan.FedspanError, match=r"`rounds` is 1, but .* is at round 2"):
        fedspan.run(spec_of_rounds(1), tmp_path, resume=True, progress=False)
    assert len(fedspan.run(spec_of_rounds(6), tmp_path, resume=True, progress=False).history) == 7


def spec_of_rounds(rounds: int) -> dict[str, Any]:
    task = {"name": "regression", "dim": 6, "clients": 4, "samples": 8}
    return {
        "rounds": rounds,
        "batch_size": "full",
        "method": {"name": "fedavg", "lr": 0.01},
        "task": task,
    }


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("resume", [True, False])
def test_another_number_of_seeds_is_refused(
    first: int, then: int, resume: bool, tmp_path: Path
) -> None:
    fit(tmp_path, seeds=first)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        fedspan.FedspanError, match=f"`seeds` is {then}, but .* holds a run of {first}"
    ):
        fit(tmp_path, seeds=then, resume=resume)
    assert sorted(tmp_path.rglob("*")) == before
    fit(tmp_path, seeds=first, resume=True)


def test_a_loss_that_is_not_finite_from_the_start_is_no_matter_of_lr() -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, float("nan"))
    with pytest.warns(
        UserWarning, match="not finite before the first round: look at the data"
    ) as said:
        fit(model=model)
    assert not any("smaller lr" in str(one.message) for one in said)


class Own(torch.utils.data.Dataset[Any]):
    """A data set that computes its examples."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Any:
        return torch.full((3,), self.shift + place), place % 2


def smooth(outputs: Any, targets: Any, by: float = 0.1) -> Any:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=by)


def made(by: float) -> Any:
    def inner(outputs: Any, targets: Any) -> Any:
        return smooth(outputs, targets, by)

    return inner


def two_layers(between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), between, nn.Linear(3, 2))


def labels(kind: int) -> list[Any]:
    return [(x.numpy(), pd.Series((y.numpy() + kind) % 2)) for x, y in data()]


LAMBDAS = (lambda o, t: smooth(o, t, 0.1), lambda o, t: smooth(o, t, 0.2))
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "series": ({"clients": labels(0)}, {"clients": labels(1)}),
    "dataset": ({"clients": [Own(0.0)] * 3}, {"clients": [Own(1.0)] * 3}),
    "test": ({}, {"test": data(2)[0]}),
    "no test": ({}, {"test": None}),
    "validation": ({}, {"validation": data(2)[0]}),
    "smoothing": (
        {"loss": nn.CrossEntropyLoss()},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    ),
    "weight": (
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(2))},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2]))},
    ),
    "partial": (
        {"loss": functools.partial(smooth, by=0.1)},
        {"loss": functools.partial(smooth, by=0.2)},
    ),
    "closure": ({"loss": made(0.1)}, {"loss": made(0.2)}),
    "lambda": ({"loss": LAMBDAS[0]}, {"loss": LAMBDAS[1]}),
    "activation": ({"model": two_layers(nn.ReLU())}, {"model": two_layers(nn.Tanh())}),
    "dropout": ({"model": two_layers(nn.Dropout(0.1))}, {"model": two_layers(nn.Dropout(0.2))}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_change_of_what_was_given_is_noticed(name: str) -> None:
    def identity(change: dict[str, Any]) -> str:
        given = {"model": nn.Linear(3, 2), "clients": data(), "test": data(1)[0]} | change
        return spec_of(**given).identity()

    first, then = PAIRS[name]
    assert identity(first) == identity(first)
    assert identity(first) != identity(then)


def test_other_initial_weights_are_named_and_the_checkpoint_is_continued(tmp_path: Path) -> None:
    def start(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(3, 2)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, start(0), rounds=4, callbacks=[Interrupt(2)])
    with pytest.warns(UserWarning, match="does not have the initial weights"):
        result = fit(tmp_path, start(1), rounds=4, resume=True)
    assert torch.equal(
        result.weights[0]["weight"], fit(model=start(0), rounds=4).weights[0]["weight"]
    )


@pytest.mark.parametrize("resume", [True, False])
def test_a_search_that_is_interrupted_keeps_its_trials(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[float] = []
    loop = step_size.Loop

    def counted(method: Any, *more: Any, **options: Any) -> Any:
        if runs[2:] and not resumed:
            raise KeyboardInterrupt
        runs.append(method.lr)
        return loop(method, *more, **options)

    resumed = False
    monkeypatch.setattr(step_size, "Loop", counted)
    table = spec_of_rounds(4) | {"method": {"name": "fedavg", "lr": "search"}}
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(table, tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    assert path.name == "lr-trials.json"
    resumed, table_of_trials = True, read_table(path)
    first = table_of_trials["trials"][0]
    for bad in (
        3,
        first | {"lr": "a"},
        first | {"at": []},
        first | {"values": ["a"] * len(first["values"])},
    ):
        write_table(path, table_of_trials | {"trials": [bad]})
        with pytest.raises(fedspan.FedspanError, match=r"lr-trials.json' is damaged"):
            fedspan.run(table, tmp_path, resume=resume, progress=False)
    write_table(path, table_of_trials)
    found = fedspan.run(table, tmp_path, resume=resume, progress=False).lr_search
    apart, runs[:] = list(runs), []
    assert found == fedspan.run(table, progress=False).lr_search
    assert apart == runs  # none was run twice
    assert not (tmp_path / "lr-trials.json").exists()


def test_a_warm_up_longer_than_the_run_is_told() -> None:
    with pytest.warns(UserWarning, match="`warmup` is 5, but the run has 2 rounds"):
        fit(method={"name": "fedavg", "lr": 0.1, "warmup": 5})


def test_a_metric_of_validation_data_that_is_not_given() -> None:
    with pytest.raises(
        fedspan.FedspanError, match="there is no validation data; give `validation`"
    ):
        fit(callbacks=[fedspan.callbacks.EarlyStopping("validation_accuracy")])


def test_the_best_model_is_told_apart_from_the_last_evaluation(tmp_path: Path) -> None:
    inputs, classes = data(1)[0]
    result = fit(
        tmp_path,
        rounds=3,
        test=(inputs, 1 - classes),
        callbacks=[fedspan.callbacks.KeepBest("loss")],
    )
    losses = [line["loss"] for line in result.history]
    best = losses.index(min(losses))
    assert best < 3
    for one in (result, fedspan.load(tmp_path)):
        assert one.model_rounds == {0: best}
        assert f"the model is that of round {best}: loss=" in repr(one)


def test_a_sum_in_place_of_a_mean_is_told() -> None:
    def total(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def mean(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="`objective` doubles when a batch is doubled"):
        fit(objective=total)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(objective=mean)


ROW = {"round": 0, "up_bytes": 0, "down_bytes": 0, "seconds": 0.0, "loss": 1.0}
SPEC = {"seed": 0, "method": {"name": "fedavg"}, "task": {"name": "custom"}}
HISTORIES: list[list[Any]] = [
    *(
        [{"spec": value}]
        for value in (
            3,
            [],
            {"metrics": 3},
            {"method": 3},
            {"method": {}},
            {"seed": "a"},
            {"a": None},
        )
    ),
    [{"spec": {"participation": {"weights": 3}}}],
    [{"spec": {"participation": {}}}],
    *(
        [{"spec": SPEC}, ROW | {key: value}]
        for key in ("round", "up_bytes", "seconds", "loss")
        for value in ("a", [], {})
    ),
    *(
        [{"spec": SPEC}, {name: one for name, one in ROW.items() if name != key}]
        for key in ("round", "up_bytes", "down_bytes", "seconds")
    ),
    [{"spec": SPEC | {"deep": functools.reduce(lambda inner, _: [inner], range(90), [])}}],
    [{"spec": SPEC}, ROW | {"events": 3}],
    [{"spec": SPEC}, ROW, ROW],
    [{"spec": SPEC}, ROW | {"round": 3}, ROW | {"round": 2}],
    [{"spec": SPEC}, ROW | {"up_bytes": 9}, ROW | {"round": 1}],
    [{"spec": SPEC}, ROW | {"down_bytes": -9}],
]


@pytest.mark.parametrize("lines", HISTORIES)
def test_a_forged_history_with_right_checksums_is_refused(lines: list[Any], tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_bytes(lines_text(lines)[0])
    with pytest.raises(fedspan.FedspanError, match=r"history\.jsonl.* is damaged") as error:
        fedspan.load(tmp_path)
    assert "\n" not in str(error.value)


OUTCOMES: list[dict[str, Any]] = [
    {"seeds": 3}, {"seeds": ["a"]}, {"seeds": [0, 1]}, {"seeds": [4]}, {"statuses": 3}, {"statuses": [3]},
    {"statuses": ["a"]},
    {"files": []}, {"files": {"history.jsonl": 3}}, {"model_rounds": 3}, {"model_rounds": {"0": "a"}},
    {"model_rounds": {"7": 1}}, {"decisions": 3}, {"identity": 3}, {"signature": 3},
]  # fmt: skip


@pytest.mark.parametrize("change", OUTCOMES)
def test_a_forged_result_with_a_right_checksum_is_refused(
    change: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path)
    path = tmp_path / "result.json"
    write_table(path, read_table(path) | change)
    with pytest.raises(fedspan.FedspanError, match="damaged") as error:
        fedspan.load(tmp_path)
    assert "\n" not in str(error.value)


DAMAGE = [
    (
        "history.jsonl",
        ["", "[]\n", "{}\n", '{"spec": 3}\n', '{"spec": {}}\n{}\n', '{"spec": {}}\n3\n'],
    ),
    (
        "result.json",
        [
            "",
            "[]",
            "3",
            '{"files": 3}',
            '{"seeds": 3}',
            '{"seeds": [0], "statuses": [], "files": {}}',
        ],
    ),
    ("lr.json", ["", "[]", "{}"]),
]


@pytest.mark.parametrize(("name", "texts"), DAMAGE)
def test_damaged_files_of_a_run_are_named(name: str, texts: list[str], tmp_path: Path) -> None:
    fit(tmp_path)
    for text in texts:
        (tmp_path / name).write_text(text)
        if name == "history.jsonl":
            (tmp_path / "result.json").unlink(missing_ok=True)
        with pytest.raises(fedspan.FedspanError, match=name) as error:
            fedspan.load(tmp_path)
        assert "\n" not in str(error.value)
