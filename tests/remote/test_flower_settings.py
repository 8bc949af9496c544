"""Settings of a deployment on Flower, what its messages hold, and a model of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed; pip install 'fedspan[flower]'")


from fedspan.api.run import run
from fedspan.callbacks.diagnostics import Diagnostics
from fedspan.core import tables
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.spec import Spec
from fedspan.remote.flower import records, server
from fedspan.remote.flower.client import load_spec
from fedspan.remote.flower.records import RunConfig
from fedspan.remote.messages import RoundMessage
from support.flower import FLOAT32, SSF, FakeGrid, events_of, inside_a_task, serve, spec_of  # noqa: F401 - a fixture
from support.loops import SMALL
from support.methods import build
from support.rounds import rounds_in


def test_what_travels_for_ssf_is_its_numbers(tmp_path: Path) -> None:
    """4·(r + 2) up, with two numbers of the test, and 4·(G·r + r) down or the whole model to newcomers, and a probe."""
    spec = spec_of(rounds=12)
    serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "out")
    r, d, last = 3 * 2, 12 * 2, dict[int, int]()
    for one in rounds_in(tmp_path / "out"):
        t = one["round"]
        missed = [min(d, (t - last[c]) * r) if c in last else d for c in one["sampled"]]
        last |= dict.fromkeys(one["accepted"], t)
        assert one["payload_up"] == 4 * (r + 2) * 3
        assert 0 <= one["payload_down"] - sum(4 * (m + r) for m in missed) <= 64 * 3


def test_settings_are_checked() -> None:
    assert RunConfig.read({"timeout": 5, "min-replies": 2, "mine": "x"}) == RunConfig(
        timeout=5.0, min_replies=2
    )
    with pytest.raises(SpecError, match="'resume' must be bool"):
        RunConfig.read({"resume": "yes"})
    with pytest.raises(SpecError, match="'run-dir' is missing"):
        server.serve(spec_of(), None, RunConfig())  # type: ignore[arg-type]
    for change, words in (
        ({"callbacks": (Diagnostics(),)}, "Diagnostics needs"),
        ({"epochs": 1.0}, "`epochs` needs"),
        ({"method": build("fedavg", lr="search")}, "'search', which needs all clients' data"),
    ):
        with pytest.raises(SpecError, match=words):
            server.serve(dataclasses.replace(spec_of(), **change), None, RunConfig(run_dir="x"))  # type: ignore[arg-type]
    changed = load_spec(spec_of(), RunConfig(set="rounds=3; method.lr=0.5").changes)
    assert (changed.rounds, changed.method.lr) == (3, 0.5)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"batch_size": 3}, "batch_size is 3 on the client and 4 on the server"),
        (
            {"dtype": "float64"},
            "dtype is float64 on the client and the default on the",
        ),
        ({"task": SMALL | {"het": 2.0}}, "task.het is 2.0 on the client and 1.0 on the server"),
        (
            {"method": SSF | {"schedule": "cosine"}},
            "method.schedule is cosine on the client and the default on the",
        ),
        ({"device": "cpu", "eval_every": 3, "clients_per_round": 2, "rounds": 9}, ""),
    ],
)
def test_clients_must_share_the_settings_that_decide_their_numbers(
    others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """A client with another spec is refused by the setting that differs; settings of the server or of a machine may."""
    spec = spec_of(rounds=2)
    events = events_of(
        serve(spec, FakeGrid(spec_of(**others), tmp_path / "states"), tmp_path / "out")
    )
    assert all(f"refused: {words}" in event for event in events if "nothing counted" not in event)
    assert bool(events) == bool(words)


def test_clients_agree_on_the_length_that_a_schedule_spans(tmp_path: Path) -> None:
    spec = spec_of(SSF | {"schedule": "linear", "warmup": 1})
    here = run(spec, tmp_path / "here").history[-1]
    there = serve(spec, FakeGrid(spec, tmp_path / "states"), tmp_path / "there").history[-1]
    assert there["rel_err"] == pytest.approx(here["rel_err"], rel=1e-6)
    other = FakeGrid(
        spec_of(SSF | {"schedule": "linear", "warmup": 1}, rounds=9), tmp_path / "other"
    )
    assert (
        "rounds is 9 on the client and 6 on the server"
        in events_of(serve(spec, other, tmp_path / "refused"))[0]
    )


def test_messages_survive_flowers_records() -> None:
    arrays = {
        "a": torch.randn(1, 1, 5),
        "p": torch.randn(1, 1, 1, dtype=torch.float64),
    }
    round_message = RoundMessage("ok", 3, 1, 2, "f" * 12, arrays)
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
    task = tables.build("task", {"name": "custom", "module": str(path), "clients": 4})
    whole, client_problem, server_problem = (
        task.build((0,), FLOAT32),
        task.client_problem(2, (0,), FLOAT32),
        task.server_problem((0,), FLOAT32),
    )
    assert (
        whole.layout.fingerprint
        == client_problem.layout.fingerprint
        == server_problem.layout.fingerprint
    )
    assert len(client_problem.client_data[2]) == 20
    for empty in (client_problem.client_data, server_problem.client_data):
        with pytest.raises(Exception, match="not on this machine"):
            empty[0]
    table = {
        "rounds": 3,
        "method": SSF | {"space": {"name": "identity"}},
        "task": tables.describe(task),
        "batch_size": 5,
    }
    spec = Spec.from_table(table)  # clients say how many examples they have
    here = run(spec, tmp_path / "here").history[-1]
    grid = FakeGrid(spec, tmp_path / "states")
    grid.clients = {100 + i: i for i in range(4)}
    there = serve(spec, grid, tmp_path / "there").history[-1]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-6)
    (tmp_path / "bad.py").write_text("x = 1\n")
    bad = tables.build("task", {"name": "custom", "module": str(tmp_path / "bad.py"), "clients": 1})
    with pytest.raises(SpecError, match="no function model"):
        bad.server_problem((0,), FLOAT32)
    with pytest.raises(SpecError, match="does not exist"):
        tables.build("task", {"name": "custom", "module": "no.py", "clients": 1}).build(
            (0,), FLOAT32
        )
