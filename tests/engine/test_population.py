"""What a round and a checkpoint cost does not grow with the population or the length of the run.

These tests count calls, bytes and arrays, never seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspan
from fedspan.core import checkpoint
from fedspan.core.config import Engine, Settings
from fedspan.core.errors import CheckpointError
from fedspan.core.partition import fill_empty
from fedspan.data import Classes, Natural
from fedspan.engine.loop import EVENTS_KEPT, Loop
from fedspan.engine.provenance import CHECKPOINT
from fedspan.engine.run_dir import RunFiles
from fedspan.engine.simulator import Simulator
from fedspan.engine.states import InMemory
from fedspan.methods import SSF
from fedspan.replies.chain import Event, Replies, in_words
from fedspan.tasks._module import Material
from fedspan.tasks.custom import Custom
from fedspan.tasks.regression import Regression
from support.loops import advance, small
from support.methods import GAUSSIAN, build

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
MANY = 300


class Fetched:
    """Clients whose data is made when it is asked for."""

    def __init__(self, clients: int) -> None:
        self.clients, self.asked, self.sizes = clients, list[int](), [8] * clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(client)
        return X[client % 30 : client % 30 + 8], Y[client % 30 : client % 30 + 8]


def fitted(clients: Any, rounds: int = 3, **more: Any) -> fedspan.Result:
    torch.manual_seed(0)
    method = SSF(rank=2, lr=0.1, local_steps=2)
    return fedspan.fit(
        nn.Linear(6, 3),
        clients,
        method=method,
        rounds=rounds,
        clients_per_round=4,
        progress=False,
        **more,
    )


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few clients are many."""
    monkeypatch.setattr(Material, "read_at_start", 50)


def calls(work: Callable[[], Any]) -> int:
    count = 0

    def counted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("engine", [{}, {"states_dir": "states"}])
def test_calls_per_round_do_not_grow_with_the_population(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = []
    for n in (100, 5000):
        task, method = Regression(clients=n, dim=8, samples=2), build("ssf", projector=GAUSSIAN)
        problem = task.build((0,), Settings(dtype="float32"))
        states = Engine(
            **engine | ({"states_dir": f"states-{n}"} if "states_dir" in engine else {})
        )
        loop = advance(
            Loop(method, problem, Simulator(method, problem, states), (0,), 5), 16
        )  # all that is kept is
        counts.append(calls(lambda loop=loop: advance(loop, 16)) / 16)  # type: ignore[misc]
    assert counts[1] < 1.1 * counts[0]


def test_memory_and_checkpoints_hold_only_who_took_part() -> None:
    """A million clients of a thousand numbers would be 4 GB."""
    states = InMemory(torch.full((1, 1000), 2.0), 1_000_000)
    rows = np.array([7, 999_999])
    assert torch.equal(states.take(rows), torch.full((2, 1000), 2.0))
    states.put(rows[:1], torch.ones(1, 1000))
    saved = states.save()
    assert sum(array.nbytes for array in saved.values()) < 3 * 4 * 1000
    again = InMemory(torch.full((1, 1000), 2.0), 1_000_000)
    again.load(saved)
    assert torch.equal(again.take(np.array([3, 7]))[:, 0], torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize(
    ("name", "few", "many"),
    [
        ("ssf", 50, 1000),
        ("fedsub", 50, 400),
        ("doublesqueeze", 50, 400),
        pytest.param("ssf", 100, 10_000, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_does_not_grow_with_the_rounds(
    name: str, few: int, many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its bytes nor the calls that write it, with evaluations or the log of changes; the arrays are as many."""
    method = {"name": name, "lr": 0.01, "local_steps": 1} | (
        {} if name == "doublesqueeze" else {"rank": 2}
    )
    task = {"name": "regression", "dim": 30, "clients": 8, "samples": 4}
    spec = {
        "rounds": 20,
        "clients_per_round": 2,
        "batch_size": "full",
        "method": method,
        "task": task,
    }
    sizes, arrays, ends, counts, save = [], [], list[int](), list[int](), RunFiles.save
    monkeypatch.setattr(RunFiles, "save", lambda files: counts.append(calls(lambda: save(files))))
    for rounds in (few, many):
        out = tmp_path / f"{rounds}"
        fedspan.run(spec | {"rounds": rounds}, out, progress=False)
        sizes.append((out / CHECKPOINT).stat().st_size)
        arrays.append(len(checkpoint.load(out / CHECKPOINT)[0]))
        ends.append(counts[-1])
    assert sizes[1] < 1.5 * sizes[0]
    assert arrays[0] == arrays[1]
    assert ends[1] < 1.1 * ends[0]


@pytest.mark.filterwarnings("ignore:the run of seed")
def test_a_run_of_which_one_seed_diverged_goes_on_with_the_others(tmp_path: Path) -> None:
    task = {"name": "regression", "clients": 4, "dim": 10, "outputs": 1, "samples": 10, "het": 2.0}
    method = {"name": "fedavg", "lr": 0.036, "local_steps": 5}
    spec = {"rounds": 40, "eval_every": 10, "batch_size": 5, "method": method, "task": task}
    first = fedspan.run(spec, tmp_path / "a", seeds=3, progress=False)
    assert {one[:8] for one in first.statuses} == {"finished", "diverged"}
    longer = fedspan.run(
        spec | {"rounds": 60}, tmp_path / "a", seeds=3, resume=True, progress=False
    )
    whole = fedspan.run(spec | {"rounds": 60}, tmp_path / "b", seeds=3, progress=False)
    assert longer.statuses == whole.statuses
    assert [[row.get("rel_err") for row in run] for run in longer.runs] == [
        [row.get("rel_err") for row in run] for run in whole.runs
    ]


def test_a_history_that_the_checkpoint_does_not_know_is_refused(tmp_path: Path) -> None:
    task = {"name": "regression", "dim": 6, "clients": 4, "samples": 8}
    spec = {"rounds": 4, "method": {"name": "fedavg", "lr": 0.01}, "task": task}
    fedspan.run(spec, tmp_path, progress=False)
    again = fedspan.run(spec | {"rounds": 6}, tmp_path, resume=True, progress=False)
    assert [row["round"] for row in again.history] == list(range(7))
    path = tmp_path / "history.jsonl"
    path.write_text(path.read_text().replace('"round": 3', '"round": 2'))
    (tmp_path / "result.json").unlink()
    with pytest.raises(CheckpointError, match=r"line 5 of .*history\.jsonl' is damaged"):
        fedspan.run(spec | {"rounds": 8}, tmp_path, resume=True, progress=False)


class Absent:
    """A transport to clients of whom many never reply."""

    def __init__(self, inner: Simulator) -> None:
        self.inner = inner

    def exchange(self, *of_round: Any) -> Replies:
        found = self.inner.exchange(*of_round)
        return Replies(
            found.places,
            found.up,
            events=tuple(Event("no reply", i, f"away {i}") for i in range(50)),
        )

    def save(self) -> Any:
        return self.inner.save()


def test_events_between_two_rows_are_bounded() -> None:
    method, problem = build("fedavg"), small()
    loop = Loop(method, problem, Absent(Simulator(method, problem)), (5,), 3)  # type: ignore[arg-type]
    advance(loop, 40)
    assert len(loop.events) == EVENTS_KEPT
    row = list(loop.rows(41, 50))[-1]
    assert row.events[-1] == f"{41 * 50 - EVENTS_KEPT:,} more events"
    assert not loop.events
    told = in_words(
        3, [Event("other", 1, "late"), *(Event("no reply", i, "away") for i in range(50))]
    )
    assert told == ["round 3: client 1: late", "round 3: clients 0, 1, 2, 3, 4 and 45 more: away"]
    events, names = [Event("no reply", i, "away") for i in range(6)], [*"abcd", "4", "client-5"]
    assert in_words(3, events, names) == ["round 3: clients 'a', 'b', 'c', 'd', 4 and 1 more: away"]
    assert in_words(3, events[3:], names) == [
        f"round 3: {who}: away" for who in ("client 'd'", "client 4", "client 5")
    ]


def test_data_of_many_clients_is_read_when_they_take_part(later: None) -> None:
    clients = Fetched(MANY)
    result = fitted(clients, test=(X, Y))
    assert result.finished
    assert len(set(clients.asked)) < 20
    whole = fitted([clients[i] for i in range(MANY)], test=(X, Y))
    assert [row["loss"] for row in whole.history] == [row["loss"] for row in result.history]


@pytest.mark.parametrize(
    "more", [{"epochs": 1}, {"participation": fedspan.Participation(weights="examples")}]
)
def test_what_needs_all_sizes_reads_them_from_a_list(
    more: dict[str, Any], later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run as one that reads everything at the start."""
    clients = [Fetched(MANY)[i] if i % 2 else (X[:5], Y[:5]) for i in range(MANY)]
    one = fitted(clients, test=(X, Y), **more)
    monkeypatch.setattr(Material, "read_at_start", 10 * MANY)
    assert [row["loss"] for row in fitted(clients, test=(X, Y), **more).history] == [
        r["loss"] for r in one.history
    ]


def test_a_bad_client_of_many_is_named_when_it_takes_part(later: None) -> None:
    clients = [(X[:4], Y[:4]), *[(X[:4] * float("nan"), Y[:4])] * MANY]
    with pytest.raises(fedspan.FedspanError, match=r"client \d+ has values that are not finite"):
        fitted(clients)


def test_partitions_of_many_clients_are_those_of_the_plain_rules() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(0, 6, 60)
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    plain, draw = list(parts), np.random.default_rng(1)
    for client, part in enumerate(plain):
        if not len(part):
            largest = max(range(len(plain)), key=lambda i: len(plain[i]))
            place = int(draw.integers(len(plain[largest])))
            plain[client], plain[largest] = (
                plain[largest][place : place + 1],
                np.delete(plain[largest], place),
            )
    assert [p.tolist() for p in fill_empty(list(parts), np.random.default_rng(1))] == [
        p.tolist() for p in plain
    ]
    owners = rng.integers(0, 20, 200).astype(str)
    names, counts = np.unique(owners, return_counts=True)
    chosen = np.sort(names[np.argsort(-counts, kind="stable")][:7])
    found = Natural(clients=7).split(owners, owners=owners)
    assert [p.tolist() for p in found] == [
        np.flatnonzero(owners == name).tolist() for name in chosen
    ]
    labels = np.arange(6_000) % 10
    assert sum(map(len, Classes(clients=2_000).split(labels))) == len(labels)


def test_a_module_of_many_clients_calls_data_for_those_that_take_part(
    later: None, tmp_path: Path
) -> None:
    (tmp_path / "many.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def model():\n    return nn.Linear(6, 3)\n"
        "def data(client):\n    assert client == 0\n    return torch.ones(4, 6), torch.tensor([0, 1, 2, 0])\n"
        f"def sizes():\n    return [4] * {MANY}\n"
    )
    task = Custom(module=str(tmp_path / "many.py"), clients=MANY)
    assert task.build((0,), Settings()).clients == MANY
