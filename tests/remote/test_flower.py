"""fedspan on Flower: messages as Flower's records, and a grid in this process for every method."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from conftest import METHODS, SMALL, settings
from fedspan.api.run import run
from fedspan.callbacks.diagnostics import Diagnostics
from fedspan.cli import audit
from fedspan.core import registry
from fedspan.core.callback import Callback
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.spec import Spec
from fedspan.engine.audit_report import trails
from fedspan.engine.history import Rounds
from fedspan.engine.loop import Loop
from fedspan.engine.result import Result
from fedspan.remote import flower
from fedspan.remote.flower import records, server
from fedspan.remote.flower.client import IDENTITY, identify, load_spec, preparing, reply_to
from fedspan.remote.flower.records import RunConfig
from fedspan.remote.messages import RoundMessage

FLOAT32 = settings(5, torch.float32)
SSF = {"name": "ssf", "projector": {"name": "gaussian", "rank": 3}, "lr": 0.02, "local_steps": 3}


def spec_of(method: dict[str, Any] = SSF, rounds: int = 6, **others: Any) -> Spec:
    table = {
        "rounds": rounds,
        "eval_every": 2,
        "clients_per_round": 3,
        "batch_size": 4,
        "method": method,
        "task": SMALL,
    }
    return Spec.from_table(table | others)


@pytest.fixture(autouse=True)
def inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can only be made inside one of Flower's own tasks."""
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    monkeypatch.setattr(server, "REPLY_POLL", 0.001)


class FakeGrid:
    """Flower's grid with the client apps in this process; node 100 + i stands for client i."""

    def __init__(self, spec: Spec, states_dir: Path) -> None:
        self.app, self.states_dir = flower.client_app(spec), states_dir
        self.clients = {100 + i: i for i in range(SMALL["clients"])}  # type: ignore[call-overload]
        self.waiting: dict[str, Message] = {}
        self.count = 0

    def get_node_ids(self) -> list[int]:
        return list(self.clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        idents = []
        for message in messages:
            self.count += 1
            ident = f"m{self.count}"
            message.metadata.__dict__["_message_id"] = ident
            idents.append(ident)
            reply = self.answer(message)
            if reply is not None:
                reply.metadata.__dict__["_reply_to_message_id"] = ident
                self.waiting[ident] = reply
        return idents

    def answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        config = {"partition-id": self.clients[node], "states-dir": str(self.states_dir)}
        context = Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
        found = self.app(message, context)
        assert isinstance(found, Message)
        return found

    def pull_messages(self, idents: Iterable[str]) -> list[Message]:
        return [self.waiting.pop(i) for i in list(idents) if i in self.waiting]


def serve(spec: Spec, grid: Any, run_dir: Path, **config: Any) -> Result:
    config = {"run_dir": str(run_dir), "timeout": 0.5, "wait": 0.0, "pause": 0.0} | config
    return server.serve(spec, grid, RunConfig(**config))


def events_of(result: Result) -> list[str]:
    return [event for row in result.history for event in row.get("events", [])]


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_gives_the_simulators_result_and_bytes(name: str, tmp_path: Path) -> None:
    spec = spec_of({"name": name, "lr": 0.02, "local_steps": 3} | METHODS[name][0])
    here = run(spec, tmp_path / "here").history[-1]
    there = serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "there").history[-1]
    assert there["rel_err"] == pytest.approx(here["rel_err"], rel=1e-6)
    assert (there["up_bytes"], there["down_bytes"]) == (here["up_bytes"], here["down_bytes"])
    rounds = Rounds(tmp_path / "there" / "rounds.jsonl").read()
    assert [len(one["accepted"]) for one in rounds] == [3] * 6
    assert sum(one["payload_up"] for one in rounds) == there["up_bytes"] < sum(one["records_up"] for one in rounds)
    assert sum(one["payload_down"] for one in rounds) == there["down_bytes"]


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
    content = RecordDict({"header": found.content["header"], "arrays": ArrayRecord(arrays)})
    return Message(content, reply_to=message)


def lying(found: Message, message: Message) -> Message:
    """A few bytes that say they are an array of 4 TB."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (1, 1, 10**12)})
    return spoilt(found, message, a=Array("float32", (1, 1, 6), "numpy.ndarray", stream.getvalue() + b"0" * 24))


def of_another_version(found: Message, message: Message) -> Message:
    header = dict(found.content["header"]) | {"protocol": 7, "version": "9.9"}
    return Message(RecordDict(dict(found.content) | {"header": ConfigRecord(header)}), reply_to=message)


FAULTS: dict[str, tuple[Any, str]] = {
    "error": (lambda _, m: Message(Error(code=8, reason="gone"), reply_to=m), "Flower error 8: gone"),
    "silence": (lambda _, __: None, "no reply in time"),
    "nan": (lambda f, m: spoilt(f, m, a=Array(np.full((1, 1, 6), np.nan, np.float32))), "not finite"),
    "huge": (lambda f, m: spoilt(f, m, a=Array(np.zeros((1, 1, 90000), np.float32))), "bytes of arrays"),
    "lying": (lying, "but holds"),
    "text": (lambda f, m: spoilt(f, m, a=Array("float32", (6,), "numpy.ndarray", b"six")), "not in NumPy's format"),
    "version": (of_another_version, "speaks protocol 7 (fedspan 9.9)"),
    "type": (lambda f, m: spoilt(f, m, a=Array(np.zeros((1, 1, 6), np.complex64))), "<c8"),
    "foreign": (lambda _, m: Message(RecordDict({"x": ConfigRecord({"a": 1})}), reply_to=m), "not one of fedspan's"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_on_the_grid_are_events(kind: str, tmp_path: Path) -> None:
    fault, words = FAULTS[kind]
    spec = spec_of()
    result = serve(spec, Lossy(spec, tmp_path / "states", {2: fault, 7: fault}), tmp_path / "out")
    events = events_of(result)
    assert len(events) == 2
    assert all(words in event for event in events)
    assert result.finished


def test_the_audit_of_a_deployment_tells_what_happened_to_whom(tmp_path: Path, capsys: Any) -> None:
    """A silent client, nonsense and a lost state, with a robust aggregator and bound nodes; read by `fedspan audit`."""
    participation = {"aggregator": {"name": "trimmed_mean", "share": 0.4}}
    spec = spec_of(rounds=8, clients_per_round=7, participation=participation)
    faults = {2: lambda *_: None, 10: lambda found, message: spoilt(found, message)}
    grid = Lossy(spec, tmp_path / "states", faults)

    class Forgetful(Callback):
        def on_round_end(self, run: Loop) -> None:
            if run.t == 4:
                for path in (tmp_path / "states").rglob("client-3.*"):
                    path.unlink()

    result = serve(dataclasses.replace(spec, callbacks=(Forgetful(),)), grid, tmp_path / "run", bind_clients=True)
    assert result.status == "finished"
    (trail,) = trails(tmp_path / "run")
    assert not trail.wrong
    assert trail.happened() == {
        "no reply": 1, "refused": 1, "state lost": 1, "restored": 1,
    }  # fmt: skip
    assert sum(map(len, trail.rounds.values())) == 8 * 7 - 2
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
            if message.metadata.message_type == "train" and self.clients[message.metadata.dst_node_id] == 2:
                header = dict(message.content["header"]) | {"protocol": 3}
                message.content["header"] = ConfigRecord(header)
            return super().answer(message)

    result = serve(spec, Newer(spec, tmp_path / "states"), tmp_path / "out")
    events = events_of(result)
    sampled = sum(2 in one["sampled"] for one in Rounds(tmp_path / "out" / "rounds.jsonl").read())
    assert len(events) == sampled > 0
    assert all("client 2: refused: the other end speaks protocol 3" in event for event in events)


def test_a_client_with_another_spec_or_a_bad_config_says_so(tmp_path: Path) -> None:
    spec = spec_of(rounds=3)
    grid = FakeGrid(spec, tmp_path / "states")
    grid.app = flower.client_app(dataclasses.replace(spec, seed=9))
    result = serve(spec, grid, tmp_path / "out")
    events = events_of(result)
    assert all("refused: seed is 9 on the client and 0 on the server" in event for event in events[:3])
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    assert "partition-id" in identify(context)[IDENTITY]["reason"]
    answer = reply_to(Message(RecordDict(), 1, "train"), context, preparing(spec))
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
    assert [one["round"] for one in Rounds(tmp_path / "parts" / "rounds.jsonl").read()] == list(range(7))
    end = serve(spec, FakeGrid(spec, tmp_path / "b"), tmp_path / "parts", resume=True).history[-1]
    assert [one["round"] for one in Rounds(tmp_path / "parts" / "rounds.jsonl").read()] == list(range(8))
    assert end["rel_err"] == pytest.approx(straight["rel_err"], rel=1e-6)


def test_what_travels_for_ssf_is_its_numbers(tmp_path: Path) -> None:
    """4·r up and 4·(G·r + r) down, the whole model to newcomers; one probe of 8 bytes is all there is besides."""
    spec = spec_of(rounds=12)
    serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "out")
    r, d, last = 3 * 2, 12 * 2, dict[int, int]()
    for one in Rounds(tmp_path / "out" / "rounds.jsonl").read():
        t = one["round"]
        missed = [min(d, (t - last[c]) * r) if c in last else d for c in one["sampled"]]
        last |= dict.fromkeys(one["accepted"], t)
        assert one["payload_up"] == 4 * r * 3
        assert 0 <= one["payload_down"] - sum(4 * (m + r) for m in missed) <= 64 * 3
        assert one["records_up"] - one["payload_up"] < 400 * 3


def test_half_the_bytes_up(tmp_path: Path) -> None:
    spec = spec_of()
    for dtype in ("bfloat16", "float16"):
        end = serve(spec, FakeGrid(spec, tmp_path / dtype), tmp_path / f"{dtype}-out", reply_dtype=dtype).history[-1]
        assert end["up_bytes"] == 6 * 3 * 6 * 2
        assert "events" not in end


def test_settings_are_checked() -> None:
    assert RunConfig.read({"timeout": 5, "min-replies": 2, "mine": "x"}) == RunConfig(timeout=5.0, min_replies=2)
    with pytest.raises(SpecError, match="'resume' must be bool"):
        RunConfig.read({"resume": "yes"})
    with pytest.raises(SpecError, match="'run-dir' is missing"):
        server.serve(spec_of(), None, RunConfig())  # type: ignore[arg-type]
    for change, words in (({"callbacks": (Diagnostics(),)}, "Diagnostics needs"), ({"epochs": 1.0}, "`epochs` needs")):
        with pytest.raises(SpecError, match=words):
            server.serve(dataclasses.replace(spec_of(), **change), None, RunConfig(run_dir="x"))  # type: ignore[arg-type]
    changed = load_spec(spec_of(), RunConfig(set="rounds=3; method.lr=0.5").changes)
    assert (changed.rounds, changed.method.lr) == (3, 0.5)
    with pytest.raises(SpecError, match="set it to a number"):
        load_spec(changed, ("method.lr=search",))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"batch_size": 3}, "batch_size is 3 on the client and 4 on the server"),
        (
            {"dtype": "float64"},
            "dtype is float64 on the client and the default on the",
        ),
        ({"task": SMALL | {"het": 2.0}}, "task.het is 2.0 on the client and 1.0 on the server"),
        ({"method": SSF | {"schedule": "cosine"}}, "method.schedule is cosine on the client and the default on the"),
        ({"device": "cpu", "eval_every": 3, "clients_per_round": 2, "rounds": 9}, ""),
    ],
)
def test_clients_must_share_the_settings_that_decide_their_numbers(
    others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A client with another spec is refused by the setting that differs; settings of the server or of a machine may."""
    spec = spec_of(rounds=2)
    events = events_of(serve(spec, FakeGrid(spec_of(**others), tmp_path / "states"), tmp_path / "out"))
    assert all(f"refused: {words}" in event for event in events if "nothing counted" not in event)
    assert bool(events) == bool(words)


def test_clients_agree_on_the_length_that_a_schedule_spans(tmp_path: Path) -> None:
    spec = spec_of(SSF | {"schedule": "linear", "warmup": 1})
    here = run(spec, tmp_path / "here").history[-1]
    there = serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "there").history[-1]
    assert there["rel_err"] == pytest.approx(here["rel_err"], rel=1e-6)
    other = FakeGrid(spec_of(SSF | {"schedule": "linear", "warmup": 1}, rounds=9), tmp_path / "other")
    assert "rounds is 9 on the client and 6 on the server" in events_of(serve(spec, other, tmp_path / "refused"))[0]


def test_messages_survive_flowers_records() -> None:
    arrays = {"a": torch.randn(1, 1, 5), "p": torch.randn(1, 1, 1, dtype=torch.float64), "b": torch.randn(3).bfloat16()}
    round_message = RoundMessage("ok", 3, 1, 2, "f" * 12, arrays, reply_dtype="bfloat16")
    again = records.read_message(records.write_message(round_message), 1 << 20)
    assert again.header() == round_message.header()
    assert all(torch.equal(arrays[name], again.arrays[name]) for name in arrays)
    with pytest.raises(ProtocolError, match="at most 10"):
        records.read_message(records.write_message(round_message), 10)


def test_own_model_and_data(tmp_path: Path) -> None:
    """A two-function module on each machine; the server has no client's data."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def model(): return torch.nn.Linear(6, 2)\n"
        "def data(client):\n"
        "    g = torch.Generator().manual_seed(client)\n"
        "    return torch.randn(20, 6, generator=g), torch.randint(0, 2, (20,), generator=g)\n"
        "def test(): return data(99)\n"
    )
    task = registry.build("task", {"name": "custom", "module": str(path), "clients": 4})
    whole, client_problem, server_problem = (
        task.build((0,), FLOAT32),
        task.client_problem(2, (0,), FLOAT32),
        task.server_problem((0,), FLOAT32),
    )
    assert whole.layout.fingerprint == client_problem.layout.fingerprint == server_problem.layout.fingerprint
    assert len(client_problem.client_data[2]) == 20
    for empty in (client_problem.client_data, server_problem.client_data):
        with pytest.raises(Exception, match="not on this machine"):
            empty[0]
    table = {
        "rounds": 3,
        "method": SSF | {"projector": {"name": "identity"}},
        "task": registry.describe(task),
        "batch_size": 5,
    }
    with pytest.raises(SpecError, match=r"`participation.weights` 'examples' needs all clients' data.*set it to 'uni"):
        serve(Spec.from_table(table), FakeGrid(Spec.from_table(table), tmp_path / "none"), tmp_path / "none")
    spec = Spec.from_table(table | {"participation": {"weights": "uniform"}})
    here = run(spec, tmp_path / "here").history[-1]
    grid = FakeGrid(spec, tmp_path / "states")
    grid.clients = {100 + i: i for i in range(4)}
    there = serve(spec, grid, tmp_path / "there").history[-1]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
    (tmp_path / "bad.py").write_text("x = 1\n")
    bad = registry.build("task", {"name": "custom", "module": str(tmp_path / "bad.py"), "clients": 1})
    with pytest.raises(SpecError, match="no function model"):
        bad.server_problem((0,), FLOAT32)
    with pytest.raises(SpecError, match="does not exist"):
        registry.build("task", {"name": "custom", "module": "no.py", "clients": 1}).build((0,), FLOAT32)
