"""One reply that is out of all measure does not end a run, and changes nothing else of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attacks import filled, hostile, times

import fedspan
from fedspan.checks.bench import same, tensors
from fedspan.core.bundle import Bundle
from fedspan.core.config import Engine, Participation
from fedspan.core.errors import SpecError
from fedspan.core.round import Round
from fedspan.engine.loop import Loop, cohort_of
from fedspan.engine.simulator import Simulator
from fedspan.remote.messages import RoundMessage
from fedspan.replies.chain import Chain, norms_of
from support.channel import LocalChannel, remote
from support.loops import RUN, Scripted, advance, small
from support.methods import METHODS, build

HUGE = filled(3e38)
CODED = [
    ("ssf", {"rank": 4}), ("scaffold", {}), ("fedavg", {}), ("fedadam", {}), ("subavg", {}), ("powersgd", {}),
    ("ssf", {"compressor": {"name": "qsgd", "levels": 7}}), ("ssf", {"compressor": "sign", "beta": 0.3}),
    ("ssf", {"compressor": {"name": "topk", "k": 0.5}}), ("ef", {}), ("compressed", {}),
    ("scallion", METHODS["scallion"][1]),
]  # fmt: skip


def run(
    name: str,
    own: dict[str, Any],
    rounds: int = 12,
    screen: float | None = 100.0,
    copies: int | None = None,
    **settings: Any,
) -> tuple[Loop, Any]:
    problem = small(torch.float32, **settings)
    method = build(name, **own)
    clients = Simulator(method, problem)
    clients.copies = clients.copies if copies is None else copies
    chain = Chain(method, Participation(screen=screen), runs=len(problem.seeds))
    loop = Loop(method, problem, clients, problem.seeds, 5, rounds=60, chain=chain)
    return advance(loop, rounds), clients


@pytest.mark.parametrize(("name", "own"), CODED)
def test_a_finite_reply_of_3e38_does_not_end_the_run(name: str, own: dict[str, Any]) -> None:
    """It is left out as if it had not come: model, states and bytes are those of a run in which it was lost."""
    problem, method = small(torch.float32), build(name, **own)
    liar, when = 2, {4, 5, 9}
    with hostile([liar], HUGE, when):
        held, clients = run(name, own)
        if name == "fedavg":
            assert not torch.isfinite(run(name, own, screen=None)[0].model()).all()
    assert torch.isfinite(held.model()).all()
    inner = Simulator(method, problem)
    lost = Loop(
        method, problem, Scripted(inner, {(t, liar) for t in when}), problem.seeds, 5, rounds=60
    )
    advance(lost, 12)
    assert same(tensors(held.server), tensors(lost.server))
    assert same(tensors(clients.clients()), tensors(inner.clients()))
    assert (held.ledger.up == lost.ledger.up).all()
    took_part = [t for t in when if liar in cohort_of(problem.seeds, problem.clients, 5, t)]
    assert took_part
    told = [event for event in held.events if "left out" in event]
    assert [event.split(": reply")[0] for event in told] == [
        f"round {t}: client {liar}" for t in sorted(took_part)
    ]
    assert all("times the median" in event for event in told)


@pytest.mark.parametrize(
    "own", [{}, {"compressor": {"name": "topk", "k": 0.5}, "beta": 0.3}], ids=["plain", "coded"]
)
def test_states_written_over_their_copies_are_the_same(
    own: dict[str, Any],
) -> None:
    """Also that of a client whose reply is left out: what was overwritten is its copy."""
    found = []
    for least in (0, 1 << 62):
        with hostile([2], HUGE, {4, 5, 9}):
            found.append(run("ssf", own, copies=least, seeds=(0, 1)))
    (loop, clients), (other, others) = found
    assert any("left out" in event for event in loop.events)
    assert same(tensors(loop.server), tensors(other.server))
    assert same(tensors(clients.clients()), tensors(others.clients()))


@pytest.mark.parametrize("name", ["ssf", "scaffold", "fedavg"])
def test_screening_changes_no_number_of_an_honest_run(name: str) -> None:
    (screened, some), (plain, others) = run(name, {}, 40), run(name, {}, 40, screen=None)
    assert same(tensors(screened.server), tensors(plain.server))
    assert same(tensors(some.clients()), tensors(others.clients()))
    assert not screened.events


@pytest.mark.parametrize("simulate", ["loop", "batched", "pool"])
def test_every_way_of_simulating_leaves_the_same_reply_out(simulate: Any) -> None:
    torch.manual_seed(0)
    data = [(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(6)]
    with hostile([1], times(1e30), {3}):
        result = fedspan.fit(
            torch.nn.Linear(6, 3), data, method={"name": "ssf", "lr": 0.1, "rank": 0.5, "local_steps": 2}, rounds=6,
            batch_size=8, test=data[0], engine=Engine(simulate=simulate, workers=2), progress=False,
        )  # fmt: skip
    (event,) = [event for line in result.history for event in line.get("events", ())]
    assert event.startswith("round 3: client 1: reply left out: its norm, ")
    assert result.status == "finished"
    assert math.isfinite(result.history[-1]["loss"])


def screening() -> Chain:
    return Chain(build("fedavg"), Participation(screen=100.0))


def round_of(count: int) -> Round:
    ids = np.arange(count)[None]
    return Round(0, (0,), count, small().layout, ids, np.full_like(ids, -1))


def compared(chain: Chain, norms: list[float]) -> list[int]:
    """The places of those of a round's replies that are left out."""
    return [place for place, _ in chain.compared([[norms]], round_of(len(norms)))]


def test_buffers_are_screened_too() -> None:
    chain = screening()
    ordinary, huge = torch.ones(1, 5, 4), torch.ones(1, 5, 4)
    huge[0, 3] = 3e38
    assert not chain.screened(Bundle(v=ordinary), ordinary, round_of(5))
    ((place, event),) = chain.screened(Bundle(v=ordinary), huge, round_of(5))
    assert (place, event.client) == (3, 3)
    assert "norm of its buffers, 6e+38, is 3e+38 times the median, 2" in event.text


def test_what_is_usual_is_the_largest_median_so_far() -> None:
    """Late in a run most replies are almost zero; an honest client that still learns is not left out."""
    chain = screening()
    assert not compared(chain, [1.0, 2.0, 3.0, 50.0])
    assert not compared(chain, [1e-9, 1e-9, 1e-9, 150.0])
    assert compared(chain, [1e-9, 1e-9, 250.0]) == [2]
    assert compared(chain, [250.0])  # one reply alone is compared with what was usual before
    assert not compared(screening(), [1.0, 1e9])  # of two, nobody knows which one is wrong
    assert not compared(screening(), [0.0, 0.0, 0.0, 1.0])


def test_divergence_is_no_lie_and_still_shows() -> None:
    chain = screening()
    compared(chain, [1.0, 2.0, 3.0])
    assert not compared(chain, [1.0, math.inf, math.nan])
    assert not compared(chain, [math.inf] * 3)
    assert chain.usual[0] == [2.0]
    with pytest.warns(UserWarning, match="diverged at round"):
        result = fedspan.run(
            RUN | {"method": {"name": "fedavg", "lr": 1e6, "local_steps": 3}}, progress=False
        )
    assert result.status.startswith("diverged")


def test_seeds_that_are_computed_together_say_whose_reply_it_was() -> None:
    with hostile([2], HUGE, {4}):
        held, _ = run("ssf", {"rank": 4}, seeds=(5, 6))
    assert torch.isfinite(held.model()).all()
    assert held.events
    assert all("client 2 of seed " in event for event in held.events)


def test_a_resumed_run_knows_what_is_usual() -> None:
    with hostile([2], HUGE, set(range(6, 12))):
        whole, _ = run("scaffold", {}, 12)
        first, _ = run("scaffold", {}, 6)
        second, _ = run("scaffold", {}, 0)
        second.load(first.save())
        advance(second, 6)
    assert same(tensors(second.server), tensors(whole.server))
    assert second.events == whole.events


class Large(fedspan.Callback):
    """Every model counts as a large one."""

    def on_run_start(self, run: Loop) -> None:
        run.large = run.chain.large_from = 0


@pytest.mark.parametrize("name", ["ssf", "scaffold", "fedavg"])
def test_replies_of_large_models_are_screened_as_they_come(name: str) -> None:
    """By what was usual in earlier rounds; where the state was overwritten in place, the client starts again."""
    torch.manual_seed(0)
    model, data = (
        torch.nn.Linear(40, 3),
        [(torch.randn(8, 40), torch.arange(8) % 3) for _ in range(5)],
    )
    with hostile([1], HUGE, {3}):
        result = fedspan.fit(
            model, data, method={"name": name, "lr": 0.1, "local_steps": 2}, rounds=6, test=data[0],
            engine=Engine(simulate="loop"), callbacks=[Large()], progress=False,
        )  # fmt: skip
    (event,) = [event for line in result.history for event in line.get("events", ())]
    assert event.startswith("round 3: client 1: reply left out")
    assert event.endswith("; its state starts again") == (name != "fedavg")
    assert result.history[-1]["loss"] < result.history[0]["loss"]


class Liar(LocalChannel):
    """A channel on which client 2 sends 3e38 in some rounds, whatever it has computed."""

    def deliver(self, messages: list[RoundMessage]) -> Any:
        for index, reply in super().deliver(messages):
            if isinstance(reply, RoundMessage) and reply.client == 2 and reply.t in (4, 5, 9):
                spoilt = {
                    n: HUGE(a) if a.is_floating_point() else a for n, a in reply.arrays.items()
                }
                reply = dataclasses.replace(reply, arrays=spoilt)
            yield index, reply


@pytest.mark.parametrize(
    ("name", "own"), [("ssf", {"rank": 4}), ("fedavg", {}), ("ssf", {"compressor": "sign"})]
)
def test_on_a_network_a_reply_of_3e38_is_refused_and_its_client_rolled_back(
    name: str, own: dict[str, Any], tmp_path: Path
) -> None:
    method, problem = build(name, **own), small(torch.float32)
    loop, _, end = remote(method, problem, tmp_path)
    liar = Liar(method, problem, tmp_path / "liar")
    end.channel = liar
    loop.clients_per_round = 5
    advance(loop, 12)
    assert torch.isfinite(loop.model()).all()
    inner = Simulator(method, problem)
    lost = Loop(
        method, problem, Scripted(inner, {(t, 2) for t in (4, 5, 9)}), problem.seeds, 5, rounds=60
    )
    advance(lost, 12)
    torch.testing.assert_close(loop.model(), lost.model(), rtol=1e-4, atol=1e-5)
    assert any(
        "client 2: reply" in event and ("its norm" in event or "its statistics" in event)
        for event in loop.events
    )
    took_part = sum(2 in cohort_of(problem.seeds, problem.clients, 5, t) for t in range(12))
    left_out = sum(2 in cohort_of(problem.seeds, problem.clients, 5, t) for t in (4, 5, 9))
    assert int(end.accepted[2]) == took_part - left_out
    assert np.isfinite(loop.ledger.up).all()


def test_all_parts_of_a_reply_are_measured() -> None:
    far = torch.ones(1, 5, 4)
    far[0, 3] = 1e4
    for reply in (Bundle(v=torch.ones(1, 5, 2), z=far), Bundle(v=far, z=torch.ones(1, 5, 2))):
        assert [place for place, _ in screening().screened(reply, None, round_of(5))] == [3]


def test_a_statistic_without_a_range_is_refused() -> None:
    """Else nothing would keep a client from sending any number, and a secure sum would weigh it as a vector."""
    reply = Bundle(v=torch.ones(1, 5, 2), stat_new=torch.ones(1, 5, 1))
    with pytest.raises(SpecError, match="replies have 'stat_new'; give its ranges"):
        screening().screened(reply, None, round_of(5))


def test_the_norm_of_a_large_reply_is_that_of_its_pieces() -> None:
    v = torch.randn(2, 3, 1000)
    v[0, 0] *= 1e30
    v[1, 1, 7], v[1, 2, 900] = math.inf, math.nan
    whole = norms_of([v, v[..., :10]])
    torch.testing.assert_close(
        norms_of([v, v[..., :10]], 64), whole, rtol=1e-12, atol=0, equal_nan=True
    )
