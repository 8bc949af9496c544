"""A fleet as it is: impostors, clients that are away or silent, absurd replies, and run configs that cannot work."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import Array, ArrayRecord, Message, RecordDict

import fedspan
from fedspan.core.errors import FedspanError, ResumableError, SpecError
from fedspan.remote.flower.records import RunConfig
from fedspan.remote.roster import Roster
from support.flower import FakeGrid, events_of, inside_a_task, serve, spec_of  # noqa: F401
from support.rounds import rounds_in


def test_a_number_belongs_to_the_first_node_that_used_it(tmp_path: Path) -> None:
    """A second node that says it is client 0 is given neither its state nor its work."""
    spec = spec_of(rounds=8)

    class Impostor(FakeGrid):
        def get_node_ids(self) -> list[int]:
            if self.count > 12:
                self.clients[666] = 0
            return super().get_node_ids()

        def answer(self, message: Message) -> Message | None:
            if message.metadata.message_type == "train":
                assert message.metadata.dst_node_id != 666, "the impostor was given work"
            found = super().answer(message)
            if found is not None and message.metadata.dst_node_id == 666:
                found.content["identity"]["name"] = "mallory"
            return found

    result = serve(spec, Impostor(spec, tmp_path / "states"), tmp_path / "out", bind_clients=True)
    assert result.status == "finished"
    events = [event for one in rounds_in(tmp_path / "out") for event in one.get("events", [])]
    assert any("node 666 is refused as client 0" in event for event in events), "by its own name"
    roster = Roster.at(tmp_path / "out" / "roster.json")
    assert roster.nodes[0] == 100
    assert not roster.admits(0, 666)
    assert not roster.admits(5, 100), "one node stands for one client"
    assert roster.forget(0) == 100
    largest = 2**64 - 1  # Flower's node ids are of 64 bits without a sign
    assert Roster.at(tmp_path / "out" / "roster.json").admits(0, largest)
    assert Roster.at(tmp_path / "out" / "roster.json").admits(0, largest)
    with pytest.raises(SpecError, match="not bound"):
        roster.forget(55)


class Restarted(FakeGrid):
    """Nodes as Flower tells of them: registered so many seconds before they came. Client 0's node comes again."""

    def __init__(self, spec: Any, states_dir: Path, ahead: dict[int, float]) -> None:
        super().__init__(spec, states_dir)
        self.ahead = ahead

    def get_nodes(self) -> list[Any]:
        began = datetime(2030, 1, 1, tzinfo=UTC)
        times = {
            node: (began, began + timedelta(seconds=self.ahead.get(node, 0.02)))
            for node in self.clients
        }
        return [
            SimpleNamespace(
                node_id=node, registered_at=a.isoformat(), last_activated_at=b.isoformat()
            )
            for node, (a, b) in times.items()
        ]

    def get_node_ids(self) -> list[int]:
        if self.count > 12:
            self.clients[666] = 0
        return super().get_node_ids()


@pytest.mark.parametrize(
    ("ahead", "config", "bound"),
    [
        (
            dict.fromkeys(range(100, 107), 30.0),
            {},
            True,
        ),  # registered by somebody: Flower authenticates them
        (
            dict.fromkeys(range(100, 106), 30.0),
            {},
            True,
        ),  # one came within a second of being registered
        ({}, {}, False),  # each registers itself as it comes, under a new key
        ({100: 9.0}, {}, False),  # one had to try again
        ({}, {"bind_clients": True}, True),
        (dict.fromkeys(range(100, 107), 30.0), {"bind_clients": False}, False),
    ],
)
def test_clients_are_bound_by_default_where_nodes_are_authenticated(
    ahead: dict[int, float], config: dict[str, Any], bound: bool, tmp_path: Path
) -> None:
    spec = spec_of(rounds=8)
    grid = Restarted(spec, tmp_path / "states", ahead)
    assert serve(spec, grid, tmp_path / "out", **config).finished
    events = [event for one in rounds_in(tmp_path / "out") for event in one.get("events", [])]
    assert any("node 666 is refused as client 0" in event for event in events) == bound
    assert (tmp_path / "out" / "roster.json").exists() == bound
    if bound:
        assert Roster.at(tmp_path / "out" / "roster.json").nodes == {
            client: 100 + client for client in range(7)
        }


def test_a_run_that_was_bound_stays_bound(tmp_path: Path) -> None:
    """Also if its nodes, which come again, seem to have registered themselves."""
    spec = spec_of(rounds=8)
    grid = Restarted(spec, tmp_path / "states", dict.fromkeys(range(100, 107), 30.0))

    class Stop(fedspan.Callback):
        def on_round_end(self, run: Any) -> None:
            if run.t == 2:
                raise RuntimeError

    with pytest.raises(RuntimeError):
        serve(dataclasses.replace(spec, callbacks=(Stop(),)), grid, tmp_path / "out")
    grid.ahead = {}
    assert serve(spec, grid, tmp_path / "out", resume=True).finished
    events = [event for one in rounds_in(tmp_path / "out") for event in one.get("events", [])]
    assert any("node 666 is refused as client 0" in event for event in events)


@pytest.mark.parametrize("value", ["on", 1.5, 1, ""])
def test_binding_is_true_false_or_auto(value: Any) -> None:
    assert RunConfig.read({"bind-clients": "auto"}) == RunConfig.read({}) == RunConfig()
    with pytest.raises(
        SpecError, match="run config 'bind-clients' must be true, false or \"auto\""
    ):
        RunConfig.read({"bind-clients": value})


class Away(FakeGrid):
    """Nodes that are all away for the first looks of the server."""

    looks = 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        return [] if 3 < self.looks < 9 or self.looks > self.gone else super().get_node_ids()

    gone = 10**9


def test_a_fleet_that_is_away_pauses_the_run(tmp_path: Path) -> None:
    spec = spec_of()
    paused = serve(spec, Away(spec, tmp_path / "a"), tmp_path / "away", pause=5.0)
    plain = serve(spec, FakeGrid(spec, tmp_path / "b"), tmp_path / "plain", pause=5.0)
    assert paused.history[-1]["rel_err"] == plain.history[-1]["rel_err"]
    assert any("not connected" in event for event in events_of(paused))


@pytest.mark.parametrize("gone", [0, 3], ids=["from the start", "later"])
def test_a_run_whose_clients_never_come_stops_and_can_be_resumed(gone: int, tmp_path: Path) -> None:
    spec = spec_of()
    grid = Away(spec, tmp_path / "a")
    grid.gone = gone
    with pytest.raises(ResumableError, match="resume the run when the clients are back") as stalled:
        serve(spec, grid, tmp_path / "out", pause=0.2)
    assert "\n" not in str(stalled.value)
    assert not (tmp_path / "out" / "result.json").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    grid.gone = 10**9
    resumed = serve(spec, grid, tmp_path / "out", pause=5.0, resume=True)
    plain = serve(spec, FakeGrid(spec, tmp_path / "b"), tmp_path / "plain")
    assert resumed.status == "finished"
    assert resumed.history[-1]["rel_err"] == plain.history[-1]["rel_err"]


def test_a_silent_client_costs_the_timeout_once(tmp_path: Path) -> None:
    spec = spec_of(rounds=8, clients_per_round=7)

    class Silent(FakeGrid):
        def answer(self, message: Message) -> Message | None:
            found = super().answer(message)
            train = message.metadata.message_type == "train"
            return None if train and self.clients[message.metadata.dst_node_id] == 4 else found

    began = time.monotonic()
    result = serve(spec, Silent(spec, tmp_path / "s"), tmp_path / "out", timeout=5.0)
    assert sum("client 4: no reply in time" in event for event in events_of(result)) == 8
    assert time.monotonic() - began < 4 * 5.0, "eight rounds that each wait for it would take 40 s"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"wait": -5.0}, "wait"),
        ({"pause": 0.0}, "pause"),
        ({"min-replies": 0}, "min-replies"),
        ({"checkpoint-every": 0}, "checkpoint-every"),
    ],
)
def test_run_configs_that_cannot_work_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(FedspanError, match=words):
        RunConfig.read(config)


def test_more_replies_than_clients_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    spec = spec_of()
    with pytest.raises(SpecError, match="min-replies"):
        serve(spec, FakeGrid(spec, tmp_path / "s"), tmp_path / "out", min_replies=4)
    assert not (tmp_path / "out").exists()


def filled(array: Array, value: float) -> bytes:
    return np.full(array.shape, value, array.dtype).tobytes()


def test_a_run_that_diverged_by_one_reply_goes_on_from_its_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    """A reply of finite but absurd numbers cannot be told from an honest one; what it ruins can be undone."""
    spec = spec_of(rounds=8)

    class Absurd(FakeGrid):
        lies = True

        def answer(self, message: Message) -> Message | None:
            found = super().answer(message)
            assert found is not None
            if message.metadata.message_type == "train" and self.lies and self.count > 20:
                arrays = {
                    k: v if "test" in k else Array(v.dtype, v.shape, v.stype, filled(v, 3e38))
                    for k, v in found.content["arrays"].items()
                }
                return Message(
                    RecordDict({"header": found.content["header"], "arrays": ArrayRecord(arrays)}),
                    reply_to=message,
                )
            return found

    grid = Absurd(spec, tmp_path / "states")
    with pytest.warns(UserWarning, match="diverged"):
        ruined = serve(spec, grid, tmp_path / "out")
    assert ruined.status.startswith("diverged")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in ruined.weights[0].values())
    grid.lies = False
    mended = serve(spec, grid, tmp_path / "out", resume=True)
    plain = serve(spec, FakeGrid(spec, tmp_path / "plain-states"), tmp_path / "plain")
    assert mended.status == "finished"
    assert mended.history[-1]["rel_err"] == plain.history[-1]["rel_err"]
