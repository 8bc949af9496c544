"""fedspan on Flower: messages as Flower's records, and a grid in this process for every method."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict

from fedspan.api.run import run
from fedspan.cli import audit
from fedspan.core.callback import Callback
from fedspan.core.spec import Spec
from fedspan.engine.audit import COUNTED, read_record
from fedspan.engine.loop import Loop
from fedspan.remote import flower
from fedspan.remote.flower import records, server
from fedspan.remote.flower.client import IDENTITY, identify, reply_to
from support.axes import by_axis
from support.flower import FLOAT32, SSF, FakeGrid, events_of, inside_a_task, raw, serve, spec_of  # noqa: F401 - a fixture
from support.methods import METHODS
from support.rounds import rounds_in


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_gives_the_simulators_result_and_bytes(name: str, tmp_path: Path) -> None:
    method = {"name": name, "lr": 0.02, "local_steps": 3} | METHODS[name][0]
    spec = spec_of(by_axis(method))
    here = run(spec, tmp_path / "here").history[-1]
    there = serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "there").history[-1]
    assert there["rel_err"] == pytest.approx(here["rel_err"], rel=1e-6)
    assert (there["up_bytes"], there["down_bytes"]) == (here["up_bytes"], here["down_bytes"])
    rounds = rounds_in(tmp_path / "there")
    assert [len(one["accepted"]) for one in rounds] == [3] * 6
    assert sum(one["payload_up"] for one in rounds) == there["up_bytes"]
    assert sum(one["payload_down"] for one in rounds) == there["down_bytes"]


def test_clients_with_the_initial_model_are_not_sent_it(tmp_path: Path) -> None:
    method = SSF | {"server": {"name": "momentum", "beta": 0.5}}
    spec = spec_of(method, participation={"known_start": True})
    here = run(spec, tmp_path / "here").history[-1]
    there = serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "there").history[-1]
    assert there["rel_err"] == pytest.approx(here["rel_err"], rel=1e-6)
    assert (
        there["down_bytes"]
        == here["down_bytes"]
        < run(spec_of(method), progress=False).history[-1]["down_bytes"]
    )
    grid = FakeGrid(spec, tmp_path / "others")
    grid.app = flower.client_app(spec_of(method))
    events = events_of(serve(dataclasses.replace(spec, rounds=1), grid, tmp_path / "refused"))
    assert (
        "refused: participation.known_start is false on the client and true on the server"
        in events[0]
    )


class Lossy(FakeGrid):
    """Errors, silence and nonsense from some clients in some rounds."""

    def __init__(self, spec: Spec, states_dir: Path, faults: dict[int, Any]) -> None:
        super().__init__(spec, states_dir)
        self.faults, self.trained = faults, 0

    def answer(self, message: Message) -> Message | None:
        found = super().answer(message)
        if message.metadata.message_type != "train":
            return found
        self.trained += 1
        fault = self.faults.get(self.trained)
        return found if fault is None else fault(found, message)


def spoilt(found: Message, message: Message, **arrays: Any) -> Message:
    pieces = ArrayRecord({f"{name}#0": array for name, array in arrays.items()})
    content = RecordDict({"header": found.content["header"], "arrays": pieces})
    return Message(content, reply_to=message)


def lying(found: Message, message: Message) -> Message:
    """A few bytes that say they are an array of 4 TB."""
    return spoilt(found, message, a=Array("<f4", (1, 1, 10**12), "raw", b"0" * 24))


def of_another_version(found: Message, message: Message) -> Message:
    header = dict(found.content["header"]) | {"protocol": 7, "version": "9.9"}
    return Message(
        RecordDict(dict(found.content) | {"header": ConfigRecord(header)}), reply_to=message
    )


FAULTS: dict[str, tuple[Any, str]] = {
    "error": (
        lambda _, m: Message(Error(code=8, reason="gone"), reply_to=m),
        "Flower error 8: gone",
    ),
    "silence": (lambda _, __: None, "no reply in time"),
    "nan": (
        lambda f, m: spoilt(f, m, v=raw(np.full((1, 1, 6), np.nan, np.float32))),
        "not finite",
    ),
    "huge": (
        lambda f, m: spoilt(f, m, v=raw(np.zeros((1, 1, 90000), np.float32))),
        "bytes of arrays",
    ),
    "lying": (lying, "but holds"),
    "text": (
        lambda f, m: spoilt(f, m, v=Array("<f4", (6,), "raw", b"six")),
        "but holds 3 bytes",
    ),
    "version": (of_another_version, "speaks protocol 7 (fedspan 9.9)"),
    "type": (lambda f, m: spoilt(f, m, v=raw(np.zeros((1, 1, 6), np.complex64))), "<c8"),
    "foreign": (
        lambda _, m: Message(RecordDict({"x": ConfigRecord({"a": 1})}), reply_to=m),
        "not one of fedspan's",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_on_the_grid_are_events(kind: str, tmp_path: Path) -> None:
    fault, words = FAULTS[kind]
    spec = spec_of(SSF | {"drift": "controls"})  # whose replies are `v` alone
    result = serve(spec, Lossy(spec, tmp_path / "states", {2: fault, 7: fault}), tmp_path / "out")
    events = events_of(result)
    assert len(events) == 2
    assert all(words in event for event in events)
    assert result.finished


def test_the_audit_of_a_deployment_tells_what_happened_to_whom(tmp_path: Path, capsys: Any) -> None:
    """A silent client, nonsense and a lost state, with a robust aggregator and bound nodes; read by `fedspan audit`."""
    participation = {"aggregator": {"name": "trimmed_mean", "share": 0.4}}
    spec = spec_of(
        SSF | {"drift": {"rule": "paper"}},
        rounds=8,
        clients_per_round=7,
        participation=participation,
    )
    faults = {2: lambda *_: None, 10: lambda found, message: spoilt(found, message)}
    grid = Lossy(spec, tmp_path / "states", faults)

    class Forgetful(Callback):
        def on_round_end(self, run: Loop) -> None:
            if run.t == 4:
                for path in (tmp_path / "states").rglob("client-3.*"):
                    path.unlink()

    result = serve(
        dataclasses.replace(spec, callbacks=(Forgetful(),)),
        grid,
        tmp_path / "run",
        bind_clients=True,
    )
    assert result.status == "finished"
    (trail,), _, wrong = read_record(tmp_path / "run")
    assert not wrong
    assert trail.happened() == {
        "no reply": 1, "refused": 1, "state lost": 1, "restored": 1,
    }  # fmt: skip
    assert sum(map(len, trail.of_kind(COUNTED).values())) == 8 * 7 - 2
    assert trail.clients()[3]["restored"] == 1
    assert audit.command(tmp_path / "run") == 0
    told = capsys.readouterr().out
    assert "no reply 1, refused 1, restored 1, state lost 1" in told
    assert "node" in told
    assert " 103" in told


def test_a_client_says_why_it_refuses(tmp_path: Path) -> None:
    """Its own words reach the server's history: here the message is of a protocol it does not know."""
    spec = spec_of(rounds=3)

    class Newer(FakeGrid):
        def answer(self, message: Message) -> Message | None:
            if (
                message.metadata.message_type == "train"
                and self.clients[message.metadata.dst_node_id] == 2
            ):
                header = dict(message.content["header"]) | {"protocol": 9}
                message.content["header"] = ConfigRecord(header)
            return super().answer(message)

    result = serve(spec, Newer(spec, tmp_path / "states"), tmp_path / "out")
    events = events_of(result)
    sampled = sum(2 in one["sampled"] for one in rounds_in(tmp_path / "out"))
    assert len(events) == sampled > 0
    assert all("client 2: refused: the other end speaks protocol 9" in event for event in events)


def test_a_client_with_another_spec_or_a_bad_config_says_so(tmp_path: Path) -> None:
    spec = spec_of(rounds=3)
    grid = FakeGrid(spec, tmp_path / "states")
    grid.app = flower.client_app(dataclasses.replace(spec, seed=9))
    result = serve(spec, grid, tmp_path / "out")
    events = events_of(result)
    assert all(
        "refused: seed is 9 on the client and 0 on the server" in event for event in events[:3]
    )
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    assert "partition-id" in identify(context)[IDENTITY]["reason"]
    answer = reply_to(Message(RecordDict(), 1, "train"), context, spec)
    assert "partition-id" in records.read_message(answer, 100).reason


def test_a_client_under_a_new_node_and_one_that_leaves(tmp_path: Path) -> None:
    """Client 0 comes back as another node; client 6 is never there: rounds go on, and say so."""
    spec = spec_of(rounds=10)

    class Moving(FakeGrid):
        def get_node_ids(self) -> list[int]:
            if self.count > 12 and 100 in self.clients:
                self.clients[200] = self.clients.pop(100)
            return [node for node in super().get_node_ids() if node != 106]

    result = serve(spec, Moving(spec, tmp_path / "states"), tmp_path / "out")
    events = events_of(result)
    assert events
    assert all("client 6: not connected" in event for event in events)
    with (tmp_path / "out" / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert (rows[6]["up_bytes"], rows[6]["down_bytes"], rows[6]["last_round"]) == ("0", "0", "-1")
    assert (tmp_path / "states" / "run" / "client-0.safetensors").exists()


def test_of_two_nodes_for_one_client_the_newest_is_used(tmp_path: Path) -> None:
    spec = spec_of()
    grid = FakeGrid(spec, tmp_path / "states")
    channel = server.GridChannel(grid, 7, 1.0)  # type: ignore[arg-type]
    channel.find_nodes()
    assert channel.nodes == {i: 100 + i for i in range(7)}
    grid.clients[300] = 2
    channel.find_nodes()
    count = grid.count
    channel.find_nodes()
    assert (channel.nodes[2], grid.count) == (300, count)  # and no node gets a second request
    del grid.clients[300]
    channel.find_nodes()
    assert channel.nodes[2] == 102
    grid.clients[301] = 9
    channel.find_nodes()
    channel.find_nodes()
    assert 9 not in channel.nodes
    assert grid.count == count + 1


def test_a_server_is_resumed_to_the_same_result(tmp_path: Path) -> None:
    spec = spec_of(rounds=8)
    straight = serve(spec, FakeGrid(spec, tmp_path / "a"), tmp_path / "straight").history[-1]

    class Stops(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            if self.count > 25:
                raise KeyboardInterrupt
            return super().push_messages(messages)

    with pytest.raises(KeyboardInterrupt):
        serve(spec, Stops(spec, tmp_path / "b"), tmp_path / "parts", checkpoint_every=2)
    assert [one["round"] for one in rounds_in(tmp_path / "parts")] == list(range(6))
    end = serve(spec, FakeGrid(spec, tmp_path / "b"), tmp_path / "parts", resume=True).history[-1]
    assert [one["round"] for one in rounds_in(tmp_path / "parts")] == list(range(8))
    assert end["rel_err"] == pytest.approx(straight["rel_err"], rel=1e-6)
