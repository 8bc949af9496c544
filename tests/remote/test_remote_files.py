"""Every write of a run across machines is interrupted once, and every file it reads back is damaged.

The resumed run is the simulator's with the same accepted replies, or it is refused in one line.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from fedspan.core import json_log
from fedspan.core.errors import CheckpointError
from fedspan.engine.audit import read_record
from fedspan.engine.loop import Loop, Row
from fedspan.remote.roster import ROSTER, Roster
from support.files import damage
from support.flower import inside_a_task  # noqa: F401
from support.killing import KilledError
from support.rounds import rounds_in
from support.soak import DAMAGES, World, world

KINDS = ("crash", "short", "full", "io")
EVERY = [pytest.param(31, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
ROUNDS = 4


def calls_of(folder: Path, who: str) -> int:
    with world(folder, rounds=ROUNDS, bind_clients=True) as one:
        one.check(one.finish())
        return one.disk.calls[who]


@pytest.mark.parametrize("step", EVERY)
@pytest.mark.parametrize("who", ["server", "client"])
def test_every_interrupted_call_leaves_a_run_that_is_right(
    who: str, step: int, tmp_path: Path
) -> None:
    """The client's state file, and the server's checkpoint, history, roster, rounds and copies of states."""
    calls = calls_of(tmp_path / "count", who)
    for at, kind in itertools.product(range(0, calls, step), KINDS):
        if step > 1 and KINDS[at // step % 4] != kind:
            continue
        with world(tmp_path / f"{at}-{kind}", rounds=ROUNDS, bind_clients=True) as one:
            if who == "server":
                one.strikes = [(at, kind)]
            else:
                one.disk.fail("client", at, kind)
            try:
                one.check(one.finish())
                assert one.disk.struck[f"{who} {kind}"] == 1
            except BaseException as error:
                error.add_note(f"call {at} of the {who}: {kind}; {one.refusals}")
                raise


def killed(one: World, after: int = 8) -> None:
    """The server dies after so many messages of training."""
    one.grid.plan = {after: "server dies sending"}
    assert one.start(False) is None
    assert (one.out / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_of_the_server_is_refused_or_does_not_matter(
    how: str, tmp_path: Path
) -> None:
    refused: dict[str, str] = {}
    with world(tmp_path / "w", rounds=ROUNDS, bind_clients=True) as one:
        killed(one)
        shutil.copytree(tmp_path / "w", tmp_path / "whole")
        for file in one.server_files():
            shutil.rmtree(tmp_path / "w")
            shutil.copytree(tmp_path / "whole", tmp_path / "w")
            damage(file, how)
            result = one.start(True)
            if result is None:
                refused[file.name] = one.refusals[-1]
            elif file.name == "audit.jsonl":
                wrong = read_record(one.out)[2]
                assert how == "double" or "the trail begins at round" in wrong[0], "it says so"
            else:
                one.check(result)
    assert not any("\n" in said for said in refused.values())
    assert "checkpoint.safetensors" in refused
    assert how == "double" or "c.states" in refused
    assert how == "delete" or ROSTER in refused


def events(out: Path) -> list[str]:
    return [event for one in rounds_in(out) for event in one["events"]]


@pytest.mark.parametrize("name", [ROSTER, "checkpoint.safetensors", "copies/c.states"])
def test_a_file_of_another_run_is_refused(name: str, tmp_path: Path) -> None:
    with world(tmp_path / "other", rounds=ROUNDS, bind_clients=True, seed=1) as other:
        killed(other, 5)
        shutil.copytree(tmp_path / "other", tmp_path / "kept")
    with world(tmp_path / "w", rounds=ROUNDS, bind_clients=True) as one:
        killed(one)
        shutil.copy(tmp_path / "kept" / "out" / name, one.out / name)
        assert one.start(True) is None
        assert "another run" in one.refusals[-1] or "is damaged" in one.refusals[-1]
        assert "\n" not in one.refusals[-1]


@pytest.mark.parametrize("how", [*DAMAGES, "foreign"])
def test_a_damaged_state_of_a_client_is_restored(how: str, tmp_path: Path) -> None:
    with world(tmp_path / "w", rounds=8) as one:
        one.grid.plan = dict.fromkeys((8, 13, 17), f"file {how}")
        one.check(one.finish())
        assert one.grid.done.total() == 3
        assert any("restored from the server's copy" in event for event in events(one.out))


def test_a_process_that_nobody_waits_for_does_not_replace_a_state(tmp_path: Path) -> None:
    """It writes the file of its client last, with the count that the server expects; the mark tells it apart."""
    with world(tmp_path / "w", rounds=12) as one:
        one.grid.plan = dict.fromkeys(range(8, 32, 3), "orphan")
        one.check(one.finish())
        assert one.grid.done["orphan"] > 5
        assert any(
            "follows from an update that the server has not accepted" in event
            for event in events(one.out)
        )


def test_a_server_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """Copies of states without a checkpoint are of no use: a new start replaces them."""
    with world(tmp_path / "w", rounds=2) as one:
        for at in range(12):
            one.strikes = [(at, "crash")]
            assert one.start(False) is None
            if (one.out / "checkpoint.safetensors").exists():
                break
        assert at > 3
        assert (one.out / "copies" / "c.states").exists()
        one.check(one.finish())


def test_a_server_killed_between_a_checkpoint_and_its_evaluation_evaluates_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Loop._evaluate
    with world(tmp_path / "w", rounds=6) as one:

        def dies(loop: Loop) -> Row:
            if loop.t == 3 and not one.disk.struck:
                one.disk.struck["server crash"] += 1
                one.disk.dead.add("server")
                raise KilledError
            return evaluate(loop)

        monkeypatch.setattr(Loop, "_evaluate", dies)
        one.check(one.finish())
        assert one.disk.struck


def bits(path: Path, change: Callable[[], object]) -> None:
    """Flips every third bit of a small file, one at a time."""
    raw = path.read_bytes()
    for bit in range(0, 8 * len(raw), 3):
        place = bit // 8
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << bit % 8]) + raw[place + 1 :])
        change()


def test_no_flipped_bit_of_a_table_or_a_line_is_believed(tmp_path: Path) -> None:
    """Each one is refused, or the values are the same (a blank that became another blank)."""
    roster = Roster(tmp_path / "r.json")
    assert roster.admits(0, 12)
    assert roster.admits(3, 7)
    lines = [{"round": 0, "loss": 0.5}, {"round": 1, "events": ["a"]}]
    text, check = json_log.lines_text(lines)
    (tmp_path / "lines").write_bytes(text)
    counts = {"refused": 0, "same": 0}

    def roster_again() -> None:
        try:
            assert Roster.at(tmp_path / "r.json").nodes == {0: 12, 3: 7}
            counts["same"] += 1
        except CheckpointError:
            counts["refused"] += 1

    def lines_again() -> None:
        try:
            found, _ = json_log.read_lines(tmp_path / "lines", check)
        except CheckpointError:
            counts["refused"] += 1
            return
        assert found == lines
        counts["same"] += 1

    bits(tmp_path / "r.json", roster_again)
    bits(tmp_path / "lines", lines_again)
    assert counts["refused"] > 20 * counts["same"]
