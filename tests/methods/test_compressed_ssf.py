"""SSF with a compressed uplink: sums that stay right, what is left out and comes later, and momentum against noise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedspan.core.errors import SpecError
from fedspan.core.objective import Objective
from fedspan.core.round import Round
from fedspan.uplinks import RunningMean
from support.equivalence import ROUNDS, relative
from support.loops import advance, model, small, start
from support.methods import EVERYTHING, GAUSSIAN, build

COMPRESSORS: list[dict[str, Any]] = [
    {"name": "qsgd", "levels": 127},
    {"name": "topk", "k": 0.3},
    {
        "name": "compose",
        "outer": {"name": "qsgd", "levels": 7},
        "inner": {"name": "topk", "k": 0.5},
    },
]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=lambda one: str(one["name"]))
def test_compressed_ssf_keeps_its_sums(compressor: dict[str, Any]) -> None:
    """Both ends go by what arrived: c = mean c_i in every round, and what is outside the subspace stays."""
    loop = start(build("ssf", projector=GAUSSIAN, compressor=compressor), small())
    for _ in range(ROUNDS):
        advance(loop, 1)
        controls = loop.transport.clients().c
        torch.testing.assert_close(
            loop.server.c, controls.mean(1, keepdim=True), rtol=1e-12, atol=1e-13
        )
    assert float(controls.norm()) > 0.1


def test_ssf_with_a_compressor_that_keeps_all_is_ssf() -> None:
    plain = start(build("ssf", projector=GAUSSIAN), small())
    same = start(build("ssf", projector=GAUSSIAN, compressor=EVERYTHING), small())
    assert relative(model(advance(same, ROUNDS)), model(advance(plain, ROUNDS))) < 1e-12
    assert (plain.ledger.up == same.ledger.up).all()


class Slope(Objective):
    """f(y) = <g, y>: the same gradient everywhere, so that nothing but the messages changes from round to round."""

    def __init__(self, g: torch.Tensor) -> None:
        self.g = g

    def grad(self, y: torch.Tensor) -> torch.Tensor:
        return self.g.expand_as(y)

    full_grad = grad


def test_what_a_compressor_left_out_is_in_the_next_message() -> None:
    """c_i is the memory of the error feedback: the next a is a less what was sent, and all is sent in the end."""
    problem = small()
    method = build("ssf", projector={"name": "identity"}, compressor={"name": "topk", "k": 5})
    f = Slope(
        torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    state, server = (
        method.init_client(problem.x0, problem.layout),
        method.init_server(problem.x0, problem.layout),
    )
    left = f.g
    for t in range(5):  # 5 · 5 ≥ 24
        rnd = Round(t, (5,), 7, problem.layout, np.array([[2]]), np.array([[-1]]), local_steps=3)
        state, up = method.client_step(
            state, method.broadcast(server, rnd).replace(Pc=torch.zeros_like(left)), f, rnd
        )
        sent = method.arrived(up, method.subspace(rnd), rnd)
        torch.testing.assert_close(sent, torch.where(sent == 0, 0, left), rtol=1e-10, atol=1e-12)
        left = left - sent
        torch.testing.assert_close(f.g - state.c, left, rtol=1e-10, atol=1e-12)
    assert float(left.norm()) < 1e-10


def test_rank_and_bits_multiply() -> None:
    """A tenth of the directions at eight bits: a fortieth of FedAvg's uplink, and one scale."""
    problem = small(torch.float32, dim=200, outputs=5)
    small_up = {"name": "qsgd", "levels": 127}
    ssf = advance(
        start(build("ssf", correction="always", rank=0.1, compressor=small_up), problem), 4
    ).ledger.up.sum()
    fedavg = advance(start(build("fedavg"), problem), 4).ledger.up.sum()
    assert ssf == fedavg / 40 + 4 * 3 * 4
    with pytest.raises(SpecError, match="`uplink` 'randk' is not contractive for 100 values"):
        start(build("ssf", rank=0.1, compressor={"name": "randk", "k": 0.1}), problem)


@pytest.mark.parametrize("clients_per_round", [3, 7])
@pytest.mark.parametrize(
    "compressor", [*COMPRESSORS, {"name": "sign"}], ids=lambda one: str(one["name"])
)
def test_with_momentum_in_the_whole_space_it_is_scafcom(
    compressor: dict[str, Any], clients_per_round: int
) -> None:
    """The same codes of the same running means: model, controls, and what is yet to be sent."""
    shared = {"compressor": compressor, "beta": 0.3, "server_lr": 0.6}
    ssf = start(
        build("ssf", correction="always", projector={"name": "identity"}, **shared),
        small(),
        clients_per_round,
    )
    scafcom = start(build("scafcom", **shared), small(), clients_per_round)
    for _ in range(ROUNDS):
        advance(ssf, 1)
        advance(scafcom, 1)
        assert relative(model(ssf), model(scafcom)) < 1e-12
    ours, theirs = ssf.transport.clients(), scafcom.transport.clients()
    assert relative(ours.c, theirs.c) < 1e-12
    assert relative(ours.u, theirs.u) < 1e-12
    assert float(ours.u.norm()) > 1e-3


def test_momentum_stays_inside_the_subspace_of_its_round() -> None:
    """Outside of it u_i stays, as c_i does; inside, v_i = c_i + u_i is the running mean, whatever was sent."""
    problem = small()
    method = build("ssf", projector=GAUSSIAN, compressor={"name": "topk", "k": 0.3}, beta=0.25)
    f = Slope(
        torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    state, server = (
        method.init_client(problem.x0, problem.layout),
        method.init_server(problem.x0, problem.layout),
    )
    for t in range(4):
        rnd = Round(t, (5,), 7, problem.layout, np.array([[2]]), np.array([[-1]]), local_steps=3)
        P, before = method.subspace(rnd), state.c + state.u
        state, up = method.client_step(state, method.broadcast(server, rnd), f, rnd)
        after = state.c + state.u
        torch.testing.assert_close(
            P @ after, 0.75 * (P @ before) + 0.25 * (P @ f.g), rtol=1e-10, atol=1e-12
        )
        torch.testing.assert_close(
            after - P.T @ (P @ after), before - P.T @ (P @ before), rtol=1e-10, atol=1e-12
        )
        assert int((method.arrived(up, P, rnd) != 0).sum()) < P.rank


def test_momentum_keeps_the_sums_and_forgets_the_noise() -> None:
    """c = mean c_i as without it; and with one bit a number it ends nearer to the optimum, where a_i is noise."""
    ends = {}
    for beta in (1.0, 0.2):
        loop = start(
            build(
                "ssf",
                projector=GAUSSIAN,
                compressor={"name": "sign"},
                beta=beta,
                lr=0.01,
                correction="always",
            ),
            small(),
        )
        errors = []
        for _ in range(40):
            advance(loop, 20)
            errors.append(float(loop.problem.evaluate(model(loop))["rel_err"][0]))
        controls = loop.transport.clients().c
        torch.testing.assert_close(
            loop.server.c, controls.mean(1, keepdim=True), rtol=1e-10, atol=1e-12
        )
        ends[beta] = np.mean(errors[-20:])
    assert ends[0.2] < 0.9 * ends[1.0]


@pytest.mark.parametrize("clients_per_round", [3, 7])
def test_running_means_without_a_compressor(clients_per_round: int) -> None:
    """In the whole space SCALLION; in a subspace the same as with a compressor that leaves nothing out."""
    whole, everything = {"projector": {"name": "identity"}}, {"compressor": EVERYTHING}
    shared = {"server_lr": 0.6, "correction": "always"}
    pairs = [
        (
            build("ssf", beta=0.4, **whole, **shared),
            build("scallion", alpha=0.4, server_lr=0.6, **everything),
        ),
        (
            build("ssf", beta=0.4, projector=GAUSSIAN),
            build("ssf", beta=0.4, projector=GAUSSIAN, **everything),
        ),
    ]
    for ours, theirs in pairs:
        one, other = (advance(start(m, small(), clients_per_round), ROUNDS) for m in (ours, theirs))
        assert relative(model(one), model(other)) < 1e-12
        assert relative(one.transport.clients().c, other.transport.clients().c) < 1e-12
        assert one.transport.clients().get("u") is None
        torch.testing.assert_close(
            one.server.c, one.transport.clients().c.mean(1, keepdim=True), rtol=1e-9, atol=1e-11
        )


def test_beta_is_a_share_and_needs_controls() -> None:
    for beta in (0.0, 1.5):
        with pytest.raises(SpecError, match="`beta` must be above 0 and at most 1"):
            RunningMean(beta=beta)
    with pytest.raises(
        SpecError, match="`uplink` 'running_mean' is a running mean of what controls"
    ):
        start(build("subavg", projector=GAUSSIAN, beta=0.5), small())
