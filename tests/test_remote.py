"""Server and clients apart, each client with its own files: the same result, and an outcome for every fault."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import Scripted, advance, build, close, every_method, model, small, start
from fedspan.core.errors import ProtocolError, SpecError
from fedspan.core.method import Round
from fedspan.runtimes.letters import Letter
from fedspan.runtimes.loop import Loop
from fedspan.runtimes.remote import Remote
from fedspan.runtimes.simulator import Simulator
from fedspan.runtimes.site import Site, Store

SSF = {"projector": {"name": "coordinate", "rank": 4}}
Change = Callable[[Letter], Any]


class Wire:
    """A link in this process; `faults[(round, client)]` is what becomes of a letter."""

    def __init__(self, method: Any, problem: Any, folder: Path) -> None:
        self.method, self.problem, self.folder = method, problem, folder
        self.faults: dict[tuple[int, int], Change] = {}
        self.letters: list[tuple[Letter, Letter | None]] = []

    def site(self, client: int) -> Site:
        """A new process each time, as on Flower: only the files remain."""
        return Site(
            self.method, self.problem, Store.of(self.folder, "run", f"c{client}"), client, self.problem.seeds[0]
        )

    def deliver(self, letters: list[Letter]) -> Iterator[tuple[int, Letter | str]]:
        for number, letter in enumerate(letters):
            again = Letter.read(letter.header(), {k: v.clone() for k, v in letter.arrays.items()})
            fault = self.faults.pop((letter.t, letter.client), None)
            if fault is None:
                reply = self.site(letter.client).answer(again)
                self.letters.append((letter, reply))
                yield number, reply
            else:
                for one in fault(again):
                    yield number, one


def remote(method: Any, problem: Any, sites: Path, **settings: Any) -> tuple[Loop, Wire, Remote]:
    link = Wire(method, problem, sites)
    end = Remote(method, problem.layout, problem.x0, problem.clients, link, problem.seeds[0], **settings)
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
    sent = sum(letter.bytes for letter, _ in link.letters)
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
            own = link.site(client).store.load(int(end.acked[client]), method.types()[1], mark).state
            for field, states in (end._copies or {}).items():
                close(states.take(np.array([client])), getattr(own, field)[0])


def controls(link: Wire, end: Remote) -> torch.Tensor:
    """c_i of every client from its own file."""
    found = []
    for client in range(link.problem.clients):
        seq = int(end.acked[client])
        site = link.site(client)
        state = site.store.load(seq, link.method.types()[1], end.mark).state if seq else None
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


def after_saving(link: Wire) -> Change:
    """The client works and writes, then its reply is lost on the way."""

    def fault(letter: Letter) -> list[Any]:
        link.site(letter.client).answer(letter)
        return []

    return fault


FAULTS: dict[str, tuple[Callable[[Wire], Change], str]] = {
    "silent": (lambda _: lambda __: [], "no reply in time"),
    "reply lost": (after_saving, "no reply in time"),
    "raises": (lambda _: lambda m: [replace(m, status="failed", reason="ValueError: boom", arrays={})], "boom"),
    "link error": (lambda _: lambda __: ["node unavailable"], "node unavailable"),
    "nan": (lambda w: lambda m: [spoil(w, m, lambda a: a * float("nan"))], "not finite"),
    "shape": (lambda w: lambda m: [spoil(w, m, lambda a: a[..., :-1])], "wanted"),
    "huge": (lambda w: lambda m: [spoil(w, m, lambda a: a.repeat(1, 1, 999))], "wanted"),
    "dtype": (lambda w: lambda m: [spoil(w, m, lambda a: a.int())], "wanted"),
    "names": (lambda w: lambda m: [replace(spoil(w, m, lambda a: a), arrays={"x": torch.zeros(1)})], "arrays"),
    "other method": (lambda w: lambda m: [replace(spoil(w, m, lambda a: a), fingerprint="0" * 12)], "same spec"),
    "late": (lambda w: lambda m: [replace(spoil(w, m, lambda a: a), t=m.t - 1)], "another letter"),
    "refused": (lambda _: lambda m: [replace(m, status="refused", reason="no", arrays={})], "refused: no"),
}


def spoil(link: Wire, letter: Letter, change: Callable[[torch.Tensor], torch.Tensor]) -> Letter:
    reply = link.site(letter.client).answer(letter)
    return replace(reply, arrays={k: change(v) for k, v in reply.arrays.items()})


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_one_reply_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """The round goes on with the rest; the client's own file rolls back; the result is that of the accepted updates."""
    method, problem = build("ssf", **SSF), small()
    loop, link, end = remote(method, problem, tmp_path)
    make, words = FAULTS[kind]
    missing = set()
    for t in (2, 3, 6):
        client = ids_of(loop, t)[1]
        missing.add((t, client))
        link.faults[t, client] = make(link)
    advance(loop, 12)
    close(model(loop), model(simulated(method, problem, 12, missing)))
    assert len(loop.events) == 3
    assert all(words in event and event.startswith("round ") for event in loop.events)
    close(controls(link, end).mean(0), loop.server.c[0, 0])
    assert end.acked.sum() == 12 * 3 - 3


def test_a_second_reply_counts_once(tmp_path: Path) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, link, _ = remote(method, problem, tmp_path)
    link.faults[1, ids_of(loop, 1)[0]] = lambda m: [link.site(m.client).answer(m)] * 2
    advance(loop, 6)
    close(model(loop), model(simulated(method, problem, 6)))
    assert "second reply was dropped" in loop.events[0]


@pytest.mark.parametrize(("name", "settings"), [("ssf", SSF), ("doublesqueeze", {})])
def test_too_few_replies_count_nothing(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    method, problem = build(name, **settings), small()
    loop, link, end = remote(method, problem, tmp_path, minimum=3)
    ids = ids_of(loop, 2)
    link.faults[2, ids[0]] = lambda _: []
    advance(loop, 8)
    close(model(loop), model(simulated(method, problem, 8, {(2, c) for c in ids})))
    assert "fewer than 3" in loop.events[-1]
    assert end.acked.sum() == 7 * 3


LOSSES: dict[str, Callable[[Path], Any]] = {
    "deleted": lambda path: path.unlink(),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "altered": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x55"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(("name", "settings"), every_method())
def test_a_lost_state_is_restored_exactly(kind: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    if kind != "deleted" and name != "ssf":
        pytest.skip("one method is enough")
    method, problem = build(name, **settings), small()
    loop, link, end = remote(method, problem, tmp_path)
    advance(loop, 7)
    for client in range(problem.clients):
        path = link.site(client).store.path
        if path.exists():
            LOSSES[kind](path)
    advance(loop, 8)
    here = simulated(method, problem, 7)
    for field in method.private:  # what no server can know begins anew
        here.transport.inner._population[field].all.zero_()  # type: ignore[attr-defined]
    close(model(loop), model(advance(here, 8)), 1e-10)
    assert any("restored from the server's copy" in event for event in loop.events)
    assert end.acked.sum() == 15 * 3
    nominal = simulated(method, problem, 15).ledger.down.sum()
    assert loop.ledger.down.sum() > nominal  # what was sent twice is counted twice


@pytest.mark.parametrize("name", ["ef", "qsparse", "doublesqueeze", "scafcom"])
def test_replies_are_not_rounded_behind_the_back_of_error_feedback(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"{name} has noted what it keeps to itself"):
        remote(build(name), small(), tmp_path, cast="bfloat16")


@pytest.mark.parametrize("name", ["ef", "doublesqueeze"])
def test_a_lost_reply_takes_error_feedback_back(name: str, tmp_path: Path) -> None:
    """The client has worked and written its new e_i; the reply never came: e_i is as if the round had not been."""
    method, problem = build(name), small()
    loop, link, _ = remote(method, problem, tmp_path)
    missing = set()
    for t in (2, 3, 6):
        client = ids_of(loop, t)[1]
        missing.add((t, client))
        link.faults[t, client] = after_saving(link)
    advance(loop, 12)
    close(model(loop), model(simulated(method, problem, 12, missing)))


def test_without_a_copy_a_client_re_enters_empty(tmp_path: Path) -> None:
    method, problem = build("ssf", **SSF), small()
    loop, link, end = remote(method, problem, tmp_path, backup=False)
    advance(loop, 7)
    before = controls(link, end)
    client = ids_of(loop, 7)[0]
    assert end.acked[client]
    link.site(client).store.path.unlink()
    advance(loop, 1)
    assert any("re-enters with an empty state" in event for event in loop.events)
    gap = controls(link, end).mean(0) - loop.server.c[0, 0]
    close(gap, -before[client] / problem.clients)  # what c no longer matches: the lost control's share, for good


def test_who_re_enters_empty_does_what_a_newcomer_would(tmp_path: Path) -> None:
    """FedSub's dual is owed a change since the last round of a client; one that starts anew is owed none."""
    method, problem = build("fedsub", projector={"name": "coordinate", "rank": 4}), small()
    loop, link, end = remote(method, problem, tmp_path / "sites", backup=False)
    advance(loop, 7)
    client = ids_of(loop, 7)[0]
    assert end.acked[client]
    link.site(client).store.path.unlink()
    advance(loop, 1)
    letter, reply = link.letters[-1]
    assert letter.client == client
    assert reply is not None
    fresh = Wire(method, problem, tmp_path / "fresh").site(client)
    plain = {name: array for name, array in letter.arrays.items() if not name.startswith("restore.")}
    newcomer = fresh.answer(replace(letter, seq=0, arrays=plain))
    assert newcomer.status == "ok"
    close(reply.arrays["b"], newcomer.arrays["b"])


def test_a_server_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Clients are rounds ahead of the checkpoint: their files no longer have the version, the copies do."""
    method, problem = build("ssf", **SSF), small()
    loop, _, _ = remote(method, problem, tmp_path / "sites", folder=tmp_path / "server")
    advance(loop, 4)
    saved = {k: v.clone() for k, v in loop.save().items()}
    advance(loop, 5)
    again, link, end = remote(method, problem, tmp_path / "sites", folder=tmp_path / "server", resume=True)
    again.load(saved)
    advance(again, 8)
    close(model(again), model(simulated(method, problem, 12)))
    close(controls(link, end).mean(0), again.server.c[0, 0])
    assert any("restored" in event for event in again.events)


def test_many_random_faults(tmp_path: Path) -> None:
    """Forty faults of all kinds at random: c = mean c_i holds, and the model is that of the accepted updates."""
    rng = np.random.default_rng(0)
    method, problem = build("ssf", **SSF), small()
    loop, link, end = remote(method, problem, tmp_path)
    missing, wiped = set(), 0
    for t in range(40):
        ids = ids_of(loop, t)
        client = ids[int(rng.integers(3))]
        kind = list(FAULTS)[int(rng.integers(len(FAULTS)))]
        if rng.random() < 0.3:
            path = link.site(client).store.path
            wiped += path.exists()
            path.unlink(missing_ok=True)
        else:
            missing.add((t, client))
            link.faults[t, client] = FAULTS[kind][0](link)
        advance(loop, 1)
    assert wiped > 5
    assert len(missing) > 20
    close(model(loop), model(simulated(method, problem, 40, missing)), 1e-10)
    close(controls(link, end).mean(0), loop.server.c[0, 0], 1e-10)


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
    good = Letter("train", 0, 0, 0, "0" * 12).header()
    Letter.read(good, {})
    with pytest.raises((ProtocolError, SpecError), match=words):
        Letter.read(good | change, {})


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
