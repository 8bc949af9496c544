"""Weights of examples, of classes, and of yes: what is minimized with them, and that evaluation is without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fedspan
from fedspan import Training
from fedspan.core.errors import DataError, SpecError
from fedspan.methods import FedAvg

STEP = FedAvg(lr=0.5, local_steps=1)


def hospital(number: int, rows: int) -> pd.DataFrame:
    rng = np.random.default_rng(number)
    age = rng.normal(0, 1, rows)
    ill = np.where(age + rng.normal(0, 1, rows) > 0.8, "yes", "no")
    return pd.DataFrame({"age": age, "w": rng.integers(0, 4, rows), "ill": ill})


TABLES = {"north": hospital(0, 40), "south": hospital(1, 40)}


def network(outputs: int = 2) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(1, outputs)


def fit(model: torch.nn.Module, clients: Any, **more: Any) -> Any:
    given = {"method": STEP, "rounds": 1, "batch_size": "full", "progress": False}
    return fedspan.fit(model, clients, **given | more)


def step(model: torch.nn.Module, losses: list[torch.Tensor], shares: list[float]) -> torch.Tensor:
    """The weights after one full step of FedAvg."""
    grads = [
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses
    ]
    mean = sum(share * g[0] for share, g in zip(shares, grads, strict=True))
    return model.weight.detach() - 0.5 * mean


@pytest.mark.parametrize("simulate", ["loop", "batched"])
@pytest.mark.parametrize("numbers", [False, True])
def test_weights_of_rows_are_those_of_the_mean(numbers: bool, simulate: str) -> None:
    target = "age" if numbers else "ill"
    found = TABLES if not numbers else {k: v.assign(x=v.age + v.w) for k, v in TABLES.items()}
    data = fedspan.data.tables(found, target=target, weight="w", ignore=["ill"] if numbers else [])
    assert data.width == 1
    assert data.schema.used[0].name != "w"
    model = network(data.outputs)
    losses, sizes = [], []
    for part in data.values():
        x, y, w = part["train"]
        z = model(x)
        each = (z - y).square().mean(1) if numbers else F.cross_entropy(z, y, reduction="none")
        losses.append((w * each).sum() / w.sum())
        sizes.append(len(x))
    after = step(model, losses, [n / sum(sizes) for n in sizes])
    x, y = data.test  # without weights
    loss = torch.nn.MSELoss() if numbers else None
    result = fit(model, data, loss=loss, test=data.test, engine=fedspan.Engine(simulate=simulate))
    torch.testing.assert_close(result.model.weight.detach(), after)
    with torch.no_grad():
        plain = F.mse_loss(model(x), y) if numbers else F.cross_entropy(model(x), y)
    assert result.history[-1]["loss"] == pytest.approx(float(plain), rel=1e-5)


SPEC = """
rounds = 2
batch_size = "full"
[method]
name = "fedavg"
lr = 0.5
local_steps = 1
[task]
name = "classification"
model = "linear"
[task.data]
path = "*.csv"
target = "ill"
"""


def spec_file(place: Path, more: str) -> Path:
    for name, table in TABLES.items():
        table.to_csv(place / f"{name}.csv", index=False)
    path = place / "spec.toml"
    path.write_text(SPEC + more)
    return path


def test_weights_in_a_spec(tmp_path: Path) -> None:
    more = 'weight = "w"\n[training]\nclass_weights = "balanced"\n'
    path = spec_file(tmp_path, more)
    result = fedspan.run(path, tmp_path / "run", progress=False)
    assert [c["name"] for c in result.usage["schema"]["columns"]] == ["age"]
    assert len(fedspan.load(tmp_path / "run").predict(TABLES["north"].drop(columns="ill"))) == 40
    plain = fedspan.run(spec_file(tmp_path, 'ignore = ["w"]'), progress=False)
    assert plain.history[-1]["loss"] != result.history[-1]["loss"]
    table = "[training.class_weights]\nyes = 3\n"
    named = fedspan.run(spec_file(tmp_path, 'ignore = ["w"]\n' + table), progress=False)
    factor = fedspan.run(
        spec_file(tmp_path, 'ignore = ["w"]\n[training]\npos_weight = 3.0'), progress=False
    )
    assert len({one.history[-1]["loss"] for one in (plain, named, factor, result)}) == 4
    with pytest.raises(SpecError, match=r"class_weights.*'maybe'"):
        fedspan.run(spec_file(tmp_path, "[training.class_weights]\nmaybe = 3\n"), progress=False)


DRAW = torch.Generator().manual_seed(5)
CLIENTS = [
    (torch.randn(n, 1, generator=DRAW), torch.randint(0, 3, (n,), generator=DRAW).clamp(max=2) // k)
    for n, k in ((20, 1), (30, 2), (14, 1))
]


@pytest.mark.parametrize("given", ["balanced", {"0": 1.0, 2: 4.0}])
def test_weights_of_classes_are_those_of_torch(given: Any) -> None:
    counts = torch.cat([y for _, y in CLIENTS]).bincount()
    weights = counts.sum() / (3 * counts) if given == "balanced" else torch.tensor([1.0, 1, 4])
    model = network(3)
    losses = [F.cross_entropy(model(x), y, weight=weights) for x, y in CLIENTS]
    after = step(model, losses, [20 / 64, 30 / 64, 14 / 64])
    result = fit(model, CLIENTS, training=Training(class_weights=given))
    torch.testing.assert_close(result.model.weight.detach(), after)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_weight_of_yes_is_that_of_torch(outputs: int) -> None:
    clients = [(x, (y > 0).long()) for x, y in CLIENTS]
    model, factor = network(outputs), torch.tensor(3.0)
    if outputs == 1:
        losses = [
            F.binary_cross_entropy_with_logits(model(x)[:, 0], y.float(), pos_weight=factor)
            for x, y in clients
        ]
    else:
        each = [(F.cross_entropy(model(x), y, reduction="none"), y) for x, y in clients]
        losses = [(loss * torch.where(y == 1, factor, 1)).mean() for loss, y in each]
    after = step(model, losses, [20 / 64, 30 / 64, 14 / 64])
    result = fit(model, clients, training=Training(pos_weight=3.0))
    torch.testing.assert_close(result.model.weight.detach(), after)


def test_a_resumed_run_has_the_weights(tmp_path: Path) -> None:
    data = fedspan.data.tables(TABLES, target="ill", weight="w")
    how: dict[str, Any] = {"training": Training(class_weights="balanced"), "batch_size": 8}
    whole = fit(network(), data, rounds=4, **how)
    fit(network(), data, rounds=2, run_dir=tmp_path / "run", **how)
    found = fit(network(), data, rounds=4, run_dir=tmp_path / "run", resume=True, **how)
    assert torch.equal(found.weights[0]["weight"], whole.weights[0]["weight"])
    with pytest.raises(fedspan.FedspanError, match=r"training\.class_weights"):
        fit(network(), data, rounds=6, run_dir=tmp_path / "run", resume=True, batch_size=8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"training": {"class_weights": "fair"}}, "'balanced' or a table"),
        ({"training": {"class_weights": {"0": -1.0}}}, "class_weights.0"),
        ({"training": {"class_weights": {"7": 2.0}}}, "class_weights"),
        ({"training": {"pos_weight": 2.0}}, "`pos_weight` is for yes or no"),
        (
            {
                "training": {"class_weights": "balanced"},
                "loss": torch.nn.CrossEntropyLoss(torch.ones(3)),
            },
            "weights of their own",
        ),
        (
            {
                "training": {"class_weights": "balanced"},
                "objective": lambda m, b: m(b[0]).square().mean(),
            },
            "`class_weights` goes with",
        ),
        (
            {
                "training": {"class_weights": "balanced"},
                "privacy": fedspan.Privacy(level="example", clip=1.0, noise=1.0),
                "batch_size": 4,
            },
            "no effect",
        ),
    ],
)
def test_weights_that_cannot_be_used_are_named(more: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fit(network(3), CLIENTS, **more)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": -1.0}, "'w' is '-1' in row 1, not a weight"),
        ({"w": np.nan}, "'w' is 'nan' in row 1, not a weight"),
        ({"w": 0}, "all weights 'w' are 0"),
        ({"w": "a"}, "'w' is 'a' in row 1, not a number"),
    ],
)
def test_weights_of_rows_that_cannot_be_used_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        fedspan.data.tables(
            TABLES | {"south": TABLES["south"].assign(**change)}, target="ill", weight="w"
        )


def test_a_weight_that_is_no_column_is_named() -> None:
    with pytest.raises(DataError, match="no column 'v'"):
        fedspan.data.tables(TABLES, target="ill", weight="v")


def test_three_parts_that_are_not_weights_are_refused() -> None:
    clients = [(x, y, torch.ones(len(x))) for x, y in CLIENTS]
    with pytest.raises(DataError, match="3 parts"):
        fit(network(3), clients)
