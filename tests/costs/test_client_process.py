"""The peak of a client's process across machines: a rehearsal without numbers against real rounds."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedspan import Projection
from fedspan.core import registry, tables, wire
from fedspan.core.bundle import Bundle
from fedspan.core.round import Round
from fedspan.core.spec import Spec
from fedspan.costs.dry_run import Live
from fedspan.costs.memory import client_peak
from fedspan.costs.plan import plan, shapes
from fedspan.engine.simulator import Replica, answer
from fedspan.methods import SSF
from fedspan.tasks._module import Material
from fedspan.tasks.custom import Custom
from support.axes import by_axis
from support.methods import METHODS

IMAGES = {"name": "classification", "data": "digits", "partition": {"name": "iid", "clients": 3}}
GAUSSIAN = {"name": "gaussian", "rank": 0.2}


def spec_of(method: dict[str, Any], **more: Any) -> Spec:
    table = {
        "rounds": 2,
        "batch_size": 8,
        "device": "cpu",
        "task": IMAGES | {"model": "mlp"},
    } | more
    return Spec.from_table(
        table
        | {
            "method": by_axis({"lr": 0.1, "local_steps": 2} | method),
            "projection": {"min_numel": 64},
        }
    )


def measured(spec: Spec) -> int:
    """Bytes at the peak of a client's first two rounds, of which the states lie elsewhere."""
    method, problem = spec.method, spec.task.client_problem(0, (0,), spec)
    layout: Any = problem.layout
    peaks, x = [], torch.randn(1, 1, layout.size)
    server, client = method.init_server(x, layout), Replica(method.init_client(x, layout))
    for t in range(2):
        ids, last_round = np.zeros((1, 1), np.int64), np.full((1, 1), t - 1)
        rnd = Round(t, (0,), 1, layout, ids, last_round, local_steps=method.local_steps, rounds=2)
        down = wire.pack(wire.pick(method.broadcast(server, rnd), 0))
        gc.collect()
        with Live(torch.device("cpu")) as live:
            with live.pause():  # on disk
                state = Bundle(**{name: part.clone() for name, part in vars(client.state).items()})
                client = Replica(
                    state, None if client.x is None else client.x.clone(), client.last_round
                )
            received = {name: array.clone() for name, array in down.items()}
            client, up = answer(method, problem, client, received, rnd)
        peaks.append(live.peak)
        server = method.server_step(server, wire.unpack(up), rnd)
    return max(peaks)


@pytest.mark.parametrize(
    "method",
    [
        {"name": "ssf", "rank": 0.1},
        {"name": "ssf", "rank": 0.1, "correction": "always", "momentum": 0.5},
        {"name": "ssf", "projector": GAUSSIAN},
        {"name": "subavg", "rank": 0.3},
        {"name": "fedavg"},
        {"name": "scaffold"},
    ],
)
def test_a_rehearsed_round_holds_what_a_real_one_does(
    method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedspan.core.projector.AT_ONCE", 1
    )  # no P of later rounds in the same storage
    spec = spec_of(method)
    spec.task.client_problem(0, (0,), spec)  # caches
    dry = shapes(spec).dry
    assert dry is not None
    assert client_peak(spec.method, dry, 1) == pytest.approx(measured(spec), rel=0.1)


def test_every_method_has_a_peak_above_its_weights() -> None:
    dry = shapes(spec_of({"name": "fedavg"})).dry
    assert dry is not None
    weights = sum(p.nbytes for p in dry.model.parameters())
    for name in registry.choices("method"):
        for own in METHODS[name]:
            method = tables.build("method", by_axis({"name": name, "lr": 0.1} | own))
            assert client_peak(method, dry, 2) > 2 * weights, (name, own)


def test_clients_that_missed_rounds_hold_the_changes_of_all_of_them() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    task = Custom(objects=Material.of(model, [(torch.randn(8, 64), torch.arange(8))] * 3))
    spec = Spec(
        rounds=2,
        method=SSF(rank=0.1, lr=0.1),
        task=task,
        batch_size=8,
        device="cpu",
        projection=Projection(min_numel=64),
    )
    dry = shapes(spec).dry
    assert dry is not None
    often, seldom = (client_peak(spec.method, dry, lag) for lag in (1, 3))
    assert often < seldom <= often + 2 * 4 * spec.method.footprint(dry.layout).trained
    assert plan(spec, ["ssf"])["ssf"].client_peak == often


def test_initial_weights_that_stay_are_counted() -> None:
    peaks = []
    for known_start in (False, True):
        spec = spec_of({"name": "ssf", "rank": 0.1}, participation={"known_start": known_start})
        planned = plan(spec, ["ssf"])
        peaks.append(planned.rows[0].client_peak or 0)
    assert peaks[1] - peaks[0] == 4 * planned.layout.size
