"""Nothing is chosen by a metric of which nobody says whether more is better; the kept model is described by all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import metrics as sk
from torch import nn

import fedspan
from fedspan.callbacks import EarlyStopping, KeepBest
from fedspan.core.errors import SpecError

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
NUMBERS = X[:, :1] + 0.3 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1))


def fit(**changes: Any) -> fedspan.Result:
    torch.manual_seed(0)
    usual: dict[str, Any] = {
        "method": fedspan.methods.FedAvg(lr=0.5, local_steps=3), "rounds": 6, "progress": False, "test": (X, Y),
    }  # fmt: skip
    return fedspan.fit(
        nn.Linear(4, 2), {"a": (X[:30], Y[:30]), "b": (X[30:], Y[30:])}, **usual | changes
    )


def brier(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return float((outputs.softmax(1)[:, 1] - targets).square().mean())


def test_a_function_without_a_direction_is_reported_but_chooses_nothing() -> None:
    result = fit(metrics=[brier])
    assert result.history[-1]["brier"] < result.history[0]["brier"]
    unknown = "more or less of the metric 'brier' is better is not known; "
    for callback in (KeepBest(), KeepBest("brier"), EarlyStopping("brier", patience=1)):
        with pytest.raises(
            SpecError, match=f"{unknown}give mode='min' or 'max', or set brier.higher_is_better"
        ):
            fit(metrics=[brier], callbacks=[callback])
    with pytest.raises(SpecError, match=f"{unknown}set brier.higher_is_better"):
        _ = result.best
    grid = {"lr": [0.01, 0.5]}
    clients: list[Any] = [(X, Y)]
    with pytest.raises(SpecError, match=f"{unknown}give goal='min' or 'max'"):
        fedspan.compare(
            ["fedavg"], nn.Linear(4, 2), clients, test=(X, Y), metrics=[brier], tune=grid, rounds=2
        )


def test_a_direction_is_read_from_mode_and_from_the_function() -> None:
    assert fit(metrics=[brier], callbacks=[KeepBest("brier", mode="min")]).model_rounds[0] > 0
    assert (
        fit(metrics=[brier], callbacks=[EarlyStopping("brier", patience=2, mode="min")]).status
        == "finished"
    )

    def own(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return brier(outputs, targets)

    own.higher_is_better = False  # type: ignore[attr-defined]
    result = fit(metrics=[own], callbacks=[KeepBest()])
    assert result.best is not None
    assert result.best["own"] == min(line["own"] for line in result.history)
    with pytest.raises(SpecError, match=r"`mode` must be 'm\w+' or 'm\w+', got 'lower'"):
        fit(callbacks=[KeepBest(mode="lower")])  # type: ignore[arg-type]


def test_a_direction_against_that_of_the_metric_is_refused() -> None:
    def own(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return brier(outputs, targets)

    own.higher_is_better = False  # type: ignore[attr-defined]
    against = "`mode` is 'max', but less of the metric '{}' is better; leave `mode` out"
    for name, callback in (
        ("own", KeepBest(mode="max")),
        ("loss", EarlyStopping("loss", mode="max")),
    ):
        with pytest.raises(SpecError, match=against.format(name)):
            fit(metrics=[own], callbacks=[callback])
    with pytest.raises(
        SpecError, match="`mode` is 'min', but more of the metric 'accuracy' is better"
    ):
        fit(metrics=["accuracy"], callbacks=[KeepBest("accuracy", mode="min")])
    with pytest.raises(
        SpecError, match="`goal` is 'min', but more of the metric 'accuracy' is better"
    ):
        fedspan.compare(
            ["fedavg"],
            nn.Linear(4, 2),
            [(X, Y)],
            test=(X, Y),
            metric="accuracy",
            goal="min",
            rounds=2,
        )


def test_compare_takes_the_setting_with_the_lower_error() -> None:
    usual: dict[str, Any] = {
        "test": (X, Y),
        "metrics": [brier],
        "seeds": 2,
        "rounds": 8,
        "goal": "min",
    }
    methods = {"a": fedspan.methods.FedAvg(lr=0.5), "b": fedspan.methods.FedAvg(lr=0.001)}
    found = fedspan.compare(methods, nn.Linear(4, 2), [(X[:30], Y[:30]), (X[30:], Y[30:])], **usual)
    assert "b is" not in str(found.verdict)
    with pytest.raises(
        SpecError,
        match="`goal` of 'brier' is 'min', but KeepBest goes by 'max'; give both the same",
    ):
        fedspan.compare(
            methods, nn.Linear(4, 2), [(X, Y)], **usual | {"callbacks": [KeepBest("brier", mode="max")]}
        )  # fmt: skip


def test_columns_of_a_method_do_not_choose() -> None:
    """SSF reports its test of the correction beside the loss."""
    method = fedspan.methods.SSF(rank=0.5, lr=0.05, local_steps=3)
    clients: list[Any] = [(X[:30], NUMBERS[:30]), (X[30:], NUMBERS[30:])]
    result = fedspan.fit(
        nn.Linear(4, 1), clients, nn.MSELoss(), method=method, rounds=5, test=(X, NUMBERS), callbacks=[KeepBest()],
        progress=False,
    )  # fmt: skip
    assert result.best is not None
    assert result.best["loss"] == min(line["loss"] for line in result.history)
    assert result.model_rounds[0] > 0


@pytest.mark.parametrize("seeds", [1, 2])
def test_everything_describes_the_model_that_was_kept(tmp_path: Path, seeds: int) -> None:
    run: dict[str, Any] = {
        "callbacks": [KeepBest("loss")],
        "eval_clients_every": 5,
        "rounds": 5,
        "test": (X, 1 - Y),
    }
    result = fit(**run, run_dir=tmp_path, seeds=seeds)
    assert set(result.model_rounds.values()) == {
        0
    }  # the labels of the test set are wrong: training only worsens it
    for one in (result, fedspan.load(tmp_path)):
        assert one.best is not None
        assert one.best["round"] == one.per_client.worst()["round"] == 0
        assert {(row["round"], row["client"]) for row in one.per_client.last} == {
            (0, "a"),
            (0, "b"),
        }
        assert "the model is that of round 0" in repr(one)
        assert f"loss={one.best['loss']:.4g}" in repr(one) or seeds > 1


def test_clients_are_evaluated_with_the_kept_model_in_a_round_between(tmp_path: Path) -> None:
    def best_at_two(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append(0)
        return -abs(len(seen) - 3)

    seen: list[int] = []
    result = fit(
        metrics=[best_at_two], callbacks=[KeepBest(mode="max")], run_dir=tmp_path / "r", rounds=4
    )
    assert result.model_rounds == {0: 2}
    seen.clear()
    result = fit(
        metrics=["accuracy"],
        callbacks=[KeepBest("loss")],
        eval_clients_every=6,
        run_dir=tmp_path / "s",
    )
    (kept,) = result.model_rounds.values()
    assert {row["round"] for row in result.per_client.last} == {kept}
    with torch.no_grad():
        right = (result.model(X[:30]).argmax(1) == Y[:30]).double().mean()
    assert result.per_client.last[0]["accuracy"] == pytest.approx(float(right))


def test_a_metric_that_takes_the_truth_first_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"accuracy_score takes the truth first; .*outputs, targets: acc"
    ):
        fit(metrics=[sk.accuracy_score])


def test_metrics_of_torchmetrics_are_functions_of_outputs_and_targets() -> None:
    import torchmetrics

    found = fit(metrics=[torchmetrics.Accuracy("multiclass", num_classes=2), "accuracy"])
    for line in found.history:
        assert line["MulticlassAccuracy"] == pytest.approx(line["accuracy"])


def test_metrics_of_clients_with_parts_are_measured_or_refused() -> None:
    for part in ("test", "validation"):
        clients = {"a": {"train": (X[:30], Y[:30]), part: (X[30:], Y[30:])}}
        run: dict[str, Any] = {
            "method": "fedavg",
            "rounds": 2,
            "progress": False,
            "metrics": ["auroc"],
        }
        result = fedspan.fit(nn.Linear(4, 2), clients, eval_clients_every=1, **run)
        assert [row["data"] for row in result.per_client.last] == [part]
        assert "auroc" in result.per_client.last[0]
        with pytest.raises(
            SpecError,
            match="`metrics` need `eval_clients_every` to be measured on the clients' own",
        ):
            fedspan.fit(nn.Linear(4, 2), clients, **run)


def test_a_loss_beside_an_objective_is_refused() -> None:
    with pytest.raises(SpecError, match="`loss` and `objective` are two ways"):
        fit(
            loss=nn.CrossEntropyLoss(),
            objective=lambda model, batch: model(batch[0]).square().mean(),
        )
