"""A small network on images, simulated in every way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fedspan.core.config import Engine, Settings, Simulate, Training
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from support.methods import build, in_subspace


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 4))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def problem_of(
    model: nn.Module, shape: tuple[int, ...] = (1, 8, 8), **settings: Any
) -> TorchProblem:
    torch.manual_seed(1)
    clients = [(torch.randn(30, *shape), torch.randint(0, 4, (30,))) for _ in range(6)]
    sources = [as_client_data(data, f"client {i}") for i, data in enumerate(clients)]
    loss = settings.pop("loss", cross_entropy)
    rules = projection_rules(model, min_numel=64)
    return TorchProblem(
        model, sources, loss, rules, Settings(batch_size=8, training=Training(**settings))
    )


def method_of(name: str, projector: str = "coordinate", **settings: Any) -> Any:
    extra = {"projector": {"name": projector, "rank": 0.25}} if in_subspace(name) else {}
    return build(name, lr=0.1, local_steps=3, **extra, **settings)


def model_after(
    problem: TorchProblem,
    method: Any,
    way: Simulate = "loop",
    rounds: int = 4,
    large_from: int = 1 << 22,
) -> torch.Tensor:
    with Simulator(method, problem, Engine(simulate=way)) as clients:
        loop = Loop(method, problem, clients, (0,), 4)
        loop.chain.large_from = large_from
        with torch.inference_mode():
            for _ in range(rounds):
                loop.step()
    return loop.server.x.clone()
