"""What holds after every round: sums of controls and duals, what lies outside the subspace; and what settings mean."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedspan.core import tables
from fedspan.core.errors import SpecError
from fedspan.methods import SSF
from fedspan.projectors import Coordinate, Hadamard
from support.equivalence import ROUNDS, relative, unequal
from support.loops import advance, model, small, start
from support.methods import GAUSSIAN, build


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "ef",
            {"compressor": {"name": "randk", "k": 0.3}},
            "`uplink` 'randk' is not contractive for 24 values",
        ),
        (
            "ef21",
            {"compressor": {"name": "qsgd", "levels": 1}},
            "`uplink` 'qsgd' is not contractive for 24 values",
        ),
        ("doublesqueeze", {"compressor": {"name": "randk", "k": 0.3}}, "unbiased = false"),
        ("scafcom", {"compressor": {"name": "randk", "k": 0.3}}, "contractive"),
        (
            "scallion",
            {"compressor": {"name": "topk", "k": 0.3}},
            "'topk' is biased",
        ),
        (
            "scallion",
            {"compressor": {"name": "randk", "k": 0.3, "unbiased": False}},
            "unbiased = true",
        ),
        (
            "compressed",
            {"compressor": {"name": "topk", "k": 25}},
            "`k` 25 is larger than the 24 numbers",
        ),
    ],
)
def test_a_compressor_that_the_method_cannot_use_is_refused(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        start(build(name, **settings), small())


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("scallion", {"alpha": 0.0}, "`method.uplink.alpha` must be above 0"),
        ("scallion", {"alpha": 1.5}, "`method.uplink.alpha` must be above 0"),
        ("scafcom", {"beta": 0.0}, "`method.uplink.beta` must be above 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(
    name: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        build(name, **settings)


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize(
    ("name", "message"),
    [("scaffold", "c"), ("ssf", "c"), ("scallion", "c"), ("scafcom", "c"), ("ef21", "h")],
)
def test_the_server_control_is_the_mean_of_all_client_controls(
    name: str, message: str, weights: str, tmp_path: Any
) -> None:
    """c = Σ w_i c_i over ALL clients, in every round, under sampling; h of EF21 likewise."""
    problem = small(weights=weights, **unequal(tmp_path))
    extra = {"projector": GAUSSIAN} if name == "ssf" else {}
    loop = start(build(name, **extra), problem)
    w = (
        torch.full((7,), 1 / 7, dtype=torch.float64)
        if problem.weights is None
        else torch.from_numpy(problem.weights)
    )
    for _ in range(ROUNDS):
        advance(loop, 1)
        mean = (getattr(loop.transport.clients(), message) * w[None, :, None]).sum(1, keepdim=True)
        assert relative(mean, getattr(loop.server, message)) < 1e-12


def test_the_papers_control_rule_breaks_the_mean() -> None:
    loop = advance(start(build("ssf", projector=GAUSSIAN, control="paper"), small()), ROUNDS)
    assert relative(loop.transport.clients().c.mean(1, keepdim=True), loop.server.c) > 1e-2


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_the_duals_of_fedsub_sum_to_zero(weights: str, tmp_path: Any) -> None:
    """With everybody in every round, each dual is one round behind; after line 5 they sum to zero."""
    problem = small(weights=weights, **unequal(tmp_path))
    loop = advance(start(build("fedsub", projector=GAUSSIAN, refresh=100), problem, 7), ROUNDS)
    state, last = loop.transport.clients(), loop.server.log.entries[-1]
    w = (
        torch.full((7,), 1 / 7, dtype=torch.float64)
        if problem.weights is None
        else torch.from_numpy(problem.weights)
    )
    duals = state.dual - last
    assert (duals * w[None, :, None]).sum(1).norm() < 1e-12 * duals.norm()


def test_a_round_leaves_what_is_outside_its_subspace_alone() -> None:
    problem = small()
    method = build("ssf", projector=GAUSSIAN)
    loop = advance(start(method, problem), 10)
    rnd = loop._round()
    P = method.subspace(rnd)
    before, x, c = loop.transport.clients().c.clone(), model(loop), loop.server.c
    advance(loop, 1)
    for old, new in [(before, loop.transport.clients().c), (x, model(loop)), (c, loop.server.c)]:
        change = new - old
        assert (change - P.T @ (P @ change)).norm() < 1e-12 * old.norm()
        assert change.norm() > 0


def test_weights_by_examples_reach_the_optimum_of_the_weighted_loss(tmp_path: Any) -> None:
    """Σ w_i f_i and mean f_i have different optima; each setting goes to its own."""
    data = unequal(tmp_path)
    for weights in ("uniform", "examples"):
        problem = small(weights=weights, batch="full", **data)
        loop = advance(start(build("ssf", projector=GAUSSIAN, lr=0.05), problem), 3000)
        assert float(problem.evaluate(model(loop))["rel_err"][0]) < 1e-9


def test_rank_is_that_of_the_projector() -> None:
    assert build("ssf", rank=0.2) == build("ssf", projector={"name": "coordinate", "rank": 0.2})
    assert build("ssf", rank=0.2, projector=GAUSSIAN) == build(
        "ssf", projector=GAUSSIAN | {"rank": 0.2}
    )
    assert build("ssf", rank=0.2, projector="hadamard").space == Hadamard(rank=0.2)
    assert replace(build("ssf"), rank=4).space == Coordinate(rank=4)
    assert SSF().space == Coordinate(rank=0.1)


def test_a_rate_that_is_yet_to_be_found_is_named() -> None:
    assert SSF().lr == "search"
    assert tables.build("method", tables.describe(SSF(lr="auto"))) == SSF(lr="auto")
    with pytest.raises(SpecError, match="`lr` is still 'search'"):
        SSF().rate(start(build("fedavg"), small())._round())
    with pytest.raises(SpecError, match="`lr` must be a number or 'search' or 'auto', got 'fast'"):
        SSF(lr="fast")  # type: ignore[arg-type]


def rates(rounds: int, **settings: Any) -> list[float]:
    """lr of the rounds of a run, and of two after it."""
    method, rnd = build("fedavg", lr=0.4, **settings), start(build("fedavg"), small())._round()
    return [method.rate(replace(rnd, t=t, rounds=rounds)) for t in range(rounds + 2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("rounds", [10, 20])
def test_a_schedule_spans_the_run(schedule: str, rounds: int) -> None:
    found = rates(rounds, schedule=schedule)
    assert found[0] == 0.4
    assert found[rounds // 2] == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(found))
    assert found[rounds - 1] > 0.4e-3
    assert found[rounds] == pytest.approx(0.4e-3)


def test_impossible_schedules_are_refused() -> None:
    for bad in ({"warmup": -1}, {"schedule": "exponential"}):
        with pytest.raises(SpecError, match=next(iter(bad))):
            build("fedavg", **bad)


def test_a_warmup_rises_to_lr_and_the_schedule_spans_the_rest() -> None:
    assert rates(6, warmup=3) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4, 0.4])
    assert rates(6, warmup=2, schedule="linear")[:6] == pytest.approx(
        [0.4 / 3, 0.8 / 3, 0.4, 0.3, 0.2, 0.1]
    )


def test_a_schedule_without_the_length_of_the_run_is_refused() -> None:
    rnd = replace(start(build("fedavg"), small())._round(), rounds=None)
    with pytest.raises(SpecError, match="`schedule` 'cosine' needs the length of the run"):
        build("fedavg", schedule="cosine").rate(rnd)  # type: ignore[attr-defined]
