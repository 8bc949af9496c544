"""Ways of working through a cohort: in place, one by one, batched, on processes. They agree, and one is chosen."""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fedspan
from conftest import METHODS, build, takes
from fedspan.core.config import Engine, Settings, Simulate, Training
from fedspan.core.objective import InPlaceDirection
from fedspan.engine import simulator, ways
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.engine.ways import Way
from fedspan.methods import SSF
from fedspan.nn import objective
from fedspan.nn.client_data import as_client_data
from fedspan.nn.models import build as network
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules

NAMES = list(METHODS)
PROJECTORS = ("coordinate", "gaussian", "hadamard")
LOOP, BATCHED, POOL = Way("loop"), Way("batched"), Way("pool")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 4))


def problem_of(model: nn.Module, shape: tuple[int, ...] = (1, 8, 8), **settings: Any) -> TorchProblem:
    torch.manual_seed(1)
    clients = [(torch.randn(30, *shape), torch.randint(0, 4, (30,))) for _ in range(6)]
    sources = [as_client_data(data, f"client {i}") for i, data in enumerate(clients)]
    loss = settings.pop("loss", lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    rules = projection_rules(model, min_numel=64)
    return TorchProblem(model, sources, loss, rules, Settings(batch_size=8, training=Training(**settings)))


def method_of(name: str, projector: str = "coordinate", **settings: Any) -> Any:
    extra = {"projector": {"name": projector, "rank": 0.25}} if takes(name, "projector") else {}
    return build(name, lr=0.1, local_steps=3, **extra, **settings)


def model_after(problem: TorchProblem, method: Any, way: Simulate = "loop", rounds: int = 4) -> torch.Tensor:
    with Simulator(method, problem, Engine(simulate=way)) as clients:
        loop = Loop(method, problem, clients, (0,), 4)
        with torch.inference_mode():
            for _ in range(rounds):
                loop.step()
    return loop.method.model(loop.server).clone()


@pytest.mark.parametrize("make", [mlp, lambda: network("resnet8", (1, 8, 8), 4)], ids=["mlp", "resnet"])
@pytest.mark.parametrize(
    ("name", "projector"),
    [(name, kind) for name in NAMES for kind in PROJECTORS if kind == "coordinate" or takes(name, "projector")],
)
def test_steps_in_place_are_the_steps_one_by_one(
    name: str, projector: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a bit differs, with and without clipping and weight decay."""
    method, found = method_of(name, projector), [problem_of(make()).x0]
    for training in ({}, {"clip": 0.05}, {"clip": 0.05, "weight_decay": 0.1}) if make is mlp else ({},):
        fast = model_after(problem_of(make(), **training), method)
        with monkeypatch.context() as patched:
            patched.setattr(objective, "InPlaceGradient", objective.GradientDirection)
            slow = model_after(problem_of(make(), **training), method)
        assert torch.equal(fast, slow)
        assert not any(torch.equal(fast, other) for other in found)
        found.append(fast)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "ssf", "fedsub"])
@pytest.mark.parametrize(
    "optimizer",
    [{}, {"momentum": 0.5}, {"optimizer": {"name": "adamw", "eps": 1e-3}}],
    ids=["sgd", "momentum", "adamw"],
)
@pytest.mark.parametrize("training", [{"clip": 0.05}, {"clip": 0.05, "weight_decay": 0.1}], ids=["clip", "and decay"])
def test_clip_and_weight_decay_mean_the_same_in_every_way(name: str, optimizer: Any, training: Any) -> None:
    """What is clipped is the gradient that a step uses, P ∇f inside a subspace, before decay and controls."""
    if optimizer and name == "fedsub":
        pytest.skip("plain steps only")
    method = method_of(name, "gaussian", **optimizer)
    loop, batched, pool = (
        model_after(problem_of(mlp(), **training), method, way) for way in ("loop", "batched", "pool")
    )
    assert torch.equal(loop, pool)
    assert torch.allclose(loop, batched, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(loop, model_after(problem_of(mlp()), method), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("batched", [False, True])
def test_the_clipped_gradient_is_the_projected_one(batched: bool) -> None:
    """Its norm is `clip`, its direction that of P ∇f; a full gradient is not clipped."""
    method, clip = method_of("ssf", "gaussian"), 0.01
    free, bound = problem_of(mlp()), problem_of(mlp(), clip=clip)
    rnd = Loop(method, free, Simulator(method, free), (0,), 2)._round()
    rnd = rnd if batched else rnd.subset(np.array([0]))
    P, z = method.subspace(rnd), torch.zeros(1, 1, method.subspace(rnd).rank)
    g, clipped = (problem.cohort(rnd).restrict(problem.x0, P)(z) for problem in (free, bound))
    assert torch.allclose(clipped.norm(dim=-1), torch.tensor(clip))
    assert torch.allclose(clipped, clip * g / g.norm(dim=-1, keepdim=True), rtol=1e-4)
    assert torch.equal(*(problem.cohort(rnd).full_grad(problem.x0) for problem in (free, bound)))


def test_dropout_is_worked_through_client_by_client() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Dropout(0.5), nn.Linear(24, 4))
    with pytest.warns(UserWarning, match="using 'loop'"):
        found = model_after(problem_of(copy.deepcopy(model)), method_of("ssf"), "batched")
    assert torch.equal(found, model_after(problem_of(model), method_of("ssf")))


def test_a_pull_that_depends_on_the_point_is_taken_in_place_too() -> None:
    problem = problem_of(mlp())
    loop = Loop(method_of("fedprox"), problem, Simulator(method_of("fedprox"), problem), (0,), 1)
    direction = problem.cohort(loop._round()).direction(plus=lambda y: y - problem.x0)
    assert isinstance(direction, InPlaceDirection)
    far, near = (model_after(problem_of(mlp()), method_of("fedprox", mu=mu)) - problem.x0 for mu in (0.0, 8.0))
    assert near.norm() < 0.7 * far.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_all_ways_agree(name: str, momentum: float) -> None:
    if momentum and name in ("scallion", "scafcom"):
        pytest.skip("no momentum")
    method = method_of(name, momentum=momentum)
    loop, batched, pool = (model_after(problem_of(mlp()), method, way) for way in ("loop", "batched", "pool"))
    assert torch.equal(loop, pool)
    assert torch.allclose(loop, batched, rtol=1e-4, atol=1e-6)
    assert not torch.equal(loop, problem_of(mlp()).x0)


def test_running_statistics_come_back_from_processes() -> None:
    method = method_of("ssf")
    found = []
    for way in ("loop", "pool"):
        problem = problem_of(network("resnet8", (1, 8, 8), 4, "batch"))
        with Simulator(method, problem, Engine(simulate=way)) as clients:  # type: ignore[arg-type]
            loop = Loop(method, problem, clients, (0,), 4)
            with torch.inference_mode():
                loop.step()
        assert loop.buffers is not None
        found.append(loop.buffers)
    assert torch.equal(*found)
    assert problem.buffers0 is not None
    assert not torch.equal(found[0], problem.buffers0)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({LOOP: 1.0, BATCHED: 0.5, POOL: 0.6}, BATCHED),
        ({LOOP: 1.0, BATCHED: 0.9, POOL: 0.6}, POOL),
        ({LOOP: 1.0, BATCHED: 0.95, POOL: 2.0}, LOOP),  # not worth other digits
        ({LOOP: 1.0, BATCHED: None, POOL: None}, LOOP),
        ({LOOP: 1.0, Way("loop", 1): 0.6, BATCHED: 0.7}, Way("loop", 1)),  # small networks lose on more threads
        ({LOOP: 1.0, BATCHED: 0.7, Way("batched", 1): 0.5}, Way("batched", 1)),
    ],
)
def test_the_fastest_way_is_taken(times: dict[Way, float | None], chosen: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_seconds", lambda run: times.get(run.args[0], 9.0))
    monkeypatch.setattr(simulator, "LONG_RUN", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    method, problem = method_of("scaffold"), problem_of(mlp())
    with Simulator(method, problem, Engine(simulate="auto"), rounds=100) as clients:
        loop = Loop(method, problem, clients, (0,), 4)
        with torch.inference_mode():
            loop.step()
        assert clients.way == chosen
        again = Simulator(method, problem, Engine(simulate="auto"))
        again.load(clients.save())
        assert again.way == chosen  # a resumed run goes on in the same way


def test_one_thread_is_for_the_work_of_a_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1] if used else 2)
    method, problem = method_of("fedavg"), problem_of(mlp())
    with Simulator(method, problem) as clients, torch.inference_mode():
        loop = Loop(method, problem, clients, (0,), 4)
        loop.step()
        assert used == []
        clients.way = Way("batched", 1)
        loop.step()
    assert used == [1, 2]


def test_a_short_run_is_not_spent_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "_seconds", lambda run: pytest.fail("timed"))
    assert model_after(problem_of(mlp()), method_of("fedavg"), "auto").isfinite().all()


@pytest.mark.parametrize(
    ("rounds", "long_run", "large", "timed"),
    [
        (8, 0.0, 1 << 22, True),  # loop and batched: eight rounds are enough for two ways
        (7, 0.0, 1 << 22, False),
        (8, 1e9, 1 << 22, False),  # seconds
        (8, 0.0, 1, False),  # the states of a large cohort exist once
    ],
)
def test_what_is_worth_timing(
    rounds: int, long_run: float, large: int, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "_seconds", lambda run: 1.0)
    monkeypatch.setattr(simulator, "LONG_RUN", long_run)
    monkeypatch.setattr(simulator, "LARGE", large)
    method, problem = method_of("fedavg"), problem_of(mlp())
    with Simulator(method, problem, Engine(simulate="auto", workers=1), rounds=rounds) as clients:
        clients._choose(Loop(method, problem, clients, (0,), 4)._round(), None, None, 1.0)
        assert bool(clients.times) == timed
        assert clients.way == LOOP


def test_ways_take_turns_and_the_least_time_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(ways.time, "perf_counter", lambda: float(next(clock)))
    took = {LOOP: iter([3.0, 1.0, 2.0, 2.0]), BATCHED: iter([2.0, 2.0, 2.0, 2.0]), POOL: iter([None])}
    monkeypatch.setattr(ways, "_seconds", lambda run: next(took[run]))
    runs = {way: way for way in took}
    assert ways.timed(runs, budget=1e9) == {LOOP: 1.0, BATCHED: 2.0}  # type: ignore[arg-type]
    took = {LOOP: iter([3.0]), BATCHED: iter([2.0])}
    assert ways.timed({way: way for way in took}, budget=0.0) == {LOOP: 3.0, BATCHED: 2.0}  # type: ignore[arg-type, misc]


def test_a_way_that_fails_is_left_out_and_a_mistake_of_the_user_is_not() -> None:
    def raises(error: Exception) -> Any:
        def run() -> None:
            raise error

        return run

    assert ways.timed({LOOP: lambda: None, BATCHED: raises(RuntimeError("vmap"))}, 0.0).keys() == {LOOP}
    with pytest.raises(fedspan.FedspanError, match="client 3"):
        ways.timed({LOOP: raises(fedspan.FedspanError("client 3"))}, 0.0)
    assert ways.fastest({}) == LOOP


def test_what_cannot_be_batched_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "LONG_RUN", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Dropout(0.5), nn.Linear(24, 4))
    method, problem = method_of("fedavg"), problem_of(model)
    with Simulator(method, problem, Engine(simulate="auto"), rounds=50) as clients:
        with torch.inference_mode():
            Loop(method, problem, clients, (0,), 4).step()
        assert clients.times
        assert BATCHED not in clients.times
        assert clients.way.how in ("loop", "pool")
    assert not problem_of(network("resnet8", (1, 8, 8), 4, "batch")).can_batch()


def test_batched_is_refused_where_it_would_be_wrong() -> None:
    """Running statistics would be lost without a word."""
    problem = problem_of(network("resnet8", (1, 8, 8), 4, "batch"))
    with pytest.raises(fedspan.FedspanError, match="running statistics"):
        Simulator(method_of("fedavg"), problem, Engine(simulate="batched"))


def test_an_error_on_a_process_reaches_the_caller() -> None:
    parent = os.getpid()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if os.getpid() != parent:
            raise ArithmeticError("bad client")
        return F.cross_entropy(model(batch[0]), batch[1])

    method, problem = method_of("fedavg"), problem_of(mlp(), loss=loss)
    with Simulator(method, problem, Engine(simulate="pool")) as clients:
        loop = Loop(method, problem, clients, (0,), 4)
        with pytest.raises(ArithmeticError, match="bad client"), torch.inference_mode():
            loop.step()


def test_a_process_that_is_killed_is_named() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        os._exit(9)

    method, problem = method_of("fedavg"), problem_of(mlp(), loss=loss)
    with Simulator(method, problem, Engine(simulate="pool")) as clients:
        loop = Loop(method, problem, clients, (0,), 4)
        with pytest.raises(fedspan.FedspanError, match="worker process"), torch.inference_mode():
            loop.step()


def test_fit_takes_a_way_and_ends_its_processes() -> None:
    torch.manual_seed(1)
    clients = [(torch.randn(20, 64), torch.randint(0, 4, (20,))) for _ in range(3)]
    method = SSF(rank=0.5, lr=0.1)
    for way in ("loop", "pool"):
        fedspan.fit(mlp(), clients, method=method, rounds=2, engine=Engine(simulate=way))  # type: ignore[arg-type]
    assert not multiprocessing.active_children()
    with pytest.raises(fedspan.FedspanError, match="`simulate` must be one of auto, batched, loop, pool, got 'fast'"):
        Engine(simulate="fast")  # type: ignore[arg-type]
