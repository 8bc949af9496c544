"""The classification task from a spec: data, partition, network, seeds, epochs, ranks by layer; official archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedspan
from fedspan.cli import app
from fedspan.core.config import Projection
from fedspan.core.errors import DataError, SpecError
from fedspan.core.layout import Block
from fedspan.core.projector import draw
from fedspan.core.spec import Spec, with_values
from fedspan.data import IID, Dirichlet
from fedspan.methods import FedAvg
from fedspan.nn.batches import AUGMENT
from fedspan.projectors.coordinate import Coordinate
from fedspan.tasks.classification import Classification
from support.loops import settings

TABLE: dict[str, Any] = {
    "rounds": 6,
    "eval_every": 3,
    "method": {"name": "ssf", "rank": 0.25, "lr": 0.3, "local_steps": 4},
    "task": {
        "name": "classification",
        "data": "digits",
        "partition": {"name": "classes", "clients": 5},
    },
    "projection": {"min_numel": 64},
}

TWO = Classification(data="digits", partition=IID(clients=2))


def table(**changes: Any) -> dict[str, Any]:
    return with_values(TABLE, {key.replace("__", "."): value for key, value in changes.items()})


def test_several_seeds_are_the_seeds_one_by_one(tmp_path: Path) -> None:
    both = fedspan.run(Spec.from_table(table()), tmp_path / "both", seeds=2)
    alone = fedspan.run(Spec.from_table(table(seed=1)), tmp_path / "alone")
    clean = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        for rows in (both.runs[1], alone.runs[0])
    ]
    assert clean[0] == clean[1]
    assert both.runs[0][-1]["accuracy"] != both.runs[1][-1]["accuracy"]
    assert both.runs[0][-1]["accuracy"] > 0.3
    assert (tmp_path / "both" / "seed-0" / "model.safetensors").exists()


def test_a_run_is_resumed_and_made_longer(tmp_path: Path) -> None:
    straight = fedspan.run(Spec.from_table(table()), tmp_path / "straight", seeds=2)
    fedspan.run(Spec.from_table(table(rounds=3)), tmp_path / "parts", seeds=2)
    parts = fedspan.run(Spec.from_table(table()), tmp_path / "parts", seeds=2, resume=True)
    for a, b in zip(straight.runs, parts.runs, strict=True):
        assert a[-1]["accuracy"] == b[-1]["accuracy"]
        assert a[-1]["loss"] == b[-1]["loss"]


def test_a_spec_survives_toml_with_lists_and_ranks_by_layer(tmp_path: Path) -> None:
    ranks = {"1.weight": 0.5, "*": 8}
    spec = Spec.from_table(table(projection__full_modules=["3.*"], method__rank=ranks, epochs=1.5))
    (tmp_path / "spec.toml").write_text(spec.toml())
    again = Spec.load(tmp_path / "spec.toml")
    assert again == spec
    assert again.table()["method"]["space"]["rank"] == ranks


def test_ranks_by_layer() -> None:
    projector = Coordinate(rank={"a*": 0.5, "b": 3})
    blocks = [Block("a.weight", (4, 10), 1), Block("b", (4, 10), 1)]
    assert [projector.rank_of(block) for block in blocks] == [5, 3]
    with pytest.raises(SpecError, match="no pattern for block 'c'"):
        projector.rank_of(Block("c", (4, 10), 1))
    with pytest.raises(SpecError, match="got -1"):
        Coordinate(rank={"a": -1})
    with pytest.raises(SpecError, match=r"larger than the 10 inputs"):
        Coordinate(rank={"*": 11}).rank_of(blocks[0])
    problem = TWO.build((0,), settings(dtype=torch.float32, projection=Projection(min_numel=64)))
    P = draw(Coordinate(rank={"1.*": 0.25}), problem.layout, (0,), 0)
    assert P.rank == 128 * 16 + 128 + 10 * 128 + 10


def test_epochs_are_steps_over_the_mean_client(tmp_path: Path) -> None:
    """1,500 examples over 5 clients in batches of 32: 9.4 a pass."""
    by_epoch = fedspan.run(Spec.from_table(table(epochs=2.0)), tmp_path / "a")
    by_steps = fedspan.run(Spec.from_table(table(method__local_steps=18)), tmp_path / "b")
    assert by_epoch.runs[0][-1]["loss"] == by_steps.runs[0][-1]["loss"]
    with pytest.raises(SpecError, match="epochs"):
        Spec.from_table(table(epochs=-1.0))
    clients = [(torch.randn(10, 6), torch.randint(0, 2, (10,))) for _ in range(2)]
    torch.manual_seed(0)
    one, two = (torch.nn.Linear(6, 2) for _ in range(2))
    two.load_state_dict(one.state_dict())
    fedspan.fit(one, clients, method=FedAvg(lr=0.1), rounds=2, batch_size=5, epochs=3)
    fedspan.fit(two, clients, method=FedAvg(lr=0.1, local_steps=6), rounds=2, batch_size=5)
    assert torch.equal(one.weight, two.weight)


def test_double_precision_goes_all_the_way() -> None:
    problem = TWO.build((0,), settings())
    assert {
        problem.x0.dtype,
        problem.layout.dtype,
        problem.client_data[0].take(torch.tensor([0]))[0].dtype,
    } == {torch.float64}


def test_partition_counts_examples(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(Spec.from_table(table()).toml())

    def command(*words: object) -> str:
        return CliRunner().invoke(app.app, [str(word) for word in words]).output

    shown = command("partition", path)
    assert "classes per client: 2 to 2" in shown
    assert "5 clients, 10 classes, 1,500 examples" in shown
    assert "20 clients, 1,000 examples" in command("partition", "examples/ssf.toml")


def test_counts_are_of_the_partition_that_is_trained_on() -> None:
    task = Classification(data="digits", partition=Dirichlet(clients=4, alpha=0.3))
    counts, problem = task.holdings(3).counts, task.build((3,), settings())
    assert [len(source) for source in problem.client_data] == counts.sum(1).tolist()


@pytest.mark.parametrize("kind", ["flip", "crop"])
def test_augmented_images_are_the_same_images_moved(kind: str) -> None:
    x, y = torch.arange(2 * 3 * 32 * 32.0).view(2, 3, 32, 32) + 1, torch.tensor([0, 1])
    seen = {
        AUGMENT[kind]((x, y), torch.Generator().manual_seed(seed))[0].sum().item()
        for seed in range(20)
    }
    moved, labels = AUGMENT[kind]((x, y), torch.Generator().manual_seed(0))
    again, _ = AUGMENT[kind]((x, y), torch.Generator().manual_seed(0))
    assert torch.equal(moved, again)
    assert torch.equal(labels, y)
    assert moved.shape == x.shape
    assert set(moved.flatten().tolist()) <= {0.0, *x.flatten().tolist()}
    assert (len(seen) == 1) == (kind == "flip")  # a flip loses no pixel, a crop does


MISTAKES = {
    "data": ({"task__data": "mnits"}, "did you mean 'mnist'"),
    "clients": ({"task__partition__clients": 1501}, "only 1500 examples"),
    "natural": ({"task__partition": {"name": "natural"}}, "does not say who made"),
    "classes": ({"task__classes": 11}, "the data set has 10"),
    "shrink": ({"task__shrink": 9}, "larger than the images"),
    "model": ({"task__model": "resnet9"}, "6n \\+ 2"),
    "whole": ({"projection__full_modules": ["nope"]}, "matches no trained tensor"),
    "list": (
        {"projection__full_modules": "3.weight"},
        "`projection.full_modules` must be a list, got '3.weight'",
    ),
    "rank": ({"method__rank": {"*": "half"}}, "must be a number, got 'half'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, tmp_path: Path) -> None:
    changes, words = MISTAKES[name]
    with pytest.raises((SpecError, DataError), match=words):
        fedspan.run(Spec.from_table(table(**changes)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_clients_are_needed_where_nobody_knows_them() -> None:
    with pytest.raises(
        SpecError, match="does not say who made which example; use another `partition`"
    ):
        Classification(data="digits").build((0,), settings())
    with pytest.raises(SpecError, match="`clients` is missing"):
        Classification(data="digits", partition=IID()).build((0,), settings())
