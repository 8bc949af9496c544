"""What a method declares: its four types, and its capabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from conftest import build, small
from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import LogsChanges, Restorable, private_fields, restorable
from fedspan.core.objective import Objective
from fedspan.core.round import Round
from fedspan.methods.base import FullModel, LocalSteps
from fedspan.remote.server import RemoteTransport


@dataclass(frozen=True, eq=False)
class Count:
    n: Vector


@dataclass(frozen=True, kw_only=True)
class Forgetful(LocalSteps[FullModel, Count, FullModel, FullModel]):
    """Keeps a state and does not say what a reply does to it."""

    def init_server(self, x0: Vector, layout: Layout) -> FullModel:
        return FullModel(x0)

    def init_client(self, x0: Vector, layout: Layout) -> Count:
        return Count(x0.new_zeros(*x0.shape[:-1], 1))

    def broadcast(self, server: FullModel, rnd: Round) -> FullModel:
        return server

    def client_step(
        self, client: Count, down: FullModel, f: Objective, rnd: Round
    ) -> tuple[Count, FullModel]:
        return Count(client.n + 1), FullModel(down.x)

    def server_step(self, server: FullModel, up: FullModel, rnd: Round) -> FullModel:
        return FullModel(rnd.mean(up.x))


def test_a_state_without_its_rule_is_refused_on_a_network() -> None:
    problem, method = small(), Forgetful(lr=0.1)
    assert method.types() == (FullModel, Count, FullModel, FullModel)
    with pytest.raises(
        SpecError,
        match=r"clients of Forgetful keep n, .* derive the class from fedspan\.Restorable",
    ):
        RemoteTransport(method, problem.layout, problem.x0, problem.clients, None, None)  # type: ignore[arg-type]


def test_capabilities_are_seen_by_their_type() -> None:
    has = {
        name: {kind.__name__ for kind in (Restorable, LogsChanges) if isinstance(build(name), kind)}
        for name in ("fedavg", "scaffold", "ssf", "doublesqueeze", "fedit")
    }
    assert has == {
        "fedavg": set(),
        "scaffold": {"Restorable"},
        "ssf": {"Restorable", "LogsChanges"},
        "doublesqueeze": {"Restorable", "LogsChanges"},
        "fedit": set(),
    }
    assert restorable(build("fedavg")) is None
    assert private_fields(build("fedavg")) == ()
    assert private_fields(build("ef")) == ("e",)


def test_a_round_of_some_clients() -> None:
    ids, weights = np.array([[4, 1, 2]]), torch.tensor([0.5, 0.25, 0.25]).view(1, 3, 1)
    rnd = Round(3, (0,), 5, small().layout, ids, ids - 2, weights)
    some = rnd.subset(np.array([0, 2]))
    assert some.ids.tolist() == [[4, 2]]
    assert some.last_round.tolist() == [[2, 0]]
    assert float(some.share) == 0.75
    assert float(some.mean(torch.tensor([3.0, 6.0]).view(1, 2, 1))) == 4.0
