"""Mistakes found in public SCAFFOLD implementations; each would fail here.

Sources: FedML `agg_operator`, Flower `baselines/niid_bench`, NVFlare, pfl-research, PFLlib #160, plato #382,
NIID-Bench #8 and #12.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.layout import Block, Layout
from fedspan.core.round import Round
from fedspan.engine.simulator import Simulator
from support.loops import Scripted, advance, close, model, small, start
from support.methods import GAUSSIAN, build


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1)


def two_of_four() -> Round:
    layout = Layout((Block("w", (1, 1), 1),), torch.float64)
    return Round(
        t=0,
        seeds=(0,),
        clients=4,
        layout=layout,
        ids=np.array([[0, 2]]),
        last_round=np.array([[-1, -1]]),
    )


SCAFFOLD = build("scaffold", lr=0.1, local_steps=2)


def test_all_replies_count_not_only_the_last() -> None:
    """FedML overwrites the aggregate with the last client's: Δc = 10, 30 of N = 4 gave c = 7.5 and x = −6."""
    server = Bundle(x=vector(0), c=vector(0))
    server = SCAFFOLD.server_step(server, Bundle(v=vector(10, 30)), two_of_four())
    assert float(server.x) == -4.0
    assert float(server.c) == 10.0


def test_the_control_moves_by_s_over_n_not_by_one() -> None:
    """NVFlare and others take the mean over responders, without |S|/N."""
    server = Bundle(x=vector(0), c=vector(1))
    server = SCAFFOLD.server_step(server, Bundle(v=vector(4, 4)), two_of_four())
    assert float(server.c) == 1 + 4 * 2 / 4


def test_controls_start_at_zero_whatever_the_model() -> None:
    """Flower's niid_bench starts c_i at the model's parameters; NIID-Bench at random numbers."""
    x0 = torch.randn(1, 1, 24, dtype=torch.float64)
    layout = Layout((Block("w", (2, 12), 1),), torch.float64)
    for name, extra in (("scaffold", {}), ("ssf", {"projector": {"name": "gaussian", "rank": 3}})):
        method = build(name, **extra)
        assert not method.init_client(x0, layout).c.any()
        assert not method.init_server(x0, layout).c.any()


def test_a_control_belongs_to_a_client_not_to_a_place_in_the_cohort() -> None:
    """FedML ties c_i to a slot. Here who did not take part keeps its control."""
    loop = advance(start(build("scaffold"), small()), 10)
    before, ids = loop.transport.clients().c.clone(), loop._round().ids[0]
    advance(loop, 1)
    after = loop.transport.clients().c
    changed = [
        client for client in range(7) if not torch.equal(before[0, client], after[0, client])
    ]
    assert changed == ids.tolist()


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_control_is_the_mean_gradient_for_any_number_of_steps(steps: int) -> None:
    """PFLlib #160 and others forget a factor in K. From zero controls, c_i⁺ is the mean of the K local gradients."""
    problem = small(batch="full")
    method = build("scaffold", local_steps=steps)
    loop = start(method, problem, 7)
    rnd = loop._round()
    f, y, total = problem.cohort(rnd), problem.x0, 0.0
    for _ in range(steps):
        g = f.grad(y)
        y, total = y - method.lr * g, total + g
    advance(loop, 1)
    torch.testing.assert_close(loop.transport.clients().c, total / steps)


def test_the_second_reply_sends_the_change_of_the_control_not_the_control() -> None:
    """plato #382 sent c_i itself; then c is not the mean of c_i from the second round on."""
    loop = advance(start(build("scaffold"), small(), 7), 2)
    torch.testing.assert_close(loop.server.c, loop.transport.clients().c.mean(1, keepdim=True))


def test_the_server_control_is_in_the_checkpoint() -> None:
    """pfl-research does not save it; a resumed run then starts from c = 0."""
    for name, extra in (("scaffold", {}), ("ssf", {"projector": {"name": "gaussian", "rank": 3}})):
        loop = advance(start(build(name, **extra), small()), 5)
        assert torch.equal(loop.save()["server.c"], loop.server.c)
        assert loop.server.c.any()


def test_the_duals_of_fedsub_stay_bounded_at_large_rank() -> None:
    """The rotation P_new P_oldᵀ has norm at most 1; divergence at r = 50 of 100 is not FedSub's own doing."""
    problem = small(
        torch.float32,
        dim=100,
        samples=50,
        clients=20,
        het=2.0,
        target_het=0.0,
        batch=20,
        outputs=10,
    )
    settings = {"lr": 1e-3, "local_steps": 5, "projector": {"name": "gaussian", "rank": 50}}
    calm = advance(start(build("fedsub", **settings), problem, 10), 400)
    assert float(problem.evaluate(model(calm))["rel_err"][0]) < 1
    wild = advance(start(build("fedsub", variant="stale", **settings), problem, 10), 400)
    assert not float(problem.evaluate(model(wild))["rel_err"][0]) < 1


def test_momentum_does_not_multiply_the_duals_of_fedsub() -> None:
    """A dual inside the momentum buffer counts about four times at β = 0.9, K = 10, and grows without end."""
    problem = small(batch="full")
    settings = {"projector": GAUSSIAN, "lr": 0.002, "local_steps": 10, "momentum": 0.9}
    loop = advance(start(build("fedsub", **settings), problem, 7), 600)
    assert float(problem.evaluate(model(loop))["rel_err"][0]) < 0.05


@pytest.mark.parametrize("variant", ["zero_sum", "stale"])
def test_a_round_without_replies_changes_no_dual_of_fedsub(variant: str) -> None:
    """Full batches and one P: a run that loses all replies of two rounds is the shorter run."""
    method, problem = (
        build("fedsub", projector=GAUSSIAN, variant=variant, refresh=100),
        small(batch="full"),
    )
    whole = advance(start(method, problem, 7), 9)
    silent = Scripted(
        Simulator(method, problem), {(t, client) for t in (3, 6) for client in range(7)}
    )
    gaps = advance(start(method, problem, 7, silent), 11)
    close(model(gaps), model(whole))
