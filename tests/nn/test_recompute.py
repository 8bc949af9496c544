"""Outputs made again in the backward pass: the same bits, and less that is kept."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.config import Engine, Settings
from fedspan.core.errors import FedspanError
from fedspan.core.projector import draw
from fedspan.costs.dry_run import Live
from fedspan.costs.memory import memory
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.projection_rules import layout_of, projection_rules
from fedspan.nn.recompute import recomputing
from fedspan.projectors.coordinate import Coordinate
from fedspan.tasks.outline import Outline
from support.methods import build

Loss = Callable[[nn.Module], torch.Tensor]


class Attention(nn.Module):
    """Queries, keys and values of one input, a wide activation function, one in place, and one on a view."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.gate = nn.Linear(32, 128), nn.Linear(128, 32), nn.Linear(32, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        x = nn.functional.dropout(self.o(mixed.transpose(1, 2).flatten(2)), self.dropout)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.head(self.gate(x).relu_())


def inside(model: nn.Module, recompute: bool) -> tuple[Restricted, torch.Tensor]:
    model = copy.deepcopy(model)
    choices = projection_rules(model)
    layout = layout_of(choices)
    module = FlatModule(model, layout)
    P = draw(Coordinate(rank=0.2), layout, (1,), 0)
    z = 0.1 * torch.randn(1, 1, P.rank, generator=torch.Generator().manual_seed(2))
    return Restricted(
        module, choices, module.flat.detach().clone().view(1, 1, -1), P, recompute
    ).__enter__(), z


def kept_and_found(model: nn.Module, data: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
    """Bytes kept for the backward pass, and the gradient; without and with `recompute`."""

    def loss(m: nn.Module) -> torch.Tensor:
        return m(data).square().mean()

    found, kept = [], []
    for recompute in (False, True):
        at, z = inside(model, recompute)
        torch.manual_seed(3)
        found.append(at.grad(z, loss))
        found.append(torch.rand(3))  # the generator stands where it would
        with Live(torch.device("cpu")) as live:
            with recomputing() if recompute else contextlib.nullcontext():
                value = loss(at.module.model)
            kept.append(live.now)
            del value
    assert all(torch.equal(a, b) for a, b in zip(found[:2], found[2:], strict=True))
    return kept, found


def test_the_gradient_has_the_same_bits_and_less_is_kept() -> None:
    torch.manual_seed(0)
    data = torch.randn(16, 24, 32)
    kept, _ = kept_and_found(Attention(), data)
    # q, k and v go for their one input, which is there already, up for its input, a quarter as wide
    assert kept[0] - kept[1] == 4 * data.numel() * (3 + 4 - 1)


def test_masks_of_dropout_are_drawn_again() -> None:
    torch.manual_seed(0)
    data = torch.randn(16, 24, 32)
    kept, found = kept_and_found(Attention(dropout=0.5), data)
    plain, undropped = kept_and_found(Attention(), data)
    assert not torch.equal(found[0], undropped[0])
    assert (
        kept[0] > plain[0] + 3 * 4 * 16 * 4 * 24 * 24
    )  # probabilities of four heads, three times over, and more
    assert (
        kept[1] < plain[1]
    )  # no masks, no probabilities, and not attention's output, which its kernel keeps


def test_dropout_outside_of_training_and_in_place_is_torchs_own() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head, self.drop = (
                nn.Linear(40, 80),
                nn.Linear(80, 2),
                nn.Dropout(0.5, inplace=True),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.dropout(self.drop(self.up(x)), 0.5, training=False))

    kept_and_found(Drops(), torch.randn(5, 40))


class Changed(nn.Module):
    """Changes a layer's input in place, once the layer's outputs have been kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(40, 80), nn.Linear(80, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        y = torch.tanh(self.up(x)) + nn.functional.gelu(self.up(x))
        x.mul_(2.0)
        return self.head(y)


def test_an_input_that_was_changed_since_is_noticed() -> None:
    at, z = inside(Changed(), True)
    with pytest.raises(FedspanError, match="without `recompute`"):
        at.grad(z, lambda m: m(torch.ones(3, 40)).sum())


CLIENTS = [
    (torch.randn(6, 40, generator=torch.Generator().manual_seed(n)), torch.arange(6) % 2)
    for n in range(2)
]
SSF = {"lr": 0.1, "local_steps": 2, "rank": 0.25}


def test_fit_recomputes_only_where_it_is_asked_to() -> None:
    """Told by a model that bears it only without."""
    fedspan.fit(Changed(), CLIENTS, method=build("ssf", **SSF), rounds=1, batch_size=3)
    with pytest.raises(FedspanError, match="without `recompute`"):
        fedspan.fit(
            Changed(),
            CLIENTS,
            method=build("ssf", **SSF),
            rounds=1,
            batch_size=3,
            engine=Engine(recompute=True),
        )


def test_dropout_is_not_drawn_again() -> None:
    """The same bits after several rounds, and others with another seed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 80), nn.GELU(), nn.Dropout(0.4), nn.Linear(80, 80), nn.Tanh(), nn.Dropout(0.4)
    )
    model.append(nn.Linear(80, 2))

    def trained(recompute: bool, seed: int = 0) -> torch.Tensor:
        own = copy.deepcopy(model)
        fedspan.fit(
            own,
            CLIENTS,
            method=build("ssf", **SSF),
            rounds=3,
            batch_size=3,
            seed=seed,
            engine=Engine(recompute=recompute),
        )
        return torch.cat([p.detach().reshape(-1) for p in own.parameters()])

    assert torch.equal(trained(False), trained(True))
    assert not torch.equal(trained(True), trained(True, seed=1))


def test_a_plan_counts_what_it_saves(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")

    config = {
        "model_type": "bert",
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_labels": 3,
    }
    config |= {"num_attention_heads": 2, "intermediate_size": 128, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def peak(recompute: bool) -> int:
        settings = Settings(batch_size=16, engine=Engine(recompute=recompute))
        problem = Outline(model=str(tmp_path), length=32).shapes(settings)
        return memory(build("ssf", rank=0.1, lr=0.1), problem).peak

    # what goes into a GELU, four times as wide as what it is made of, for all layers but the one that makes it again
    saved = (4 - 1) * 4 * 16 * 32 * 32
    assert peak(True) < peak(False) - saved
