"""What a plan says before a run is what the run's ledger says after it, for every method and for plugins."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedspan
from fedspan.api.fit import spec_of
from fedspan.api.run import run
from fedspan.cli.app import app
from fedspan.core import registry, tables, wire
from fedspan.core.layout import Block, Layout
from fedspan.core.plugins import load_plugin
from fedspan.core.projector import draw
from fedspan.core.spec import Spec
from fedspan.costs.plan import plan, price, shapes, sibling
from fedspan.costs.traffic import AlikeClients, FlatProblem, cost
from support.loops import advance, start
from support.methods import build, every_method

TABLE: dict[str, Any] = {
    "rounds": 30,
    "eval_every": 30,
    "batch_size": 4,
    "clients_per_round": 3,
    "method": {
        "name": "ssf",
        "space": {"name": "gaussian", "rank": 3},
        "lr": 0.02,
        "local_steps": 2,
    },
    "task": {"name": "regression", "clients": 7, "dim": 12, "outputs": 2, "samples": 9},
}
LAYOUT = Layout((Block("a", (8, 12), 1), Block("b", (8,)), Block("c", (5, 8), 1)))
IMAGES = {"name": "classification", "data": "digits", "partition": {"name": "iid", "clients": 3}}

PLUGIN = '''
"""A plugin whose clients keep a control of d numbers and use it in every step."""
from dataclasses import dataclass
import torch
from fedspan.core.bundle import Bundle
from fedspan.core.registry import register
from fedspan.methods.base import LocalSteps

@register
@dataclass(frozen=True, kw_only=True)
class Pulled(LocalSteps):
    def init_server(self, x0, layout): return Bundle(x=x0)
    def init_client(self, x0, layout): return Bundle(c=torch.zeros_like(x0))
    def broadcast(self, server, rnd): return server
    def client_step(self, client, down, f, rnd):
        y = self.descend(down.x, f.direction(client.c), self.rate(rnd))
        return Bundle(c=client.c + y), Bundle(y=y)
    def server_step(self, server, up, rnd): return Bundle(x=rnd.mean(up.y))
'''


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models, too, are walked through on tensors without numbers."""
    monkeypatch.setattr(FlatProblem, "with_values", 0)


def test_a_plan_is_what_the_run_then_costs() -> None:
    spec = Spec.from_table(TABLE)
    found = plan(spec)
    assert found.layout.size == found.parameters == 24
    for row in found.rows:
        method = tables.build("method", sibling(spec, row.method, 0.1))
        done = fedspan.run(dataclasses.replace(spec, method=method))
        assert (row.cost.up, row.cost.down) == (done.up_bytes, done.down_bytes), row.method
        assert row.memory is None  # not a network


@pytest.mark.parametrize("preset", ["datacenter", "hospitals", "phones"])
@pytest.mark.parametrize("epochs", [{}, {"epochs": 3.0}])
def test_planned_hours_are_those_of_the_run(preset: str, epochs: dict[str, float]) -> None:
    spec = Spec.from_table(TABLE | {"federation": {"preset": preset}} | epochs)
    for name in ("ssf", "fedavg"):
        method = tables.build("method", sibling(spec, name, 0.1))
        done = fedspan.run(dataclasses.replace(spec, method=method), progress=False)
        hours = plan(spec, [name])[name].cost.hours
        assert hours == pytest.approx(done.history[-1]["hours"], rel=1e-9)
    long = dataclasses.replace(spec, method=method, rounds=400, eval_every=400)
    hours = fedspan.run(long, progress=False).history[-1]["hours"]
    assert plan(long, ["fedavg"])["fedavg"].cost.hours == pytest.approx(hours, rel=0.05)


def test_the_command_prints_hours(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(Spec.from_table(TABLE | {"federation": {"latency": 3600.0}}).toml())
    done = CliRunner().invoke(app, ["plan", str(path), "--methods", "fedavg"])
    assert re.search(r"fedavg +1 +30\b", done.stdout), done.stdout


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize(("name", "settings"), every_method())
def test_traffic_without_numbers_is_that_of_real_messages(
    name: str, settings: dict[str, Any]
) -> None:
    method = build(name, local_steps=2, **settings)
    planned = cost(method, FlatProblem(LAYOUT, 5, buffers=6), 2, 5, 0)

    class Real(FlatProblem):
        cohort_mode = "per_client"

    problem = Real(LAYOUT, 5)
    problem.x0, problem.buffers0 = torch.zeros(1, 1, LAYOUT.size), None
    loop, spent = start(method, problem, 2), [(0, 0)]
    for t in range(1, 6):
        advance(loop, 1)
        beside = 2 * 6 * 4 * t  # the buffers of two clients
        spent.append((int(loop.ledger.up.sum()) + beside, int(loop.ledger.down.sum()) + beside))
    assert planned.walked == tuple(spent)
    assert planned.server_memory == sum(array.nbytes for array in wire.pack(loop.server).values())
    first = method.init_client(problem.x0, LAYOUT)
    assert planned.client_state == sum(array.nbytes for array in wire.pack(first).values())


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_the_declared_numbers_are_those_that_move(name: str, settings: dict[str, Any]) -> None:
    """The first point that local steps start from, or the change of the adapters that is sent."""
    method = build(name, local_steps=1, **settings)
    footprint, seen = method.footprint(LAYOUT), []

    class Watched(FlatProblem):
        def cohort(self, rnd: Any) -> Any:
            level = super().cohort(rnd)
            moved = level.grad
            level.grad = lambda y: (seen.append(y.shape[-1]), moved(y))[1]  # type: ignore[method-assign]
            return level

    loop = start(method, Watched(LAYOUT, 5), 2, AlikeClients(method, FlatProblem(LAYOUT, 5)))
    loop.transport.problem = loop.problem  # type: ignore[attr-defined]
    advance(loop, 1)
    if footprint.ranks is None:
        assert footprint.trained == seen[0]
        space = getattr(method, "space", None)
        assert space is None or footprint.trained == draw(space, LAYOUT, (0,), 0).rank
    else:
        assert footprint.trained == loop.server.u.shape[-1]
        assert set(footprint.ranks) == {"a", "c"}
    assert footprint.optimizer == method.local.size(footprint.trained)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("float64", 8)])
def test_running_statistics_are_counted(dtype: str, width: int) -> None:
    table = TABLE | {
        "rounds": 2,
        "eval_every": 2,
        "batch_size": 16,
        "clients_per_round": 2,
        "dtype": dtype,
    }
    table |= {
        "task": IMAGES | {"model": "resnet8", "norm": "batch"},
        "method": {"name": "fedavg", "lr": 0.1},
    }
    spec, done = Spec.from_table(table), fedspan.run(table)
    statistics = shapes(spec).problem.buffers0
    assert statistics is not None
    found = price(spec)
    assert (found.up, found.down) == (done.up_bytes, done.down_bytes)
    assert found.up_round == width * (shapes(spec).problem.layout.size + statistics.shape[-1])


def test_a_plugin_has_a_full_plan(tmp_path: Path) -> None:
    """A method in a file of its own that declares nothing: its state, its messages and its memory are seen."""
    path = tmp_path / "pulled.py"
    path.write_text(PLUGIN)
    load_plugin(path)
    try:
        found = plan(
            TABLE | {"task": IMAGES | {"model": "mlp"}}, ["pulled", "fedavg", "scaffold", "fedprox"]
        )
    finally:
        registry._known["method"].pop("pulled")
    own, plain, scaffold, prox = (row.memory for row in found.rows)
    size = 4 * found.layout.size
    assert found["pulled"].cost.client_state == size
    assert found["pulled"].cost.up_round == found["pulled"].cost.down_round == size
    assert own is not None
    assert plain is not None
    assert own.controls - plain.controls == size
    assert prox is not None
    assert own == scaffold  # which holds c − c_i
    assert own.controls == prox.controls  # the x that it is pulled back to


def test_what_another_method_refuses_is_left_out_of_its_plan() -> None:
    """Error feedback takes no rand-k that is unbiased, and is planned all the same."""
    method = {
        "name": "compressed",
        "lr": 0.02,
        "local": {"name": "sgd", "momentum": 0.5},
        "uplink": {"name": "randk", "k": 6},
    }
    found = plan(TABLE | {"method": method})
    assert {row.method for row in found.rows} == set(registry.choices("method"))
    up = {name: found[name].cost.up_round for name in ("compressed", "scallion", "ef", "scaffold")}
    moved = 24 * 4  # where steps with momentum end, beside the control
    coded = {"compressed": 6 * 4, "scallion": 6 * 4 + moved, "ef": 2 * 4 + 2}
    assert up == coded | {"scaffold": 24 * 4 + moved}


def test_a_long_run_is_carried_on_from_its_first_rounds() -> None:
    spec = dataclasses.replace(Spec.from_table(TABLE), rounds=600, eval_every=600)
    done, found = fedspan.run(spec), price(spec)
    assert found.up == done.up_bytes
    assert found.down == pytest.approx(done.down_bytes, rel=0.1)
    assert found.client_state == 24 * 4
    assert found.client_disk == 2 * 2 * 24 * 4
    assert found.server_disk == 7 * 24 * 4


@pytest.mark.parametrize("name", ["ssf", "powersgd", "fedsub"])
def test_a_steady_run_is_walked_through_no_further(name: str) -> None:
    rank = {"rank": 1} if name == "powersgd" else {"rank": 0.2}
    method = tables.build("method", {"name": name, "lr": 0.02} | rank)
    found = cost(method, FlatProblem(LAYOUT, 4), 4, 200, 0)
    loop = start(method, FlatProblem(LAYOUT, 4), 4, AlikeClients(method, FlatProblem(LAYOUT, 4)))
    advance(loop, 200)
    assert len(found.walked) < 20
    spent = int(loop.ledger.up.sum()), int(loop.ledger.down.sum())
    assert (found.up, found.down) == pytest.approx(
        spent, rel=1e-3 if name == "powersgd" else 0
    )  # odd and even rounds
    held = sum(array.nbytes for array in wire.pack(loop.server).values())
    assert (
        held <= found.server_memory <= held + 4 * LAYOUT.size
    )  # a log that grew no longer than the model


def test_a_log_that_shrinks_in_the_last_round_is_not_carried_on() -> None:
    """FedSub's log grows and shrinks with who takes part."""
    spec = Path(__file__).parents[2] / "examples/ssf.toml"
    done = CliRunner().invoke(app, ["plan", str(spec), "--methods", "fedsub"])
    assert re.search(r"fedsub +800 B +9.6 kB +9\.\d+ kB +16 kB", done.stdout), done.stdout


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(Spec.from_table(TABLE).toml())
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert (
        "24 parameters, 24 of them trained, in 1 tensor; 30 rounds of 3 of 7 clients" in done.stdout
    ), done.exception
    for name in registry.choices("method"):
        assert name in done.stdout
    assert "client memory" not in done.stdout
    both = CliRunner().invoke(app, ["plan", str(path), "--model", str(tmp_path)])
    assert both.exit_code == 2
    assert "give a spec" in both.output


def test_a_table_per_kind_of_cost(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(Spec.from_table(TABLE | {"task": IMAGES | {"model": "mlp"}}).toml())
    text = CliRunner().invoke(app, ["plan", str(spec), "--methods", "ssf,fedavg"]).stdout
    for word in ("up, run", "client memory", "activations", "server disk", "ssf", "fedavg"):
        assert word in text


NORMED = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("rounds", [7, 130])
@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "scaffold"},
        {"name": "ssf", "rank": 0.2},
        {"name": "subavg", "rank": 0.5},
        {"name": "ef21"},
        {"name": "fedit", "rank": 2},
    ],
    ids=lambda method: method["name"],
)
def test_planned_bytes_are_those_that_are_counted(method: dict[str, Any], rounds: int) -> None:
    """With statistics of BatchNorm, and clients that have not taken part for a while, beyond the rounds walked."""
    clients = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(9)]
    spec = spec_of(
        NORMED, clients, method=method | {"lr": 1e-3, "local_steps": 1}, rounds=rounds, clients_per_round=2,
        eval_every=rounds,
    )  # fmt: skip
    planned, counted = price(spec), run(spec)
    assert (planned.up, planned.down) == (counted.up_bytes, counted.down_bytes)
