"""The virtual clock: hours over the clients' own links, and who is there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedspan
from fedspan import Federation, SpecError
from fedspan.core.errors import CheckpointError, DataError, FedspanError
from fedspan.engine.audit import read_record
from fedspan.engine.clock import Clock
from support.loops import RUN, Interrupt

N, ROUNDS = 7, 12
LINKS = """client,up_mbit,down_mbit,latency,step_seconds
3,2,8,0.1,0.01
0,1,4,0.2,0.02
1,0.5,4,0.0,0.5
2,20,40,0.1,0.03
4,3,9,0.1,0.04
5,4,4,0.3,0.05
6,5,5,0.1,0.06
"""
FILES = ("up_mbit", "down_mbit", "latency", "step_seconds")


def run(federation: Any = None, **more: Any) -> Any:
    """A run of FedAvg, or of what `more` says, on the small problem."""
    own = {} if federation is None else {"federation": federation}
    arguments = {
        key: more.pop(key) for key in ("run_dir", "resume", "callbacks", "seeds") if key in more
    }
    return fedspan.run(RUN | {"rounds": ROUNDS} | own | more, progress=False, **arguments)


def losses(result: Any) -> list[float]:
    return [row["loss"] for row in result.history]


def events(run_dir: Path, kind: str) -> dict[int, list[int]]:
    """Round → clients of the events of a kind."""
    (trail,), _, wrong = read_record(run_dir)
    assert not wrong
    return trail.of_kind(kind)


@pytest.fixture
def links(tmp_path: Path) -> dict[str, str]:
    """Settings of a federation whose links are in a file."""
    (tmp_path / "links.csv").write_text(LINKS)
    return dict.fromkeys(FILES, str(tmp_path / "links.csv"))


def test_hours_are_those_of_the_slowest_client_of_each_round(
    tmp_path: Path, links: dict[str, str]
) -> None:
    result = run(links, run_dir=tmp_path / "run")
    table = {
        int(c): values for c, *values in (map(float, line.split(",")) for line in LINKS.split()[1:])
    }
    size, steps, hours = 24 * 8, RUN["method"]["local_steps"], [0.0]
    for ids in events(tmp_path / "run", "counted").values():
        each = [
            latency + steps * step + 8e-6 * size * (1 / up + 1 / down)
            for up, down, latency, step in (table[i] for i in ids)
        ]
        hours.append(hours[-1] + max(each) / 3600)
        assert len(ids) == 3
    np.testing.assert_allclose([row["hours"] for row in result.history], hours, rtol=1e-6)
    assert all(
        1 in ids
        for t, ids in events(tmp_path / "run", "counted").items()
        if 1 in events(tmp_path / "run", "slow").get(t, [])
    )


def test_a_clock_does_not_change_a_run_in_which_everyone_is_there(links: dict[str, str]) -> None:
    for method in ("fedavg", "ssf", "scaffold"):
        how = {"method": RUN["method"] | {"name": method}}
        assert losses(run(**how)) == losses(run(links, **how)) == losses(run({}, **how))
    assert "hours" not in run().history[-1]


@pytest.mark.parametrize("secure", [False, True])
def test_the_bytes_of_a_round_are_those_that_are_packed(
    secure: bool, links: dict[str, str]
) -> None:
    """On links without steps and latency, hours are bytes: what is sent twice over takes twice as long."""
    privacy = {"privacy": {"secure": True}} if secure else {}
    alone = {"latency": 0, "step_seconds": 0, "up_mbit": 8.0, "down_mbit": 8.0}
    result = run(alone, clients_per_round=N, **privacy)
    row = result.history[-1]
    sent = (row["up_bytes"] + row["down_bytes"]) / N
    assert row["hours"] == pytest.approx(sent / 1e6 / 3600, rel=1e-4)
    half = run(alone | {"up_mbit": 4.0, "down_mbit": 4.0}, clients_per_round=N, **privacy)
    assert half.history[-1]["hours"] == pytest.approx(2 * row["hours"], rel=1e-4)


def test_draws_lie_between_low_and_high_and_follow_the_seed() -> None:
    def drawn(seed: int) -> Clock:
        return Clock(Federation(preset="phones"), 2000, seed, 5)

    one = drawn(3)
    assert one.up.min() >= 0.5
    assert one.up.max() <= 20
    below = (one.up < np.sqrt(0.5 * 20)).mean()  # the middle of the logarithms
    assert 0.45 < below < 0.55
    assert (one.up == drawn(3).up).all()
    assert (one.up != drawn(4).up).any()
    assert (one.up != one.down).any()
    few = Clock(Federation(preset="phones"), 20, 3, 5)
    assert (few.up == one.up[:20]).all()


def test_others_take_the_places_of_the_absent(tmp_path: Path) -> None:
    run({"available": 0.5}, run_dir=tmp_path / "some", rounds=40)
    run({}, run_dir=tmp_path / "all", rounds=40)
    drawn, there = events(tmp_path / "all", "counted"), events(tmp_path / "some", "counted")
    absent = events(tmp_path / "some", "absent")
    assert 20 < sum(map(len, absent.values())) < 100
    for t, ids in there.items():
        gone = set(absent.get(t, []))
        assert gone <= set(drawn[t])
        assert not gone & set(ids)
        assert set(drawn[t]) - gone <= set(ids)
    assert {len(ids) for ids in there.values()} >= {3}


def test_seeds_together_are_seeds_alone() -> None:
    together = run({"preset": "phones"}, seeds=2, seed=4)
    alone = [run({"preset": "phones"}, seed=seed) for seed in (4, 5)]
    for rows, one in zip(together.runs, alone, strict=True):
        assert [row["hours"] for row in rows] == [row["hours"] for row in one.history]
        assert [row["loss"] for row in rows] == losses(one)


def test_a_server_waits_until_the_day_begins(tmp_path: Path) -> None:
    result = run({"available": {"start": 22, "hours": 1}})
    assert 22 < result.history[1]["hours"] < 22.1
    clock = Clock(Federation(available={"hours": 6}), 500, 1, 5)
    for hours in (0.0, 5.5, 12.0, 30.0):
        clock.hours = hours
        assert 0.17 < clock.present(0).mean() < 0.33
    clock.hours = 1.0
    first = clock.present(0)
    clock.hours = 25.0
    assert (clock.present(9) == first).all()


def test_a_trace_says_who_is_there_and_starts_again(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("client,from,to\n2,0,1\n4,0.5,2\n5,3,4\n")
    clock = Clock(Federation(available=str(tmp_path / "trace.csv")), N, 1, 5)
    for hours, ids in ((0.0, [2]), (0.7, [2, 4]), (1.5, [4]), (3.0, [5]), (4.2, [2]), (10.0, [5])):
        clock.hours = hours
        assert np.flatnonzero(clock.present(0)).tolist() == ids
        assert clock.hours == pytest.approx(hours if hours < 10 else 11, abs=0.02)


@pytest.mark.parametrize("preset", ["hospitals", "phones"])
def test_a_resumed_run_has_the_same_hours(tmp_path: Path, preset: str) -> None:
    how: dict[str, Any] = {"method": {"name": "ssf", "rank": 4, "lr": 0.02, "local_steps": 3}}
    whole = run({"preset": preset}, **how)
    with pytest.raises(KeyboardInterrupt):
        run({"preset": preset}, run_dir=tmp_path / "r", callbacks=[Interrupt(5)], **how)
    rest = run({"preset": preset}, run_dir=tmp_path / "r", resume=True, **how)
    for key in ("round", "loss", "hours", "up_bytes", "down_bytes"):
        assert [row[key] for row in rest.history] == [row[key] for row in whole.history]


def test_a_changed_file_of_links_is_not_resumed(tmp_path: Path, links: dict[str, str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(links, run_dir=tmp_path / "r", callbacks=[Interrupt(5)])
    (tmp_path / "links.csv").write_text(LINKS.replace("0,1,4", "0,1,5"))
    with pytest.raises(CheckpointError, match="a file of `federation` has changed"):
        run(links, run_dir=tmp_path / "r", resume=True)


@pytest.mark.parametrize(
    ("federation", "words"),
    [
        ({"preset": "phone"}, "did you mean 'phones'"),
        ({"up_mbit": 0.0}, "`federation.up_mbit` must be a positive number"),
        ({"latency": -1.0}, "`federation.latency` must be a number of at least 0"),
        ({"up_mbit": {"low": 5.0, "high": 1.0}}, "`federation.up_mbit` has a high of 1 below its low"),
        ({"up_mbit": {"low": 5.0}}, "`federation.up_mbit` must be a table of high, low"),
        ({"available": 1.5}, "`federation.available` must be a probability"),
        ({"available": {"start": 3.0}}, "`federation.available` must be a table of hours, start"),
        ({"up_mbit": "no.csv"}, "`federation.up_mbit`: 'no.csv' does not exist"),
        ({"step": 1.0}, "`[federation]` has no key 'step'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(federation: dict[str, Any], words: str) -> None:
    with pytest.raises(FedspanError) as error:
        run(federation)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("up_mbit\n1\n2\n", "has 2 rows for 7 clients"),
        ("down_mbit\n" + "1\n" * 7, "has no column 'up_mbit'"),
        ("up_mbit\n" + "0\n" * 7, "not positive numbers"),
        ("up_mbit\n" + "a\n" * 7, "is not of numbers"),
        ("client,up_mbit\n" + "".join(f"{n + 1},1\n" for n in range(7)), "a client that there is not: '7'"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "links.csv").write_text(text)
    with pytest.raises((SpecError, DataError)) as error:
        run({"up_mbit": str(tmp_path / "links.csv")})
    assert words in str(error.value)


def test_files_of_a_spec_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "links.csv").write_text(LINKS)
    spec = dataclasses.replace(
        fedspan.Spec.from_table(RUN), federation=Federation(up_mbit="links.csv")
    )
    (tmp_path / "spec.toml").write_text(spec.toml())
    result = fedspan.run(tmp_path / "spec.toml", progress=False)
    assert result.history[-1]["hours"] > 0


def test_hours_can_be_drawn() -> None:
    pytest.importorskip("matplotlib")
    assert run({}).plot("hours").get_xlabel() == "hours"
    with pytest.raises(SpecError, match="only runs with a `federation`"):
        run().plot("hours")
