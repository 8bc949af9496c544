"""What a method declares: its parts, and what others must know of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.errors import SpecError
from fedspan.core.layout import Layout, Vector
from fedspan.core.method import is_plain_sum
from fedspan.core.objective import Objective
from fedspan.core.round import Round
from fedspan.methods import FedAvg
from fedspan.methods.base import LocalSteps
from fedspan.remote.server import RemoteTransport
from support.loops import small
from support.methods import build


@dataclass(frozen=True, kw_only=True)
class Forgetful(LocalSteps):
    """Keeps a state and does not say what a reply does to it."""

    def init_server(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(x=x0)

    def init_client(self, x0: Vector, layout: Layout) -> Bundle:
        return Bundle(n=x0.new_zeros(*x0.shape[:-1], 1))

    def broadcast(self, server: Bundle, rnd: Round) -> Bundle:
        return Bundle(x=server.x)

    def client_step(
        self, client: Bundle, down: Bundle, f: Objective, rnd: Round
    ) -> tuple[Bundle, Bundle]:
        return Bundle(n=client.n + 1), Bundle(v=down.x)

    def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
        return Bundle(x=rnd.mean(up.v))


def test_a_state_without_its_rule_is_refused_on_a_network() -> None:
    problem, method = small(), Forgetful(lr=0.1)
    with pytest.raises(
        SpecError, match=r"clients of Forgetful keep n, .* define update_client_state"
    ):
        RemoteTransport(method, problem.layout, problem.x0, problem.clients, None, None)  # type: ignore[arg-type]


def test_what_others_must_know_of_a_method() -> None:
    logs = {
        name: build(name).logs_changes
        for name in ("fedavg", "scaffold", "ssf", "doublesqueeze", "fedit")
    }
    expected = {"fedavg": False, "scaffold": False, "ssf": True, "doublesqueeze": True}
    assert logs == expected | {"fedit": False}
    assert build("fedavg").private == ()
    assert build("ef").private == ("e",)
    assert build("ssf", momentum=0.5, moments="project").private == ("moments",)


def test_a_class_with_another_server_step_says_again_that_it_needs_the_mean_only() -> None:
    class Median(FedAvg):
        """Looks at each reply."""

        def server_step(self, server: Bundle, up: Bundle, rnd: Round) -> Bundle:
            return server.replace(x=server.x - up.v.median(1, keepdim=True).values)

    assert is_plain_sum(FedAvg())
    assert not is_plain_sum(Median())


def test_a_round_of_some_clients() -> None:
    ids, weights = np.array([[4, 1, 2]]), torch.tensor([0.5, 0.25, 0.25]).view(1, 3, 1)
    rnd = Round(3, (0,), 5, small().layout, ids, ids - 2, weights)
    some = rnd.subset(np.array([0, 2]))
    assert some.ids.tolist() == [[4, 2]]
    assert some.last_round.tolist() == [[2, 0]]
    assert float(some.share) == 0.75
    assert float(some.mean(torch.tensor([3.0, 6.0]).view(1, 2, 1))) == 4.0
