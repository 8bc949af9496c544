"""Secure sums on Flower: the same four questions as Flower messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Message

from fedspan.api.run import run
from fedspan.core.errors import SpecError
from support.flower import SSF, FakeGrid, events_of, inside_a_task, serve, spec_of  # noqa: F401
from support.remote import no_sync  # noqa: F401
from support.rounds import rounds_in

SECURE: dict[str, Any] = {"privacy": {"secure": True, "secure_bits": 64}, "clients_per_round": 4}


class Watched(FakeGrid):
    """Keeps what the server receives; some nodes are silent at some questions, given as (message, question)."""

    def __init__(
        self, spec: Any, states_dir: Path, silent: set[tuple[int, str]] | None = None
    ) -> None:
        super().__init__(spec, states_dir)
        self.silent, self.trained = silent or set(), 0
        self.received: list[tuple[str, ArrayRecord]] = []

    def answer(self, message: Message) -> Message | None:
        found = super().answer(message)
        if message.metadata.message_type != "train" or found is None:
            return found
        header, arrays = message.content["header"], found.content["arrays"]
        assert isinstance(header, ConfigRecord)
        assert isinstance(arrays, ArrayRecord)
        self.trained += 1
        if (self.trained, str(header["status"])) in self.silent:
            return None
        self.received.append((str(header["status"]), arrays))
        return found


@pytest.mark.parametrize("name", ["ssf", "fedavg", "scaffold"])
def test_a_secure_run_gives_the_simulators_result_and_bytes(name: str, tmp_path: Path) -> None:
    method = SSF if name == "ssf" else {"name": name, "lr": 0.02, "local_steps": 3}
    spec = spec_of(method, rounds=4, **SECURE)
    here = run(spec, tmp_path / "here", progress=False).history[-1]
    grid = Watched(spec, tmp_path / "states")
    result = serve(spec, grid, tmp_path / "there", backup=False)
    there = result.history[-1]
    assert there["rel_err"] == pytest.approx(here["rel_err"], rel=1e-5)
    assert (there["up_bytes"], there["down_bytes"]) == (here["up_bytes"], here["down_bytes"])
    assert not events_of(result)
    assert [len(one["accepted"]) for one in rounds_in(tmp_path / "there")] == [4] * 4
    assert {(status, tuple(name.partition("#")[0] for name in arrays)) for status, arrays in grid.received} == {
        ("keys", ("keys",)), ("shares", ("shares",)), ("train", ("masked",)), ("unmask", ("shares",))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "phase", "counted"), [(2, "keys", 3), (10, "train", 3), (14, "unmask", 4)]
)
def test_silence_at_a_question_is_an_event(
    number: int, phase: str, counted: int, tmp_path: Path
) -> None:
    """One client of the second round; the round goes on with the others."""
    spec = spec_of(rounds=3, **SECURE)
    grid = Watched(spec, tmp_path / "states", {(4 * 4 + number, phase)})
    result = serve(spec, grid, tmp_path / "out", backup=False, timeout=0.05)
    assert [f"no answer to {phase!r} in time" in event for event in events_of(result)] == [True]
    accepted = [len(one["accepted"]) for one in rounds_in(tmp_path / "out")]
    assert accepted == [4, counted, 4]


@pytest.mark.parametrize(
    ("method", "config", "words"),
    [
        (SSF, {}, "'backup' is true.* set it to false"),
        (SSF | {"server": "fedexp"}, {"backup": False}, "leave out .* server = 'fedexp'"),
        (
            {"name": "ef", "lr": 0.02, "local_steps": 3},
            {"backup": False},
            "ef with these settings needs each reply",
        ),
    ],
)
def test_what_needs_single_replies_is_refused(
    method: Any, config: Any, words: str, tmp_path: Path
) -> None:
    spec = spec_of(method, rounds=3, **SECURE)
    with pytest.raises(SpecError, match=words):
        serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "out", **config)


def test_a_client_without_secure_settings_is_told_apart(tmp_path: Path) -> None:
    """Both ends must agree: the fingerprint covers the table [privacy]."""
    spec = spec_of(rounds=3, **SECURE)
    grid = FakeGrid(spec_of(rounds=3, clients_per_round=4), tmp_path / "states")
    result = serve(spec, grid, tmp_path / "out", backup=False)
    assert (
        "privacy.secure is the default on the client and True on the server" in events_of(result)[0]
    )
