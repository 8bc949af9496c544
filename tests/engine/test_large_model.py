"""Large models in the simulator: few vectors of the model's size, and the same bits as with small ones."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.bundle import Bundle
from fedspan.core.config import Settings
from fedspan.core.layout import Block, Layout
from fedspan.core.round import Round
from fedspan.costs.dry_run import Live
from fedspan.downlinks.changes import Changes
from fedspan.drifts import Controls
from fedspan.engine.loop import Loop
from fedspan.methods import SSF, FedAvg, Scaffold
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from fedspan.optimizers import SGD
from fedspan.replies.chain import Chain, Gathered

KNOWN: dict[str, Any] = {"lr": 0.05, "local_steps": 2}


def as_large(patch: pytest.MonkeyPatch) -> None:
    """Treats every model as a large one."""
    patch.setattr(Chain, "large_from", 0)
    patch.setattr(Loop, "large", 0)
    patch.setattr(Changes, "large_log", 0)
    patch.setattr(TorchProblem, "large", 0)


def trained(
    method: Any,
    clients: int = 5,
    rounds: int = 4,
    width: int = 40,
    layers: int = 1,
    states_dir: Path | None = None,
    **settings: Any,
) -> fedspan.Result:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(width, width) for _ in range(layers)), nn.ReLU(), nn.Linear(width, 3)
    )
    data = [(torch.randn(6 + i, width), torch.arange(6 + i) % 3) for i in range(clients)]
    engine = fedspan.Engine(simulate="loop", states_dir=states_dir)
    return fedspan.fit(
        model,
        data,
        method=method,
        rounds=rounds,
        test=data[0],
        engine=engine,
        progress=False,
        **settings,
    )


@pytest.mark.parametrize("cohort", [2, 5, 16, 40])
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_of_replies_as_they_arrive_is_that_of_all_of_them(cohort: int, weighted: bool) -> None:
    size = 64 * 3 + 37
    layout = Layout((Block("w", (size,)),))
    weights = torch.rand(1, cohort, 1) if weighted else None
    ids = np.arange(cohort)[None]
    rnd = Round(0, (0,), cohort, layout, ids, np.full_like(ids, -1), weights)
    dy, mean = torch.randn(1, cohort, size), Gathered(rnd, running=True)
    for place in range(cohort):
        mean.add(place, Bundle(v=dy[:, place : place + 1].clone()))
    assert torch.equal(rnd.mean(mean.reply().v), rnd.mean(dy))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_without_a_reply_that_was_left_out(weighted: bool) -> None:
    ids, places = np.arange(5)[None], np.array([0, 1, 3, 4])
    weights = torch.rand(1, 5, 1) if weighted else None
    rnd = Round(0, (0,), 5, Layout((Block("w", (70,)),)), ids, np.full_like(ids, -1), weights)
    dy, mean = torch.randn(1, 5, 70), Gathered(rnd, running=True)
    for place in places:
        mean.add(int(place), Bundle(v=dy[:, place : place + 1].clone()))
    torch.testing.assert_close(mean.reply().v, rnd.subset(places).mean(dy[:, places]))


@pytest.mark.parametrize(
    "settings",
    [{}, {"participation": fedspan.Participation(weights="examples")}, {"clients_per_round": 3}],
)
@pytest.mark.parametrize(
    "method",
    [
        FedAvg(**KNOWN),
        SSF(rank=0.2, **KNOWN),
        SSF(rank=0.2, server="fedexp", **KNOWN),
        Scaffold(**KNOWN),
        Scaffold(drift=Controls(correction="tested"), **KNOWN),
    ],
)
def test_numbers_and_bytes_are_those_of_a_small_model(
    method: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = trained(method, rounds=7, **settings)
    as_large(monkeypatch)
    large = trained(method, rounds=7, **settings)
    for name, value in small.weights[0].items():
        assert torch.equal(value, large.weights[0][name])
    costs = [
        [(line["up_bytes"], line["down_bytes"]) for line in one.history] for one in (small, large)
    ]
    assert costs[0] == costs[1]


@dataclass(frozen=True, kw_only=True)
class Median(FedAvg):
    """A server that needs every reply."""

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        assert up.v.shape[1] == rnd.ids.shape[1]
        return server.replace(x=server.x - up.v.median(1, keepdim=True).values)


def test_a_method_with_a_server_step_of_its_own_gets_every_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_large(monkeypatch)
    assert trained(Median(**KNOWN)).finished


@pytest.mark.parametrize(
    ("method", "on_disk", "most"),
    [
        (FedAvg(**KNOWN), False, 4.3),  # besides the user's model: weights, x, gradient, mean
        (
            SSF(rank=0.05, **KNOWN),
            False,
            4 + 3.8,
        ),  # the states of four clients; x, the new x, controls
        (SSF(rank=0.05, **KNOWN), True, 3.8),  # x, controls, one state
    ],
)
def test_vectors_of_the_model_in_memory(
    method: Any, on_disk: bool, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_large(monkeypatch)
    trained(method, clients=4, rounds=1)  # caches
    gc.collect()
    with Live(torch.device("cpu")) as live:
        result = trained(
            method,
            clients=4,
            rounds=2,
            width=96,
            layers=12,
            states_dir=tmp_path / "states" if on_disk else None,
        )
    model = sum(value.nbytes for value in result.weights[0].values())
    assert (live.peak - model) / model < most


def test_the_model_of_every_round_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients train in the memory of x, and evaluations show it; both leave it as it is."""
    as_large(monkeypatch)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Keep(fedspan.Callback):
        def on_round_end(self, run: Any) -> None:
            seen.append((run.model(), run.model().clone()))

    trained(SSF(rank=0.2, **KNOWN), rounds=4, callbacks=[Keep()])
    assert len({kept.data_ptr() for kept, _ in seen}) == 4
    assert all(torch.equal(kept, copy) for kept, copy in seen)


def test_a_large_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_large(monkeypatch)
    whole = trained(SSF(rank=0.2, **KNOWN), rounds=4)

    class Stop(fedspan.Callback):
        def on_round_end(self, run: Any) -> None:
            if run.t == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(SSF(rank=0.2, **KNOWN), rounds=4, run_dir=tmp_path / "run", callbacks=[Stop()])
    resumed = trained(SSF(rank=0.2, **KNOWN), rounds=4, run_dir=tmp_path / "run", resume=True)
    for name, value in whole.weights[0].items():
        assert torch.equal(value, resumed.weights[0][name])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_client_trains_in_the_memory_of_x_and_puts_it_back(momentum: float) -> None:
    method, found = SSF(rank=0.3, local=SGD(momentum=momentum), **KNOWN), []
    for on_client in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
        data = as_client_data((torch.randn(12, 40), torch.arange(12) % 3), "client 0")
        rules = projection_rules(model)
        problem = TorchProblem(
            model, [data], _loss, rules, Settings(batch_size=4), on_client=on_client
        )
        x = torch.randn(1, 1, problem.layout.size, generator=torch.Generator().manual_seed(1))
        x[..., ::7] = -0.0
        before = x.numpy().tobytes()
        rnd = Round(0, (0,), 1, problem.layout, np.array([[0]]), np.array([[-1]]), local_steps=2)
        with torch.inference_mode():
            down = method.broadcast(method.init_server(x, problem.layout), rnd)
            found.append(
                method.client_step(
                    method.init_client(x, problem.layout), down, problem.cohort(rnd), rnd
                )
            )
        assert x.numpy().tobytes() == before
        assert (problem.module.flat.data_ptr() == x.data_ptr()) == on_client
    assert torch.equal(found[0][0].c, found[1][0].c)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
