"""A server and clients that exchange messages, each client with its own files: the same result as in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.errors import ProtocolError, SpecError
from fedspan.engine.states import InMemory
from fedspan.remote.client import StateFile
from fedspan.remote.messages import Agreement, RoundMessage
from support.channel import ids_of, remote
from support.loops import advance, close, model, simulated, small
from support.methods import build, every_method
from support.remote import SSF, controls, state_of


@pytest.mark.parametrize(("name", "settings"), every_method())
def test_the_servers_copy_of_a_state_is_the_clients(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    method, problem = build(name, **settings), small()
    loop, channel, end = remote(method, problem, tmp_path)
    advance(loop, 9)
    for client in range(problem.clients):
        if end.accepted[client]:
            own = state_of(channel, end, client)
            for field, states in end.copies.tables.items():
                close(states.take(np.array([client])), getattr(own, field)[0])


@pytest.mark.parametrize(
    ("client", "words"),
    [
        ({"refresh": 2}, "method.space.refresh is 2 on the client and 1 on the server"),
        (
            {"training": {"weight_decay": 0.1}},
            "training.weight_decay is 0.1 on the client and the default on the",
        ),
        ({"batch_size": 64}, "batch_size is 64 on the client and the default on the server"),
        (
            {"batch_size": "x" * 9000},
            "another method, model, seed or other settings",
        ),  # too long to be sent
    ],
)
def test_a_client_that_computes_something_else_is_refused(
    client: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The event names the setting that differs, and the client writes nothing."""
    loop, channel, _ = remote(build("ssf", **SSF), small(), tmp_path)
    if "refresh" in client:
        channel.method = build("ssf", **SSF, **client)
    else:
        channel.settings = client
    advance(loop, 1)
    assert len(loop.events) == 4
    assert all(
        "refused: " in event and words in event and "same spec" in event
        for event in loop.events[:3]
    )
    assert "nothing counted" in loop.events[-1]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_another_model_is_named_and_the_order_of_patterns_counts(tmp_path: Path) -> None:
    """Of several patterns for a rank the first that matches counts, so their order decides the subspace."""
    one, other = ({"rank": dict(pairs)} for pairs in ([("a*", 1), ("*", 2)], [("*", 2), ("a*", 1)]))
    layout = small().layout
    assert (
        Agreement.of({"method": one}, layout, 0).fingerprint
        != Agreement.of({"method": other}, layout, 0).fingerprint
    )
    assert Agreement.of({"b": 1, "a": 2}, layout, 0) == Agreement.of({"a": 2, "b": 1}, layout, 0)
    loop, channel, _ = remote(build("scaffold"), small(), tmp_path)
    channel.problem = small(dim=13)
    advance(loop, 1)
    assert "refused: the model differs" in loop.events[0]


@pytest.mark.parametrize("settings", ["", "{", "3", '[["a"]]', "null"])
def test_settings_that_cannot_be_read_leave_the_clients_reason(settings: str) -> None:
    refusal = RoundMessage("refused", 0, 0, 0, "", reason="no", settings=settings)
    assert Agreement.of({}, small().layout, 0).explain(refusal) == "no"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 9}, "protocol 9"),
        ({"t": "3"}, "'t' must be int"),
        ({"status": "hello"}, "status"),
        ({"client": None}, "'client'"),
        ({"accepted": 1.5}, "'accepted'"),
    ],
)
def test_a_header_is_checked(change: dict[str, Any], words: str) -> None:
    good = RoundMessage("train", 0, 0, 0, "0" * 12).header()
    RoundMessage.read(good, {})
    with pytest.raises((ProtocolError, SpecError), match=words):
        RoundMessage.read(good | change, {})


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "x" * 65, "a\x00b", "a b"])
def test_names_cannot_leave_the_states_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="client id"):
        StateFile.of(tmp_path / "states", "run", name)
    with pytest.raises(SpecError, match="run name"):
        StateFile.of(tmp_path / "states", name, "client")
    assert not list(tmp_path.iterdir())


def test_a_crash_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, channel, end = remote(method, problem, tmp_path)
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
    close(controls(channel, end).mean(0), loop.server.c[0, 0])


def test_states_of_another_run_are_not_taken(tmp_path: Path) -> None:
    """The same directory, another seed: a new run starts fresh, and a wrong fingerprint later counts as lost."""
    problem = small()
    loop, _, _ = remote(build("ssf", **SSF), problem, tmp_path)
    advance(loop, 5)
    other, _, _ = remote(build("ssf", **SSF), small(seeds=(6,)), tmp_path)
    advance(other, 3)
    assert not other.events
    advance(loop, 5)
    close(model(loop), model(simulated(build("ssf", **SSF), problem, 10)))
    assert any("another method, model, seed" in event for event in loop.events)
    shutil.rmtree(tmp_path)


def test_copies_are_renewed_one_client_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a round of many clients never has all their states in memory."""
    together = advance(remote(build("ssf"), small(), tmp_path / "a")[0], 6).transport.save()
    most = 0

    def watched(self: InMemory, rows: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, len(rows))
        return take(self, rows)

    take = InMemory.take
    monkeypatch.setattr(InMemory, "take", watched)
    apart = advance(remote(build("ssf"), small(), tmp_path / "b")[0], 6).transport.save()
    assert most == 1
    assert all(torch.equal(apart[name], array) for name, array in together.items())
