"""What a plan says before a run is what the run's ledger says after it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from fedspan.api.spec import Spec
from test_run import fedspan as command

from fedspan.api import spec as experiment
from fedspan.core import registry

TABLE = {
    "rounds": 30,
    "eval_every": 30,
    "method": {"name": "ssf", "projector": {"name": "gaussian", "rank": 3}, "lr": 0.02, "local_steps": 2},
    "task": {"name": "regression", "clients": 7, "dim": 12, "outputs": 2, "samples": 9, "batch": 4},
    "participation": {"clients_per_round": 3},
}


def test_a_plan_is_what_the_run_then_costs(tmp_path: Path) -> None:
    spec = Spec.from_table(TABLE)
    layout, costs = experiment.plan(spec)
    assert layout.size == 24
    for name, cost in costs.items():
        known = {field.name for field in dataclasses.fields(registry.choices("method")[name])}
        method = {k: v for k, v in TABLE["method"].items() if k in known}  # type: ignore[attr-defined]
        if "rank" in known and "projector" not in known:
            method["rank"] = 3
        done = experiment.run(Spec.from_table(TABLE | {"method": method | {"name": name}}), tmp_path / name)
        assert cost.up == done.rows[0][-1]["up_bytes"]
        assert cost.down == done.rows[0][-1]["down_bytes"]


def test_what_another_method_refuses_is_left_out_of_its_plan() -> None:
    """SCALLION takes no momentum, and error feedback no rand-k that is unbiased; both are planned all the same."""
    method = {"name": "compressed", "lr": 0.02, "momentum": 0.5, "compressor": {"name": "randk", "k": 6}}
    costs = experiment.plan(Spec.from_table(TABLE | {"method": method}))[1]
    assert set(costs) == set(registry.choices("method"))
    up = {name: costs[name].up_round for name in ("compressed", "scallion", "ef", "scaffold")}
    assert up == {"compressed": 6 * 4, "scallion": 6 * 4, "ef": 2 * 4 + 2, "scaffold": 2 * 24 * 4}


def test_a_long_run_is_carried_on_from_its_first_rounds(tmp_path: Path) -> None:
    spec = dataclasses.replace(Spec.from_table(TABLE), rounds=600)
    done = experiment.run(spec, tmp_path / "run")
    cost = experiment.plan(spec)[1]["ssf"]
    assert cost.up == done.rows[0][-1]["up_bytes"]
    assert cost.down == pytest.approx(done.rows[0][-1]["down_bytes"], rel=0.1)
    assert cost.client_state == 24 * 4
    assert cost.client_disk == 2 * 2 * 24 * 4
    assert cost.server_disk == 7 * 24 * 4


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(Spec.from_table(TABLE).toml())
    done = command("plan", path)
    assert "24 numbers in 1 tensors; 30 rounds" in done.stdout
    for name in registry.choices("method"):
        assert name in done.stdout
    assert not (tmp_path / "run").exists()
