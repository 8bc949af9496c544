"""Ways of working through a cohort: in place, one by one, batched, on processes. They agree, and a rule takes one."""

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
from fedspan.core.config import Engine, Simulate
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods import SSF
from fedspan.nn.client_data import as_client_data
from fedspan.nn.models import build as network
from fedspan.nn.objective import TorchObjective
from support.methods import METHODS, in_subspace
from support.simulated import method_of, mlp, model_after, problem_of

NAMES = list(METHODS)
PROJECTORS = ("coordinate", "gaussian", "hadamard")


@pytest.mark.parametrize(
    "make", [mlp, lambda: network("resnet8", (1, 8, 8), 4)], ids=["mlp", "resnet"]
)
@pytest.mark.parametrize(
    ("name", "projector"),
    [
        (name, kind)
        for name in NAMES
        for kind in PROJECTORS
        if kind == "coordinate" or in_subspace(name)
    ],
)
def test_steps_in_place_are_the_steps_one_by_one(
    name: str, projector: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a bit differs, with and without clipping and weight decay."""
    along = TorchObjective._along

    def one_by_one(*given: Any) -> Any:
        direction = along(*given)
        return lambda y: direction(y)

    method, found = method_of(name, projector), [problem_of(make()).x0]
    for training in (
        ({}, {"clip": 0.05}, {"clip": 0.05, "weight_decay": 0.1}) if make is mlp else ({},)
    ):
        fast = model_after(problem_of(make(), **training), method)
        with monkeypatch.context() as patched:
            patched.setattr(TorchObjective, "_along", one_by_one)
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
@pytest.mark.parametrize(
    "training", [{"clip": 0.05}, {"clip": 0.05, "weight_decay": 0.1}], ids=["clip", "and decay"]
)
def test_clip_and_weight_decay_mean_the_same_in_every_way(
    name: str, optimizer: Any, training: Any
) -> None:
    """What is clipped is the gradient that a step uses, P ∇f inside a subspace, before decay and controls."""
    if optimizer and name == "fedsub":
        pytest.skip("plain steps only")
    method = method_of(name, "gaussian", **optimizer)
    loop, batched, pool = (
        model_after(problem_of(mlp(), **training), method, way)
        for way in ("loop", "batched", "pool")
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
    model = dropping()
    with pytest.warns(UserWarning, match="using 'loop'"):
        found = model_after(problem_of(copy.deepcopy(model)), method_of("ssf"), "batched")
    assert torch.equal(found, model_after(problem_of(model), method_of("ssf")))


def test_a_pull_that_depends_on_the_point_is_taken_in_place_too() -> None:
    problem = problem_of(mlp())
    loop = Loop(method_of("fedprox"), problem, Simulator(method_of("fedprox"), problem), (0,), 1)
    direction = problem.cohort(loop._round()).direction(plus=lambda y: y - problem.x0)
    assert hasattr(direction, "in_place")
    far, near = (
        model_after(problem_of(mlp()), method_of("fedprox", mu=mu)) - problem.x0
        for mu in (0.0, 8.0)
    )
    assert near.norm() < 0.7 * far.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_all_ways_agree(name: str, momentum: float) -> None:
    if momentum and name in ("scallion", "scafcom", "tamuna", "scaffnew", "mimelite"):
        pytest.skip("no momentum")
    method = method_of(name, momentum=momentum)
    loop, batched, pool = (
        model_after(problem_of(mlp()), method, way) for way in ("loop", "batched", "pool")
    )
    assert torch.equal(loop, pool)
    assert torch.allclose(loop, batched, rtol=1e-4, atol=1e-6)
    assert not torch.equal(loop, problem_of(mlp()).x0)


@pytest.mark.parametrize("name", ["tamuna", "scaffnew"])
def test_large_models_in_turn_get_their_own_part_of_a_download(name: str) -> None:
    together, in_turn = (
        model_after(problem_of(mlp()), method_of(name), large_from=least) for least in (1 << 22, 1)
    )
    assert torch.allclose(together, in_turn)


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


class Net(nn.Module):
    """An MLP that is not written as a chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Dropout(0.5), nn.Linear(24, 4))


def doubled(model: nn.Module, batch: Any) -> torch.Tensor:
    return 2 * F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("make", "settings", "clients", "way"),
    [
        (mlp, {}, 2, "batched"),
        (mlp, {}, 4, "batched"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)),
            {},
            4,
            "batched",
        ),
        (mlp, {}, 6000, "loop"),  # 6,000 models of 1,660 numbers
        (mlp, {"loss": doubled}, 4, "loop"),
        (Net, {}, 4, "loop"),
        (dropping, {}, 4, "loop"),
        (lambda: network("resnet8", (1, 8, 8), 4), {}, 4, "loop"),
        (lambda: network("resnet8", (1, 8, 8), 4, "batch"), {}, 4, "loop"),
    ],
)
def test_a_rule_takes_a_way(make: Any, settings: Any, clients: int, way: Simulate) -> None:
    """By the network, its loss and the number of clients."""
    method, problem = method_of("scaffold"), problem_of(make(), **settings)
    assert Simulator(method, problem, Engine()).how(clients) == way
    if clients <= problem.clients:
        assert torch.equal(
            model_after(problem, method, "auto"),
            model_after(problem_of(make(), **settings), method, way),
        )


def test_clients_with_fewer_examples_than_a_batch_are_not_batched() -> None:
    problem = problem_of(mlp())
    problem.client_data = [
        *problem.client_data[:5],
        as_client_data((torch.randn(3, 1, 8, 8), torch.zeros(3).long()), "5"),
    ]
    assert Simulator(method_of("fedavg"), problem, Engine()).how(4) == "loop"


@pytest.mark.parametrize("hook", ["container", "gradient", "module gradient"])
def test_a_network_with_hooks_is_trained_with_them(hook: str) -> None:
    """Formulas do not know them."""

    def make() -> nn.Module:
        model = mlp()
        if hook == "container":
            model.register_forward_pre_hook(lambda _module, inputs: (3 * inputs[0],))
        elif hook == "gradient":
            model[1].weight.register_hook(lambda gradient: 0 * gradient)  # type: ignore[index, union-attr]
        else:
            model[3].register_full_backward_hook(lambda _module, back, _: (0 * back[0],))  # type: ignore[index]
        return model

    method = method_of("fedavg")
    found = model_after(problem_of(make()), method, "auto")
    assert torch.equal(found, model_after(problem_of(make()), method))
    assert not torch.allclose(found, model_after(problem_of(mlp()), method))


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
    with pytest.raises(
        fedspan.FedspanError,
        match="`simulate` must be one of auto, batched, loop, pool, got 'fast'",
    ):
        Engine(simulate="fast")  # type: ignore[arg-type]
