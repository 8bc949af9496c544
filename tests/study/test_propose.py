"""`fedspan.tune` for a budget: rank, bits, local steps and learning rate, with what was tried."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

import fedspan
from fedspan.cli.app import app
from fedspan.compressors import QSGD
from fedspan.core.errors import SpecError
from fedspan.methods import SSF, FedAvg
from fedspan.study.compare import Tuned
from support.loops import RUN

SPEC: dict[str, Any] = RUN | {
    "rounds": 60,
    "clients_per_round": 7,
    "method": {"name": "ssf", "local_steps": 2},
}


@pytest.fixture(scope="module")
def found() -> Tuned:
    """A proposal for a method with rank and bits."""
    return fedspan.tune(SSF(local_steps=2), SPEC, budget="total=40kB", progress=False)


def test_every_setting_is_tried(found: Tuned) -> None:
    tried = {(row["method"], row["rank"], row["local_steps"]) for row in found.rows}
    ranks, steps = (0.05, 0.1, 0.2, 0.5), (1, 2, 4)
    assert tried == {
        (label, rank, k) for label in ("ssf", "ssf, 8 bits") for rank in ranks for k in steps
    }
    assert found.metric == "rel_err"
    assert f"{found.rounds} rounds" in found.summary()


def test_the_best_of_all_settings_is_chosen(found: Tuned) -> None:
    (chosen,) = [row for row in found.rows if row["chosen"]]
    assert chosen["rel_err"] == min(row["rel_err"] for row in found.rows)
    assert found.method.local_steps == chosen["local_steps"]
    coded = chosen["method"] == "ssf, 8 bits"
    assert (found.method == found.comparison.best[chosen["method"]]) is True
    assert hasattr(found.method.uplink, "compressor") is coded  # type: ignore[attr-defined]


def test_the_proposed_run_keeps_the_budget(found: Tuned) -> None:
    """Its bytes are those of a real run."""
    result = fedspan.run(SPEC | {"rounds": found.rounds, "method": found.method}, progress=False)
    last = result.history[-1]
    assert last["up_bytes"] + last["down_bytes"] <= 40e3
    assert last["rel_err"] == min(row["rel_err"] for row in found.rows)


def test_without_a_rank_local_steps_are_tried() -> None:
    found = fedspan.tune("fedavg", SPEC, budget="total=60kB", progress=False)
    assert [row["local_steps"] for row in found.rows] == [5, 10, 20]
    assert found.method == FedAvg(
        local_steps=found.settings["local_steps"], lr=found.settings["lr"]
    )


def test_epochs_are_kept() -> None:
    found = fedspan.tune("fedavg", SPEC | {"epochs": 1.0}, budget="rounds=10", progress=False)
    assert list(found.settings) == ["lr"]
    assert found.rounds == 10


def test_ranks_that_the_budget_does_not_allow_are_left_out() -> None:
    found = fedspan.tune(SSF(local_steps=2), SPEC, budget="total=8kB", progress=False)
    ranks = {row["rank"] for row in found.rows}
    assert ranks
    assert max(ranks) < 0.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "`budget` such as 'total=50MB'"),
        ({"budget": []}, "`budget` is empty"),
        ({"budget": "total=1B"}, "no rank has 8 rounds within the budget"),
        ({"budget": "total=1MB", "tune": {"ranks": [1]}}, "no setting 'ranks'"),
    ],
)
def test_what_cannot_be_used_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fedspan.tune(SSF(), SPEC, **settings)


def test_codes_that_the_method_has_are_kept() -> None:
    method = SSF(rank=0.5, local_steps=2, downlink=QSGD(bits=4, bucket=16))
    found = fedspan.tune(method, SPEC, budget="rounds=9", progress=False)
    assert {row["method"] for row in found.rows} == {"ssf"}
    assert found.method.downlink == method.downlink  # type: ignore[attr-defined]


def told(tmp_path: Path, spec: dict[str, Any], *words: str) -> tuple[str, dict[str, Any]]:
    """What the command prints, and the table at its end."""
    (tmp_path / "s.toml").write_text(tomli_w.dumps(spec))
    line = ["tune", str(tmp_path / "s.toml"), "--budget", "rounds=10"]
    for grid in words:
        line += ["--grid", grid]
    said = CliRunner().invoke(app, line)
    assert said.exit_code == 0, said.output
    return said.output, tomllib.loads("rounds" + said.output.rpartition("\nrounds")[2])


def test_the_command_prints_a_method_for_the_spec(tmp_path: Path) -> None:
    spec = SPEC | {"method": {"name": "fedavgm"}}
    _, table = told(tmp_path, spec, "server.beta=0.5,0.9", "lr=search")
    method = fedspan.Spec.from_table(spec | table).method
    assert method.server.beta in (0.5, 0.9)  # type: ignore[attr-defined]
    assert isinstance(method.lr, float)
    assert table["rounds"] == 10


def test_what_the_command_prints_replaces_every_setting_that_was_chosen(tmp_path: Path) -> None:
    """Also those that are the method's defaults, in a spec that has others."""
    spec = SPEC | {"method": {"name": "fedavg", "local_steps": 3}, "epochs": 2.0}
    said, table = told(tmp_path, spec, "local_steps=10", "lr=0.1")
    assert table["method"]["local_steps"] == FedAvg().local_steps == 10
    assert "delete `epochs` from the spec" in said
