"""What a ReLU keeps before a convolution inside a subspace: signs, and the same gradients to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedspan.core.projector import draw
from fedspan.costs.dry_run import Live
from fedspan.nn import layers
from fedspan.nn.models import build
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.projection_rules import layout_of, projection_rules
from fedspan.projectors.coordinate import Coordinate


class Checkpointed(nn.Module):
    """A module of which nothing inside is kept."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def convolutions(inplace: bool = False) -> nn.Module:
    inner = [part for _ in range(4) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace))]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace), *inner, nn.Flatten(), nn.LazyLinear(3)
    )


NETWORKS = {
    "convolutions": (convolutions, (2, 3, 8, 8)),
    "in place": (lambda: convolutions(True), (2, 3, 8, 8)),
    "resnet": (lambda: build("resnet8", (3, 8, 8), 3), (2, 3, 8, 8)),
    "checkpointed": (lambda: Checkpointed(convolutions()), (2, 3, 8, 8)),
}


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Iterator[tuple[str, Restricted, torch.Tensor]]:
    """A network inside a subspace, and a batch with a number that is none."""
    torch.manual_seed(0)
    make, shape = NETWORKS[request.param]
    model, batch = make(), torch.randn(shape)
    model(batch)
    rules = projection_rules(model, min_numel=64)
    module = FlatModule(model, layout_of(rules))
    P = draw(Coordinate(rank=0.25), module.layout, (0,), 0)
    with Restricted(module, rules, module.flat.clone().view(1, 1, -1), P) as inside:
        yield request.param, inside, batch


def gradient(inside: Restricted, batch: torch.Tensor) -> torch.Tensor:
    z = 0.1 * torch.randn(1, 1, sum(inside.sizes), generator=torch.Generator().manual_seed(1))
    return inside.grad(z, lambda model: model(batch).square().mean())


@pytest.mark.parametrize("broken", [False, True])
def test_gradients_stay_the_same(
    network: tuple[str, Restricted, torch.Tensor], broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, inside, batch = network
    if broken:
        batch[0, 0] = float("nan")
    before = gradient(inside, batch)
    monkeypatch.setattr(layers, "LARGE", 0)
    assert gradient(inside, batch).numpy().tobytes() == before.numpy().tobytes()


def test_less_is_kept(
    network: tuple[str, Restricted, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, inside, batch = network

    def kept() -> int:
        with Live(torch.device("cpu")) as live:
            end = inside.module.model(batch)
            found = live.restart()
        del end
        return found

    before = kept()
    monkeypatch.setattr(layers, "LARGE", 0)
    assert kept() <= before if name == "checkpointed" else kept() < 0.8 * before
