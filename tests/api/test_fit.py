"""`fit`: any module and any clients; same seed same weights; the caller's module stays the caller's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedspan
from fedspan.callbacks import EarlyStopping, KeepBest
from fedspan.core.config import Engine, Projection, Training
from fedspan.core.errors import DataError, SpecError
from fedspan.nn.models import build as network
from fedspan.nn.projection_rules import projection_rules, summary
from fedspan.tasks.custom import Custom
from support.fitting import COORDINATE, blobs, flat, net, ssf, together
from support.loops import Interrupt
from support.methods import METHODS, build, in_subspace


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns(name: str) -> None:
    extra = {"projector": COORDINATE} if in_subspace(name) else {}
    method = build(name, lr=0.1, local_steps=4, **extra)
    result = fedspan.fit(
        net(),
        blobs(),
        method=method,
        rounds=60,
        test=together(blobs(seed=1)),
        eval_every=20,
        clients_per_round=2,
    )
    assert [row["round"] for row in result.history] == [0, 20, 40, 60]
    assert result.history[-1]["accuracy"] > 0.9
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_the_callers_module_gets_the_weights_and_nothing_else() -> None:
    model = net()
    before, keys = flat(model).clone(), list(model.state_dict())
    result = fedspan.fit(model, blobs(), method=ssf(), rounds=3)
    assert result.model is model
    assert list(model.state_dict()) == keys
    assert not torch.equal(flat(model), before)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(
        p.requires_grad and p.grad is None and not p.is_inference() for p in model.parameters()
    )
    model(torch.randn(2, 20)).sum().backward()  # it can be trained on
    assert "output head" in summary(projection_rules(model))


def test_a_search_and_its_run_share_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is copied once per run, and the weights are those of a run with the step size that was found."""
    made: list[int] = []
    material = Custom.material

    def counted(self: Custom, seed: int, dtype: torch.dtype) -> Any:
        made.append(seed)
        return material(self, seed, dtype)

    monkeypatch.setattr(Custom, "material", counted)
    searched, plain = net(), net()
    settings: dict[str, Any] = {"rounds": 5, "progress": False, "seeds": 2}
    result = fedspan.fit(searched, blobs(), method=ssf(lr="search"), **settings)
    assert result.lr_search is not None
    assert made == [0, 1]
    found = result.lr_search["values"]
    fedspan.fit(plain, blobs(), method=ssf(**found), **settings)
    pairs = zip(searched.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_same_seed_same_weights() -> None:
    one, two, other = (
        fedspan.fit(net(), blobs(), method=ssf(), rounds=5, clients_per_round=2, seed=s).model
        for s in (1, 1, 2)
    )
    assert torch.equal(flat(one), flat(two))
    assert not torch.equal(flat(one), flat(other))


def test_in_the_whole_space_it_is_scaffold() -> None:
    whole = ssf(projector={"name": "identity"}, correction="always")
    scaffold = build("scaffold", lr=0.1, local_steps=4)
    a, b = (
        fedspan.fit(net(), blobs(), method=m, rounds=10, clients_per_round=2).model
        for m in (whole, scaffold)
    )
    torch.testing.assert_close(flat(a), flat(b), rtol=1e-4, atol=1e-5)


class Pairs(Dataset[Any]):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def test_tensors_datasets_and_loaders_are_the_same_clients() -> None:
    kinds = (
        lambda x, y: (x, y),
        lambda x, y: (x.numpy(), y.numpy()),
        TensorDataset,
        Pairs,
        lambda x, y: DataLoader(
            Pairs(x, y), batch_size=8, shuffle=True
        ),  # 8 divides the 40 examples of a client
        lambda x, y: list(zip(x, y, strict=True)),
        lambda x, y: (x.tolist(), y.to(torch.int32)),
    )
    settings = {"method": ssf(), "rounds": 3, "batch_size": 8}
    found = [
        flat(
            fedspan.fit(
                net(), [kind(*c) for c in blobs()], **settings, engine=Engine(simulate="loop")
            ).model
        )
        for kind in kinds
    ]
    for other in found[1:]:
        assert torch.equal(found[0], other)
    batched = flat(fedspan.fit(net(), blobs(), **settings).model)  # as `auto` does with tensors
    torch.testing.assert_close(batched, found[0], rtol=1e-5, atol=1e-6)


def test_running_statistics_are_averaged_and_counted() -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    method = build("fedavg", lr=0.1, local_steps=2)
    result = fedspan.fit(model(), blobs(), method=method, rounds=1, test=together(blobs()))
    numbers = sum(p.numel() for p in result.model.parameters()) + 64 + 1  # and the count of batches
    assert result.history[-1]["up_bytes"] == 4 * 4 * numbers
    assert result.history[-1]["down_bytes"] == 4 * 4 * numbers
    alone = [fedspan.fit(model(), [client], method=method, rounds=1).model for client in blobs()]
    # a client's draws depend on its number, so only client 0 is the same alone; its statistics have moved
    assert not torch.equal(alone[0][1].running_mean, model()[1].running_mean)
    longer = fedspan.fit(model(), blobs(), method=ssf(), rounds=40, test=together(blobs(seed=1)))
    assert longer.history[-1]["accuracy"] > 0.9


def test_regression_and_any_callable() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 20)
    y = x @ torch.randn(20, 1)
    clients = [(x[:30], y[:30]), (x[30:], y[30:])]
    model = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
    result = fedspan.fit(
        model, clients, F.mse_loss, method=ssf(), rounds=60, test=(x, y), eval_every=30
    )
    assert "accuracy" not in result.history[-1]
    assert result.history[-1]["loss"] < 0.2 * result.history[0]["loss"]

    def own(m: nn.Module, batch: Any) -> torch.Tensor:
        return (m(batch[0]) - batch[1]).abs().mean()

    result = fedspan.fit(model, clients, method=ssf(), rounds=3, objective=own, test=(x, y))
    assert result.history[-1]["loss"] > 0


def test_the_best_model_is_kept_and_a_run_that_stalls_ends() -> None:
    test = together(blobs(seed=1))
    hot = build("fedavg", lr=0.5, local_steps=8)
    result = fedspan.fit(
        net(),
        blobs(),
        method=hot,
        rounds=40,
        test=test,
        callbacks=[KeepBest(), EarlyStopping(patience=4)],
    )
    assert result.best is not None
    assert result.best["accuracy"] == max(row["accuracy"] for row in result.history)
    with torch.no_grad():
        assert float((result.model(test[0]).argmax(1) == test[1]).float().mean()) == pytest.approx(
            result.best["accuracy"]
        )
    assert len(result.history) < 41
    assert result.finished
    assert (
        result.status
        == f"stopped at round {result.history[-1]['round']}: no better accuracy in 4 evaluations"
    )


def test_a_run_that_is_interrupted_resumes_to_the_same_weights(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": ssf(),
        "rounds": 12,
        "clients_per_round": 2,
        "eval_every": 3,
    }
    whole = fedspan.fit(net(), blobs(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fedspan.fit(net(), blobs(), **settings, run_dir=tmp_path / "o", callbacks=[Interrupt(5)])
    assert fedspan.load(tmp_path / "o").status == "interrupted"
    resumed = fedspan.fit(net(), blobs(), **settings, run_dir=tmp_path / "o", resume=True)
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert [line["round"] for line in resumed.history] == [0, 3, 6, 9, 12]
    assert (tmp_path / "o" / "checkpoint.safetensors").exists()  # the run may go on later


def test_decay_and_clipping() -> None:
    plain, small = (
        flat(
            fedspan.fit(
                net(), blobs(), method=ssf(), rounds=20, training=Training(weight_decay=decay)
            ).model
        ).norm()
        for decay in (0.0, 0.3)
    )
    assert small < 0.9 * plain
    held = fedspan.fit(
        net(),
        blobs(),
        method=build("fedavg", lr=1.0, local_steps=1),
        rounds=1,
        training=Training(clip=1e-3),
    ).model
    assert float((flat(held) - flat(net())).norm()) <= 1e-3 * 1.001


def test_augmentation_is_repeatable() -> None:
    def noisy(batch: Any, generator: torch.Generator) -> Any:
        return batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]

    one, two, plain = (
        flat(
            fedspan.fit(net(), blobs(), method=ssf(), rounds=3, training=Training(augment=a)).model
        )
        for a in (noisy, noisy, None)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, plain)


def test_a_convolutional_network_with_few_numbers_up() -> None:
    model = network("resnet8", (3, 16, 16), 4)
    numbers = sum(p.numel() for p in model.parameters())
    data = [(torch.randn(12, 3, 16, 16), torch.arange(12) % 4) for _ in range(2)]
    method = build("ssf", lr=0.05, local_steps=2, projector={"name": "coordinate", "rank": 0.1})
    result = fedspan.fit(model, data, method=method, rounds=2, batch_size=6)
    assert result.history[-1]["up_bytes"] < 0.2 * 4 * numbers * 2 * 2


MISTAKES = {
    "nobody": ({"clients": []}, DataError, "`clients` is empty"),
    "empty client": (
        {"clients": [(torch.zeros(0, 20), torch.zeros(0))]},
        DataError,
        "client 0 has no examples",
    ),
    "lengths": (
        {"clients": [(torch.zeros(3, 20), torch.zeros(2))]},
        DataError,
        "different lengths",
    ),
    "not finite": (
        {"clients": [(torch.full((3, 20), torch.nan), torch.zeros(3))]},
        DataError,
        "not finite",
    ),
    "no data": ({"clients": [7]}, DataError, "client 0 must be"),
    "too many": (
        {"clients_per_round": 9},
        SpecError,
        "`clients_per_round` is 9, but there are 4 clients",
    ),
    "no such layer": (
        {"projection": Projection(full_modules=["7.weight"])},
        SpecError,
        "matches no trained tensor",
    ),
    "rank": (
        {"method": ssf(projector={"name": "coordinate", "rank": 25})},
        SpecError,
        "larger than the 20 inputs",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    change, kind, words = MISTAKES[name]
    arguments: dict[str, Any] = {"clients": blobs(), "method": ssf(), "rounds": 2} | change
    with pytest.raises(kind) as error:
        fedspan.fit(net(), arguments.pop("clients"), **arguments)
    assert words in str(error.value)


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples/quickstart.py"
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    scores = {line.split()[0]: float(line.split()[3]) for line in done.stdout.splitlines()[1:5]}
    assert scores["SSF"] > scores["FedAvg"]
    assert (tmp_path / "out/quickstart/index.html").exists()
