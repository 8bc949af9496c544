"""Statistics of a reply, such as the two numbers of the tested correction, apart from its payload."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan.aggregators import GeometricMedian
from fedspan.core.config import Projection
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods import SSF
from fedspan.remote.messages import RoundMessage
from support.channel import LocalChannel, remote
from support.loops import SMALL, advance, small
from support.methods import build

REGRESSION: dict[str, Any] = {
    "rounds": 600,
    "batch_size": 20,
    "clients_per_round": 10,
    "eval_every": 20,
    "method": {
        "name": "ssf",
        "lr": 1e-3,
        "local_steps": 5,
        "space": {"name": "gaussian", "rank": 20},
    },
    "task": {"name": "regression", "het": 2.0},
}


def told(result: fedspan.Result) -> list[str]:
    return [event for line in result.history for event in line.get("events", ())]


def test_no_honest_reply_is_left_out_for_its_statistics() -> None:
    """The paper's regression at high heterogeneity, where ‖v‖² is 300 times the norm of a reply."""
    result = fedspan.run(REGRESSION, progress=False)
    assert not told(result)
    assert any(line["correction_test"] for line in result.history)


@pytest.mark.parametrize("name", ["ssf", "scaffold"])
def test_the_unit_of_the_targets_changes_the_scale_of_the_run_and_nothing_else(name: str) -> None:
    """Powers of two scale floating point numbers without rounding, so the weights agree to the last bit."""
    rng = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(30, 8, generator=rng, dtype=torch.float64) * (1 + client) for client in range(6)
    ]
    targets = [one @ torch.randn(8, 1, generator=rng, dtype=torch.float64) for one in inputs]
    method: dict[str, Any] = {"name": name, "lr": 2e-3, "local_steps": 4}
    method["drift"] = {"name": "controls", "correction": "tested"}
    method |= {"rank": 4} if name == "ssf" else {}
    found = {}
    for scale in (2.0**-12, 1.0, 2.0**12):
        model = torch.nn.Linear(8, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        data = [(x, scale * y) for x, y in zip(inputs, targets, strict=True)]
        result = fedspan.fit(
            model, data, method=method, loss=torch.nn.functional.mse_loss, rounds=80, batch_size=10,
            clients_per_round=3, eval_every=1, progress=False,
            projection=Projection(project_modules=("*",), min_numel=1),
        )  # fmt: skip
        assert not told(result)
        found[scale] = result.model.weight / scale, [line["correction"] for line in result.history]
    assert any(found[1.0][1])
    for weights, switch in found.values():
        assert torch.equal(weights, found[1.0][0])
        assert switch == found[1.0][1]


class Steering(LocalChannel):
    """A channel on which client 2 sends other statistics than those that it has measured."""

    sent: tuple[float, float]

    def deliver(self, messages: list[RoundMessage]) -> Any:
        for index, reply in super().deliver(messages):
            if (
                isinstance(reply, RoundMessage)
                and reply.client == 2
                and "stat_test" in reply.arrays
            ):
                arrays = reply.arrays | {
                    "stat_test": torch.tensor([[self.sent]], dtype=reply.arrays["stat_test"].dtype)
                }
                reply = dataclasses.replace(reply, arrays=arrays)
            yield index, reply


@pytest.mark.parametrize(
    "sent", [(1e300, 1e300), (-1e300, 1.0), (0.5, -0.5), (float("nan"), 1.0), (2.0, 1.0)]
)
def test_a_client_cannot_steer_the_switch_with_impossible_statistics(
    sent: tuple[float, float], tmp_path: Path
) -> None:
    """Its reply is refused, and the run is that of the other clients."""
    method, problem = build("ssf", rank=4), small()
    loop, _, end = remote(method, problem, tmp_path)
    end.channel = Steering(method, problem, tmp_path / "liar")
    end.channel.sent = sent
    loop.clients_per_round = 7
    advance(loop, 12)
    refused = [event for event in loop.events if "client 2" in event]
    assert len(refused) == 12
    assert all("reply refused: " in event for event in refused)
    assert int(end.accepted[2]) == 0


def test_with_an_aggregator_a_liar_cannot_turn_the_switch_with_possible_statistics(
    tmp_path: Path,
) -> None:
    """One client of seven sends the worst numbers that may be. Of statistics the median counts."""
    switches = []
    for lies in (False, True):
        method, problem = build("ssf", rank=4, control="paper"), small()
        loop, _, end = remote(method, problem, tmp_path / str(lies))
        if lies:
            end.channel = Steering(method, problem, tmp_path / "liar")
            end.channel.sent = (-0.5, 1.0)
        loop.clients_per_round, loop.chain.aggregator = 7, GeometricMedian()
        advance(loop, 60)
        switches.append(method.measures(loop.server)["correction"].tolist())
    assert switches == [[1.0], [1.0]]


def test_impossible_statistics_are_left_out_in_a_simulation_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, problem = build("ssf", rank=4), small()
    inner = type(method).client_step

    def lying(self: Any, client: Any, down: Any, f: Any, rnd: Any) -> Any:
        state, up = inner(self, client, down, f, rnd)
        liar = torch.from_numpy(rnd.ids == 2)[..., None]
        return state, up.replace(stat_test=torch.where(liar, 7.0, up.stat_test))

    monkeypatch.setattr(SSF, "client_step", lying)
    clients = Simulator(method, problem)  # which screens nothing else
    loop = advance(Loop(method, problem, clients, problem.seeds, 7, rounds=60), 3)
    assert [event.split(": reply left out: ")[0] for event in loop.events] == [
        f"round {t}: client 2" for t in range(3)
    ]
    assert (clients.clients().c[:, 2] == 0).all()


def test_secure_sums_carry_the_statistics_whatever_the_scale_of_the_replies() -> None:
    """‖v‖² is far above the range of the whole numbers, which would cut it."""
    pytest.importorskip("cryptography")
    table = REGRESSION | {
        "rounds": 200,
        "task": SMALL | {"het": 2.0},
        "batch_size": 4,
        "clients_per_round": 4,
    }
    table["method"] = table["method"] | {"space": {"name": "gaussian", "rank": 4}, "lr": 5e-3}
    plain = fedspan.run(table, progress=False)
    secure = {"secure": True, "secure_bits": 64, "secure_scale": 2.0**36, "secure_range": 2.0**14}
    summed = fedspan.run(table | {"privacy": secure}, progress=False)
    tests = [np.array([line["correction_test"] for line in one.history]) for one in (plain, summed)]
    assert not told(summed)
    assert np.abs(tests[0]).max() > 0
    np.testing.assert_allclose(tests[0], tests[1], atol=1e-4)
