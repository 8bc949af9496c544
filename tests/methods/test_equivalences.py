"""Methods that must coincide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedspan.core import tables
from support.equivalence import ROUNDS, relative, unequal
from support.loops import advance, model, small, start
from support.methods import ADAMW, EVERYTHING, GAUSSIAN, build


@pytest.mark.parametrize("clients_per_round", [3, 7])
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_ssf_in_the_whole_space_is_scaffold(clients_per_round: int, server_lr: float) -> None:
    problem = small()
    full = {"name": "gaussian", "rank": 1.0}  # an orthonormal basis of everything, not the identity
    for projector in ({"name": "identity"}, full):
        ssf = start(
            build("ssf", correction="always", projector=projector, server_lr=server_lr),
            problem,
            clients_per_round,
        )
        scaffold = start(build("scaffold", server_lr=server_lr), problem, clients_per_round)
        for _ in range(ROUNDS):
            advance(ssf, 1)
            advance(scaffold, 1)
            assert relative(model(ssf), model(scaffold)) < 1e-12
        assert relative(ssf.transport.clients().c, scaffold.transport.clients().c) < 1e-12


def test_with_everybody_both_control_rules_are_the_papers_box() -> None:
    problem = small()
    exact, paper = (
        start(build("ssf", projector=GAUSSIAN, control=rule), problem, 7)
        for rule in ("exact", "paper")
    )
    advance(exact, ROUNDS)
    advance(paper, ROUNDS)
    assert relative(model(exact), model(paper)) < 1e-12
    assert relative(exact.server.c, paper.server.c) < 1e-12


def test_under_sampling_the_control_rules_differ() -> None:
    problem = small()
    exact, paper = (
        start(build("ssf", projector=GAUSSIAN, control=rule), problem, 3)
        for rule in ("exact", "paper")
    )
    assert relative(model(advance(exact, ROUNDS)), model(advance(paper, ROUNDS))) > 1e-3


def test_one_local_step_with_everybody_is_gradient_descent() -> None:
    problem = small(batch="full")
    loop = start(build("fedavg", local_steps=1, lr=0.05), problem, 7)
    m, d = problem.layout.blocks[0].shape
    hessian, linear = (torch.from_numpy(part) for part in problem.terms[0][:2])
    x = torch.zeros(d, m, dtype=torch.float64)
    for _ in range(ROUNDS):
        advance(loop, 1)
        x = x - 0.05 * (hessian @ x - linear)
        torch.testing.assert_close(model(loop).view(m, d).mT, x)


def test_without_what_sets_them_apart_fedprox_and_fedavgm_are_fedavg() -> None:
    problem = small()
    fedavg = model(advance(start(build("fedavg", server_lr=0.8), problem), ROUNDS))
    for name, key in (("fedprox", "mu"), ("fedavgm", "server_momentum")):
        without, with_it = (
            model(advance(start(build(name, server_lr=0.8, **{key: value}), problem), ROUNDS))
            for value in (0.0, 0.5)
        )
        assert relative(without, fedavg) < 1e-12
        assert relative(with_it, fedavg) > 1e-3


def test_a_strong_pull_keeps_clients_at_the_servers_model() -> None:
    """On y ↦ f(y) + (μ/2) ‖y − x‖² the end point is within ‖∇f(x)‖/μ of x."""
    problem = small(batch="full")
    for mu, steps in ((50.0, 400), (500.0, 400)):
        method = build("fedprox", mu=mu, lr=1e-3, local_steps=steps)
        loop = start(method, problem)
        rnd = loop._round()
        _, up = method.client_step(
            loop.transport.states.take(rnd.rows, rnd.ids.shape),
            method.broadcast(loop.server, rnd),
            problem.cohort(rnd),
            rnd,
        )
        reach = problem.cohort(rnd).full_grad(problem.x0).norm(dim=-1) / mu
        moved = up.v.norm(dim=-1)
        assert (moved <= reach).all()
        assert (moved > 0.5 * reach).all()


def test_a_server_without_memory_scales_each_coordinate() -> None:
    """β_1 = β_2 = 0: FedAdam goes η_g Δ / (|Δ| + τ). With a huge τ the scale is flat: FedAvg at η_g / 2τ."""
    problem = small()
    delta = model(advance(start(build("fedavg"), problem), 1)) - problem.x0
    adam = advance(
        start(build("fedadam", beta1=0.0, beta2=0.0, tau=1e-2, server_lr=0.1), problem), 1
    )
    assert relative(model(adam) - problem.x0, 0.1 * delta / (delta.abs() + 1e-2)) < 1e-12
    flat = advance(start(build("fedadagrad", beta1=0.0, tau=1e8, server_lr=2e8), problem), ROUNDS)
    fedavg = advance(start(build("fedavg", server_lr=1.0), problem), ROUNDS)
    assert relative(model(flat), model(fedavg)) < 1e-12


def test_fedsub_in_the_whole_space_with_everybody_is_scaffold() -> None:
    problem = small()
    fedsub = advance(start(build("fedsub", projector={"name": "identity"}), problem, 7), ROUNDS)
    scaffold = advance(start(build("scaffold"), problem, 7), ROUNDS)
    assert relative(model(fedsub), model(scaffold)) < 1e-12


def test_subavg_in_the_whole_space_is_fedavg() -> None:
    problem = small()
    subavg = advance(start(build("subavg", projector={"name": "identity"}), problem), ROUNDS)
    fedavg = advance(start(build("fedavg"), problem), ROUNDS)
    assert relative(model(subavg), model(fedavg)) < 1e-12


def test_ffalora_of_full_rank_is_fedavg() -> None:
    problem = small()
    lora = advance(start(build("ffalora", rank=1.0, server_lr=0.8), problem), ROUNDS)
    fedavg = advance(start(build("fedavg", server_lr=0.8), problem), ROUNDS)
    assert relative(model(lora), model(fedavg)) < 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_ffalora_is_subavg_with_one_subspace_for_good(momentum: float) -> None:
    problem = small()
    lora = advance(start(build("ffalora", rank=3, lr=0.02, momentum=momentum), problem), ROUNDS)
    subavg = build("subavg", projector=GAUSSIAN, refresh=10**6, lr=0.02, momentum=momentum)
    assert relative(model(lora), model(advance(start(subavg, problem), ROUNDS))) < 1e-12


def test_from_its_start_fedit_takes_the_first_step_of_ffalora() -> None:
    """B = 0, so A has no gradient yet; from the second step on the two differ."""
    problem = small()
    one, two = (start(build(name, rank=3, local_steps=1), problem) for name in ("fedit", "ffalora"))
    assert relative(model(advance(one, 1)), model(advance(two, 1))) < 1e-12
    assert relative(model(advance(one, 1)), model(advance(two, 1))) > 1e-3


def test_fedit_averages_factors_and_ffalora_models() -> None:
    """mean(B_i) mean(A_i) is not mean(B_i A_i), unless all A_i are the same."""
    problem = small(batch="full")
    off = {}
    for name in ("fedit", "ffalora"):
        method = build(name, rank=3, lr=0.02, local_steps=5)
        loop = advance(start(method, problem), 5)
        rnd, server = loop._round(), loop.server
        down = method.broadcast(server, rnd)
        _, up = method.client_step(
            loop.transport.states.take(rnd.rows, rnd.ids.shape), down, problem.cohort(rnd), rnd
        )
        models = method.merged(server.base, server.u + up.du, rnd)
        off[name] = relative(method.server_step(server, up, rnd).x, models.mean(1, keepdim=True))
    assert off["ffalora"] < 1e-12
    assert off["fedit"] > 1e-4


@pytest.mark.parametrize("clients_per_round", [3, 7])
@pytest.mark.parametrize("name", ["compressed", "ef", "doublesqueeze"])
def test_without_compression_they_are_fedavg(name: str, clients_per_round: int) -> None:
    problem = small()
    for settings in ({"server_lr": 0.6}, {"momentum": 0.5, "schedule": "linear"}):
        plain = advance(start(build("fedavg", **settings), problem, clients_per_round), ROUNDS)
        coded = advance(
            start(build(name, compressor=EVERYTHING, **settings), problem, clients_per_round),
            ROUNDS,
        )
        assert relative(model(coded), model(plain)) < 1e-12


@pytest.mark.parametrize("clients_per_round", [3, 7])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("scallion", {}), ("scallion", {"alpha": 1.0}), ("scafcom", {"beta": 1.0})],
)
def test_without_compression_they_are_scaffold(
    name: str, settings: dict[str, Any], clients_per_round: int, tmp_path: Any
) -> None:
    problem = small(weights="examples", **unequal(tmp_path))
    shared = {"server_lr": 0.6, "schedule": "cosine"}
    coded = start(
        build(name, compressor=EVERYTHING, **settings, **shared), problem, clients_per_round
    )
    scaffold = start(build("scaffold", **shared), problem, clients_per_round)
    for _ in range(ROUNDS):
        advance(coded, 1)
        advance(scaffold, 1)
        assert relative(model(coded), model(scaffold)) < 1e-12
    assert relative(coded.transport.clients().c, scaffold.transport.clients().c) < 1e-12
    assert relative(coded.server.c, scaffold.server.c) < 1e-12


def test_ef21_without_compression_steps_along_everybodys_last_gradient() -> None:
    """x ← x − η_g η K mean_i h_i, with h_i the mean gradient of client i's last round, zero before its first."""
    problem = small()
    loop = start(build("ef21", compressor=EVERYTHING, server_lr=0.8), problem)
    x, last = problem.x0.clone(), torch.zeros(1, 7, 24, dtype=torch.float64)
    for _ in range(ROUNDS):
        rnd = loop._round()
        f, y = problem.cohort(rnd), x
        for _ in range(3):
            y = y - 0.02 * f.grad(y)
        last[:, rnd.ids[0]] = (x - y) / (0.02 * 3)
        x = x - 0.8 * 0.02 * 3 * last.mean(1, keepdim=True)
        advance(loop, 1)
        assert relative(model(loop), x) < 1e-12
        assert relative(loop.server.h, last.mean(1, keepdim=True)) < 1e-12


@pytest.mark.parametrize("settings", [{"momentum": 0.5}, {"optimizer": ADAMW}])
def test_ef21_estimates_the_mean_step_of_any_optimizer(settings: dict[str, Any]) -> None:
    """One compressed vector per reply; with everybody and without compression it is FedAvg."""
    problem = small()
    ef21, fedavg = build("ef21", compressor=EVERYTHING, **settings), build("fedavg", **settings)
    one, other = (advance(start(method, problem, 7), ROUNDS) for method in (ef21, fedavg))
    assert relative(model(one), model(other)) < 1e-12
    assert (one.ledger.up == other.ledger.up).all()


def test_qsparse_is_error_feedback_with_another_compressor() -> None:
    problem, qsparse = small(), build("qsparse")
    ef = build("ef", compressor=tables.describe(qsparse.uplink.compressor))
    assert torch.equal(
        model(advance(start(ef, problem), 9)), model(advance(start(qsparse, problem), 9))
    )
    assert qsparse.uplink.compressor.delta(24) > 0


def test_with_momentum_ssf_in_the_whole_space_is_scaffold() -> None:
    problem = small()
    ssf = start(
        build("ssf", correction="always", projector={"name": "identity"}, momentum=0.6), problem
    )
    scaffold = start(build("scaffold", momentum=0.6), problem)
    advance(ssf, ROUNDS)
    advance(scaffold, ROUNDS)
    assert relative(model(ssf), model(scaffold)) < 1e-12
    assert relative(ssf.transport.clients().c.mean(1, keepdim=True), ssf.server.c) < 1e-12


def test_momentum_sends_the_end_point_too_and_goes_faster() -> None:
    problem = small(batch="full")
    plain, heavy = (
        start(build("ssf", correction="always", projector=GAUSSIAN, momentum=beta), problem)
        for beta in (0.0, 0.5)
    )
    advance(plain, 60)
    advance(heavy, 60)
    assert heavy.ledger.up.sum() == 2 * plain.ledger.up.sum()
    error = [float(problem.evaluate(model(loop))["rel_err"][0]) for loop in (plain, heavy)]
    assert error[1] < error[0]
