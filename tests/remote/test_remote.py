"""Server and clients apart, each client with its own files: the same result, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import Scripted, advance, build, close, every_method, model, small, start
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.method import Round
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.remote.client import Client, Store
from fedspan.remote.messages import RoundMessage
from fedspan.remote.server import Server

SSF = {"projector": {"name": "coordinate", "rank": 4}}
Change = Callable[[RoundMessage], Any]


class Wire:
    """A link in this process; `faults[(round, client)]` is what becomes of a letter."""

    def __init__(self, method: Any, problem: Any, folder: Path) -> None:
        self.method, self.problem, self.folder = method, problem, folder
        self.faults: dict[tuple[int, int], Change] = {}
        self.messages: list[tuple[RoundMessage, RoundMessage | None]] = []

    def client_problem(self, client: int) -> Client:
        """A new process each time, as on Flower: only the files remain."""
        return Client(
            self.method, self.problem, Store.of(self.folder, "run", f"c{client}"), client, self.problem.seeds[0]
        )

    def deliver(self, messages: list[RoundMessage]) -> Iterator[tuple[int, RoundMessage | str]]:
        for number, message in enumerate(messages):
            again = RoundMessage.read(message.header(), {k: v.clone() for k, v in message.arrays.items()})
            fault = self.faults.pop((message.t, message.client), None)
            if fault is None:
                reply = self.client_problem(message.client).answer(again)
                self.messages.append((message, reply))
                yield number, reply
            else:
                for one in fault(again):
                    yield number, one


def remote(method: Any, problem: Any, sites: Path, **settings: Any) -> tuple[Loop, Wire, Server]:
    link = Wire(method, problem, sites)
    end = Server(method, problem.layout, problem.x0, problem.clients, link, problem.seeds[0], **settings)
    return start(method, problem, transport=end), link, end


def simulated(method: Any, problem: Any, rounds: int, missing: set[tuple[int, int]] = frozenset()) -> Loop:  # type: ignore[assignment]
    clients = Simulator(method, problem)
    return advance(start(method, problem, transport=Scripted(clients, set(missing))), rounds)


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_apart_is_the_same_as_in_one_process(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    method, problem = build(name, **settings), small()
    here = simulated(method, problem, 12)
    there, link, end = remote(method, problem, tmp_path)
    advance(there, 12)
    close(model(here), model(there))
    assert (here.ledger.up == there.ledger.up).all()
    assert (here.ledger.down == there.ledger.down).all()
    assert there.events == ()
    sent = sum(message.bytes for message, _ in link.messages)
    assert sent == there.ledger.down.sum()
    assert end.acked.sum() == 12 * 3


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_the_servers_copy_of_a_state_is_the_clients(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    method, problem = build(name, **settings), small()
    loop, link, end = remote(method, problem, tmp_path)
    advance(loop, 9)
    mark = end.mark
    for client in range(problem.clients):
        if end.acked[client]:
            own = link.client_problem(client).store.load(int(end.acked[client]), method.types()[1], mark).state
            for field, states in (end._copies or {}).items():
                close(states.take(np.array([client])), getattr(own, field)[0])


def controls(link: Wire, end: Server) -> torch.Tensor:
    """c_i of every client from its own file."""
    found = []
    for client in range(link.problem.clients):
        seq = int(end.acked[client])
        client_problem = link.client_problem(client)
        state = client_problem.store.load(seq, link.method.types()[1], end.mark).state if seq else None
        found.append(torch.zeros_like(link.problem.x0[0]) if state is None else state.c[0])
    return torch.cat(found)


def ids_of(loop: Loop, t: int) -> list[int]:
    """Who takes part in round t."""
    return replace_t(loop, t).ids[0].tolist()


def replace_t(loop: Loop, t: int) -> Round:
    kept, loop.t = loop.t, t
    try:
        return loop._round()
    finally:
        loop.t = kept


@pytest.mark.parametrize("cast", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["ssf", "scaffold", "fedavg", "fedsub", "ef21", "scallion"])
def test_shorter_numbers_up(name: str, cast: str, tmp_path: Path) -> None:
    """Half the uplink; both ends go by the rounded numbers, so that c = mean c_i still holds."""
    settings = SSF if name in ("ssf", "fedsub") else {}
    settings = {"compressor": {"name": "randk", "k": 0.9}} if name in ("ef21", "scallion") else settings
    method, problem = build(name, **settings), small(torch.float32)
    exact = simulated(method, problem, 10)
    loop, link, end = remote(method, problem, tmp_path, cast=cast)
    advance(loop, 10)
    assert loop.events == ()
    assert loop.ledger.up.sum() * 2 == exact.ledger.up.sum()
    assert loop.ledger.down.sum() == exact.ledger.down.sum()
    close(model(loop), model(exact), 3e-2)
    if name in ("ssf", "scaffold", "scallion"):
        close(controls(link, end).mean(0), loop.server.c[0, 0], 1e-5)


def test_who_does_not_compute_the_same_is_refused(tmp_path: Path) -> None:
    problem = small()
    loop, link, _ = remote(build("ssf", **SSF), problem, tmp_path)
    link.method = build("ssf", **SSF, refresh=2)
    advance(loop, 1)
    assert len(loop.events) == 4
    assert "same spec" in loop.events[0]
    assert "nothing counted" in loop.events[-1]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 2}, "protocol 2"),
        ({"t": "3"}, "'t' must be int"),
        ({"status": "hello"}, "status"),
        ({"client": None}, "'client'"),
        ({"seq": 1.5}, "'seq'"),
    ],
)
def test_a_header_is_checked(change: dict[str, Any], words: str) -> None:
    good = RoundMessage("train", 0, 0, 0, "0" * 12).header()
    RoundMessage.read(good, {})
    with pytest.raises((ProtocolError, SpecError), match=words):
        RoundMessage.read(good | change, {})


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65, "a\x00b", "a b"])
def test_a_client_id_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="client id"):
        Store.of(tmp_path / "states", "run", name)
    with pytest.raises(SpecError, match="run"):
        Store.of(tmp_path / "states", name, "client")
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, link, end = remote(method, problem, tmp_path)
    advance(loop, 5)
    kept = {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    advance(loop, 1)
    monkeypatch.undo()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.safetensors")} == kept
    assert sum("No space left" in event for event in loop.events) == 3
    advance(loop, 4)
    close(model(loop), model(simulated(method, problem, 10, {(5, c) for c in ids_of(loop, 5)})))
    close(controls(link, end).mean(0), loop.server.c[0, 0])


def test_states_of_another_run_are_not_taken(tmp_path: Path) -> None:
    """The same folder, another seed: seq 0 starts afresh, and a wrong fingerprint later counts as lost."""
    problem = small()
    loop, _, _ = remote(build("ssf", **SSF), problem, tmp_path)
    advance(loop, 5)
    other, _, _ = remote(build("ssf", **SSF), small(seeds=(6,)), tmp_path)
    advance(other, 3)
    assert other.events == ()
    advance(loop, 5)
    close(model(loop), model(simulated(build("ssf", **SSF), problem, 10)))
    assert any("another method, model or seed" in event for event in loop.events)
    shutil.rmtree(tmp_path)
