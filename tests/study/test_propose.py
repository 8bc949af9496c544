"""`fedspan.tune` for a budget: rank, bits, local steps and learning rate, with what was tried and why."""

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
from fedspan.methods import EF, SSF, FedAvg
from fedspan.study.budget import Link
from fedspan.study.proposal import Tuned
from fedspan.uplinks import Code, Feedback
from support.loops import RUN

SPEC: dict[str, Any] = RUN | {
    "rounds": 60,
    "clients_per_round": 7,
    "method": {"name": "ssf", "local_steps": 2},
}


@pytest.fixture(scope="module")
def found() -> Tuned:
    """For a method with rank and bits, over a link on which a round of many bytes takes long."""
    vary = {"rank": [0.25, 1.0], "bits": [32, 8]}
    return fedspan.tune(
        SSF(local_steps=2),
        SPEC,
        budget=["total=120kB", "seconds=100"],
        link="up=1kB,down=4kB,latency=0.1",
        vary=vary,
    )


def test_every_setting_is_tried_and_says_why(found: Tuned) -> None:
    settings = {(row["rank"], row["bits"]) for row in found.rows}
    assert settings == {(0.25, 32), (0.25, 8), (1.0, 32), (1.0, 8)}
    assert found.rows[0]["why"].startswith("lowest rel_err at 50% of the budget")
    assert all(row["why"].startswith(("lowest", "behind", "only")) for row in found.rows)
    assert "4 settings" in found.summary()
    assert found.metric == "rel_err"


def test_the_proposed_run_keeps_the_budget(found: Tuned) -> None:
    """Its bytes and its seconds are those of a real run."""
    result = fedspan.run(SPEC | {"rounds": found.rounds, "method": found.method}, progress=False)
    last = result.history[-1]
    assert last["up_bytes"] + last["down_bytes"] <= 120e3
    assert found.rows[0]["seconds"] <= 100
    assert last["rel_err"] < 0.5
    assert found.method.lr == found.rows[0]["lr"]


def test_the_winner_is_the_best_of_those_that_were_run_to_the_end(found: Tuned) -> None:
    ends = [row["rel_err"] for row in found.rows if row["share"] == 0.5]
    assert ends[0] == min(ends)
    assert len(ends) >= 2


def test_by_default_local_steps_are_varied_around_the_winner() -> None:
    found = fedspan.tune(
        "fedavg", SPEC | {"method": {"name": "fedavg", "local_steps": 2}}, budget="total=60kB"
    )
    assert sorted(row["local_steps"] for row in found.rows) == [
        5,
        10,
        20,
    ]  # K is the method's own, 10
    assert found.method == FedAvg(local_steps=found.rows[0]["local_steps"], lr=found.rows[0]["lr"])


def test_seconds_over_a_link() -> None:
    link = Link.parse("up=1MB, down=4MB, latency=0.5, step=0.01")
    assert link == Link(1e6, 4e6, 0.5, 0.01)
    assert link.seconds(2e6, 4e6, 10) == pytest.approx(3.6)
    assert Link().seconds(1e9, 1e9, 5) == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "`budget` such as 'total=50MB'"),
        ({"budget": "total=1B"}, "no setting has 8 rounds within the budget"),
        ({"budget": "seconds=10"}, "a budget of seconds .* needs a `link`"),
        ({"budget": "total=1MB", "link": "fast"}, "`link` must be one of"),
        ({"budget": "total=1MB", "link": "up=3"}, "`link` is written up=1MB"),
        ({"budget": "total=1MB", "vary": {"ranks": [1]}}, "`vary` must be one of"),
        ({"budget": "total=1MB", "vary": {"bits": [1]}}, "`bits` must be 32"),
        ({"tune": {"lr": [0.1]}, "link": "up=1MB"}, "leave `tune` out"),
    ],
)
def test_what_cannot_be_used_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fedspan.tune(SSF(), SPEC, **settings)


def test_codes_that_the_method_has_are_kept() -> None:
    """A row of 32 bits would have them too, under a wrong name."""
    method = SSF(rank=0.5, local_steps=2, downlink=QSGD(bits=4, bucket=16))
    with pytest.raises(SpecError, match=r"`vary` must be one of .* got 'bits'"):
        fedspan.tune(method, SPEC, budget="total=60kB", vary={"bits": [32, 8]})
    found = fedspan.tune(method, SPEC, budget="total=60kB", vary={"rank": [0.5]})
    assert found.method.downlink == method.downlink


def test_bits_keep_the_memory_of_an_uplink() -> None:
    method = {"name": "ef", "local_steps": 2}
    found = fedspan.tune("ef", SPEC | {"method": method}, budget="total=60kB", vary={"bits": [8]})
    assert found.method.uplink == Feedback(QSGD(bits=8, bucket=2048))
    assert found.method.downlink == EF().downlink


def test_settings_of_an_axis_are_varied(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(tomli_w.dumps(SPEC | {"method": {"name": "fedavgm"}}))
    words = ["--budget", "rounds=40", "--vary", "server.beta=0.5"]
    said = CliRunner().invoke(app, ["tune", str(tmp_path / "s.toml"), *words])
    assert said.exit_code == 0, said.output
    table = tomllib.loads("rounds" + said.output.rpartition("\nrounds")[2])
    assert fedspan.Spec.from_table(SPEC | table).method.server.beta == 0.5  # type: ignore[attr-defined]


def test_the_command_prints_a_method_for_the_spec(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(tomli_w.dumps(SPEC))
    line = [
        "tune",
        str(tmp_path / "s.toml"),
        "--budget",
        "total=40kB",
        "--vary",
        "rank=0.25,0.5",
        "--vary",
        "bits=8",
    ]
    said = CliRunner().invoke(app, line)
    assert said.exit_code == 0, said.output
    table = tomllib.loads("rounds" + said.output.rpartition("\nrounds")[2])
    method = fedspan.Spec.from_table(SPEC | table).method
    assert isinstance(method, SSF)
    assert isinstance(method.uplink, Code)
    assert table["rounds"] > 8
    assert table["method"]["local_steps"] == method.local_steps


def test_the_command_prints_local_steps_also_where_they_are_the_default(tmp_path: Path) -> None:
    spec = SPEC | {"method": {"name": "fedavg", "local_steps": 3}, "epochs": 2.0}
    (tmp_path / "s.toml").write_text(tomli_w.dumps(spec))
    line = ["tune", str(tmp_path / "s.toml"), "--budget", "rounds=10", "--vary", "local_steps=10"]
    said = CliRunner().invoke(app, line)
    assert said.exit_code == 0, said.output
    table = tomllib.loads("rounds" + said.output.rpartition("\nrounds")[2])
    assert table["method"]["local_steps"] == FedAvg().local_steps == 10
    assert "delete `epochs` from the spec" in said.output


def test_what_the_command_prints_replaces_every_setting_that_was_chosen(tmp_path: Path) -> None:
    """Also those that are the method's defaults, in a spec that has others."""
    spec = SPEC | {"method": {"name": "ssf", "rank": 0.5, "local_steps": 3}}
    (tmp_path / "s.toml").write_text(tomli_w.dumps(spec))
    line = [
        "tune",
        str(tmp_path / "s.toml"),
        "--budget",
        "rounds=10",
        "--vary",
        "rank=0.1",
        "--vary",
        "bits=8",
    ]
    said = CliRunner().invoke(app, line)
    assert said.exit_code == 0, said.output
    table = tomllib.loads("rounds" + said.output.rpartition("\nrounds")[2])
    method = fedspan.Spec.from_table(spec | {"method": spec["method"] | table["method"]}).method
    assert (
        method
        == fedspan.tune(
            SSF(local_steps=3), spec, budget="rounds=10", vary={"rank": 0.1, "bits": 8}
        ).method
    )
    assert table["method"]["rank"] == 0.1
