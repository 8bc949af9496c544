"""What a newcomer tries first: metrics, saving and loading, BatchNorm, weights of clients, and what a run prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedspan
from fedspan.api.fit import spec_of
from fedspan.core import registry
from fedspan.core.errors import DataError, SpecError
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods import FedAvg

X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)
CLIENTS = [(X[i::3], Y[i::3]) for i in range(3)]


class Share(fedspan.Metric):
    """The share of examples of class 0, counted without a dataclass."""

    def __init__(self) -> None:
        self.first = self.count = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.first, self.count = self.first + int((targets == 0).sum()), self.count + len(targets)

    def compute(self) -> float:
        return self.first / self.count


def fit(**settings: Any) -> fedspan.Result:
    torch.manual_seed(0)
    return fedspan.fit(
        torch.nn.Linear(8, 4), CLIENTS, **({"method": FedAvg(lr=0.1), "rounds": 2} | settings)
    )


def test_a_metric_by_name_needs_no_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._known["metric"], "share", Share)
    result = fit(test=(X, Y), metrics=["share"])
    assert result.history[-1]["share"] == pytest.approx(float((Y == 0).float().mean()))


def test_one_metric_may_be_a_text() -> None:
    assert "accuracy" in fit(test=(X, Y), metrics="accuracy").history[-1]

    def mistakes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) != targets).sum()

    assert "mistakes" in fit(test=(X, Y), metrics=mistakes).history[-1]


def test_metrics_without_data_are_refused() -> None:
    with pytest.raises(SpecError, match="give `test` or `validation`"):
        fit(metrics=["accuracy"])


def test_a_result_is_saved_as_weights_or_as_a_directory(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"end in \.safetensors, got .*w\.pt"):
        fit().save(tmp_path / "w.pt")
    assert not (tmp_path / "w.pt").exists()


def test_a_saved_model_is_the_trained_one(tmp_path: Path) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    result = fedspan.fit(network(), CLIENTS, method=FedAvg(lr=0.1), rounds=3)
    result.save(tmp_path / "model.safetensors")
    fresh = network()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    trained = result.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in fresh.state_dict().items())
    assert torch.equal(fresh.eval()(X), result.model.eval()(X))
    assert int(trained["1.num_batches_tracked"]) == 3 * 10  # rounds × local steps


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_do_not_depend_on_the_order_of_clients(momentum: float | None) -> None:
    def statistics(clients: list[Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 4))
        settings: Any = {"method": FedAvg(lr=0.1, local_steps=2), "rounds": 2, "batch_size": "full"}
        return fedspan.fit(model, clients, **settings).weights[0]

    one, other = statistics(CLIENTS), statistics(CLIENTS[::-1])
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.allclose(one[name].double(), other[name].double(), atol=1e-6), name
    if momentum is None:  # the mean over all batches of all rounds, which are all the same here
        means = torch.stack([x.mean(0) for x, _ in CLIENTS]).mean(0)
        assert torch.allclose(one["0.running_mean"], means, atol=1e-5)


def test_clients_count_by_their_examples() -> None:
    """One full-batch step of FedAvg from all clients is one step on all examples, if they are weighted by number."""

    def step(clients: list[Any], weights: Any = "examples") -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        settings: Any = {
            "rounds": 1,
            "batch_size": "full",
            "participation": fedspan.Participation(weights=weights),
        }
        return fedspan.fit(
            model, clients, method=FedAvg(lr=0.5, local_steps=1), **settings
        ).weights[0]["weight"]

    parts = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    assert torch.allclose(step(parts), step([(X, Y)]), atol=1e-6)
    assert not torch.allclose(step(parts, "uniform"), step([(X, Y)]), atol=1e-4)
    assert fedspan.Participation().weights == "examples"
    assert "weights=examples" in repr(fit())


@pytest.mark.parametrize("name", ["ssf", "scaffold"])
def test_controls_are_a_weighted_mean(name: str) -> None:
    """c = Σ w_i c_i in every round, also where only some clients take part."""
    clients = [(X[:10], Y[:10]), (X[10:25], Y[10:25]), (X[25:], Y[25:])]
    method: Any = {"name": name, "lr": 0.1} | ({"rank": 0.5} if name == "ssf" else {})
    spec = spec_of(nn.Linear(8, 4), clients, method=method, rounds=4, clients_per_round=2)
    problem = spec.task.build((0,), spec)
    with Simulator(spec.method, problem, spec.engine) as transport:
        loop = Loop(spec.method, problem, transport, (0,), 2)
        with torch.inference_mode():
            for _ in range(4):
                loop.step()
        assert problem.weights is not None
        weights = torch.tensor(problem.weights, dtype=torch.float32).view(1, -1, 1)
        own = transport.clients().c
    assert float(loop.server.c.norm()) > 1e-3
    assert torch.allclose(loop.server.c, (weights * own).sum(1, keepdim=True), atol=1e-6)


def test_a_run_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    fit(test=(X, Y), metrics=["accuracy"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fedavg: 3 of 3 clients per round, equal weights, 10 local steps, lr 0.1"
    assert [line.split()[1] for line in lines[1:]] == ["0/2", "1/2", "2/2"]
    assert "accuracy" in lines[-1]
    fedspan.fit(nn.Linear(8, 4), [(X[:20], Y[:20]), (X[20:], Y[20:])], method="fedavg", rounds=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "lr = 'search': short trials before the run"
    assert "weights by examples" in lines[1]
    assert lines[1].endswith("(search)")
    assert lines[2].startswith("no `test` or `validation` is given")
    assert "training_loss" in lines[3]
    fit(progress=False)
    assert capsys.readouterr().err == ""


class Local(nn.Linear):
    """A class that no other program can import."""

    def __init__(self) -> None:
        super().__init__(8, 4)


Local.__module__ = "__main__"


def test_a_loaded_run_has_its_model_or_says_how_to_get_it(tmp_path: Path) -> None:
    trained = fit(run_dir=tmp_path / "run").model
    assert torch.equal(fedspan.load(tmp_path / "run").model(X), trained(X))
    own = tmp_path / "own"
    fedspan.fit(Local(), CLIENTS, method=FedAvg(lr=0.1), rounds=2, run_dir=own)
    with pytest.raises(SpecError, match=r"use fedspan\.load\('.*own', model=model\)"):
        _ = fedspan.load(tmp_path / "own").model
    again = fedspan.load(tmp_path / "run", model=nn.Linear(8, 4)).model
    assert torch.equal(again(X), trained(X))


def test_callbacks_and_settings_as_they_come_to_mind() -> None:
    stopping = fedspan.callbacks.EarlyStopping(patience=1)
    for callbacks in (stopping, [stopping], "keep_best", ["keep_best", stopping]):
        assert fit(test=(X, Y), callbacks=callbacks).history
    with pytest.raises(
        SpecError, match=r"`callbacks` must be a callback.*write EarlyStopping\(…\)"
    ):
        fit(callbacks=[fedspan.callbacks.EarlyStopping])
    clipped = [
        fit(training=one).weights[0]["weight"]
        for one in ({"clip": 0.01}, fedspan.Training(clip=0.01))
    ]
    assert torch.equal(*clipped)
    with pytest.raises(
        SpecError, match=r"`participation` must be Participation\(…\) or a table, got 'uniform'"
    ):
        fit(participation="uniform")
    with pytest.raises(
        SpecError, match=r"`metrics` must be one of .* \(did you mean 'accuracy'\?\)"
    ):
        fit(test=(X, Y), metrics=["acuracy"])
    assert len(fit(rounds=np.int64(2), seed=np.int64(1)).history) == 3
    if not torch.cuda.is_available():
        with pytest.raises(
            SpecError, match="`device` is 'cuda', but torch finds no such device here"
        ):
            fit(device="cuda")


def test_a_batch_that_batchnorm_cannot_train_on_names_its_client() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    clients = {"Bern": (X, Y), "Graz": (X[:1], Y[:1])}
    with pytest.raises(
        DataError, match="client 'Graz' has a batch of one example, on which BatchNorm"
    ):
        fedspan.fit(model, clients, method=FedAvg(lr=0.1), rounds=1)


def test_the_step_size_that_was_found_shows() -> None:
    found = fit(method=FedAvg(local_steps=2), rounds=3)
    assert found.lr_search is not None
    assert (
        f"lr={found.lr_search['values']['lr']:.3g} (search: {len(found.lr_search['trials'])} trials, "
        in repr(found)
    )
    assert "searched" not in repr(fit())
