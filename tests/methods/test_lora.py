"""Federated LoRA on networks: against adapters written out in torch, what travels, and what it costs to compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.func import functional_call

import fedspan
from fedspan.core.config import Projection
from fedspan.core.errors import SpecError
from fedspan.core.projector import draw
from fedspan.nn.module import FlatModule
from fedspan.nn.projection_rules import layout_of, projection_rules
from fedspan.projectors.gaussian import Gaussian
from support.loops import small, start
from support.methods import build

LR, STEPS, ROUNDS, RANK, LEAST = 0.1, 3, 4, 2, 40
WHOLE = ("5", "*.bias")  # what has no adapter
Data = list[tuple[torch.Tensor, torch.Tensor]]


def network() -> nn.Sequential:
    """One convolution and one matrix that are adapted; a head and biases that are not."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*layers).double()


def clients() -> Data:
    torch.manual_seed(1)
    return [(torch.randn(8, 3, 4, 4).double(), torch.arange(8) % 3) for _ in range(3)]


def fit(method: Any, frozen: tuple[str, ...] = (), **settings: Any) -> Any:
    """Full batches, so that only their order differs from `written_out`."""
    return fedspan.fit(
        network(),
        clients(),
        method=method,
        rounds=ROUNDS,
        batch_size=8,
        seed=7,
        projection=Projection(min_numel=LEAST, frozen_modules=frozen),
        **settings,
    )


def written_out(name: str, others: str) -> dict[str, torch.Tensor]:
    """The same by autograd on adapters B (out × kh × kw × r) and A (r × in), client by client."""
    model = network()
    frozen = () if others == "trained" else WHOLE
    rules = projection_rules(model, frozen_modules=frozen, min_numel=LEAST)
    layout = layout_of(rules, torch.float64)
    starts = draw(Gaussian(rank=RANK), layout, (7,), 0).factors
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    trained: dict[str, torch.Tensor] = {}
    for block, first in zip(layout.blocks, starts, strict=True):
        if first is not None:
            trained[f"{block.name}/A"] = first.columns()[0].T.clone()
            trained[f"{block.name}/B"] = torch.zeros(
                block.shape[0], *block.shape[2:], RANK
            ).double()
        elif others == "trained":
            trained[block.name] = base[block.name]

    def merged(u: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = base | {n: v for n, v in u.items() if "/" not in n}
        for n in {n.split("/")[0] for n in u if "/" in n}:
            out[n] = base[n] + torch.einsum("o...r,ri->oi...", u[f"{n}/B"], u[f"{n}/A"])
        return out

    for _ in range(ROUNDS):
        ends = []
        for inputs, targets in clients():
            u = trained
            for _ in range(STEPS):
                u = {n: v.detach().requires_grad_() for n, v in u.items()}
                loss = F.cross_entropy(functional_call(model, merged(u), (inputs,)), targets)
                steps = dict(zip(u, torch.autograd.grad(loss, list(u.values())), strict=True))
                frozen = [n for n in u if n.endswith("/A") and name == "ffalora"]
                u = {n: v if n in frozen else v - LR * steps[n] for n, v in u.items()}
            ends.append(u)
        trained = {n: torch.stack([end[n].detach() for end in ends]).mean(0) for n in trained}
    return merged(trained)


@pytest.mark.parametrize("others", ["trained", "frozen"])
@pytest.mark.parametrize("name", ["fedit", "ffalora"])
def test_it_is_lora_written_out(name: str, others: str) -> None:
    method = build(name, lr=LR, local_steps=STEPS, rank=RANK)
    found = fit(method, () if others == "trained" else WHOLE).model
    wanted = written_out(name, others)
    before = dict(network().named_parameters())
    for tensor, value in found.named_parameters():
        torch.testing.assert_close(value, wanted[tensor], rtol=1e-10, atol=1e-12)
        moved = others == "trained" or tensor in ("0.weight", "3.weight")
        assert torch.equal(value, before[tensor]) != moved, tensor


@pytest.mark.parametrize(
    ("name", "others", "numbers"),
    [
        ("fedit", "trained", 2 * (36 + 3) + 2 * (6 + 64) + 4 + 6 + 18 + 3),
        ("fedit", "frozen", 2 * (36 + 3) + 2 * (6 + 64)),
        ("ffalora", "trained", 2 * 36 + 2 * 6 + 4 + 6 + 18 + 3),
        ("ffalora", "frozen", 2 * 36 + 2 * 6),
    ],
)
def test_only_what_is_trained_travels(name: str, others: str, numbers: int) -> None:
    method = build(name, lr=LR, local_steps=1, rank=RANK)
    last = fit(method, () if others == "trained" else WHOLE).history[-1]
    named = dict(network().named_parameters())
    sent = named if others == "trained" else ("0.weight", "3.weight")
    model = sum(named[tensor].numel() for tensor in sent)
    assert last["up_bytes"] == ROUNDS * 3 * numbers * 8
    assert (
        last["down_bytes"] == ROUNDS * 3 * (numbers + 1) * 8 + 3 * model * 8
    )  # a probe each time, the base once


def test_with_a_frozen_no_full_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ArithmeticError("a full gradient")

    monkeypatch.setattr(FlatModule, "in_place", refuse)
    fit(build("ffalora", lr=LR, local_steps=2, rank=RANK))
    with pytest.raises(ArithmeticError):
        fit(build("fedit", lr=LR, local_steps=2, rank=RANK))


@pytest.mark.parametrize("name", ["fedit", "ffalora"])
def test_another_start_of_a_is_noticed(name: str) -> None:
    method, problem = build(name, rank=RANK), small()
    loop = start(method, problem)
    rnd = loop._round()
    down = method.broadcast(loop.server, rnd)
    down = down.replace(probe=down.probe + 1e-6)
    with pytest.raises(fedspan.FedspanError, match="another projector"):
        method.client_step(
            loop.transport.states.take(rnd.rows, rnd.ids.shape), down, problem.cohort(rnd), rnd
        )


@pytest.mark.parametrize("name", ["fedit", "ffalora"])
def test_mistakes_are_named(name: str) -> None:
    for wrong, words in [
        ({"rank": 0}, "`method.rank` must be"),
        ({"rank": 1.5}, "`method.rank` must be"),
    ]:
        with pytest.raises(SpecError, match=words):
            build(name, **wrong)
    for rank, words in (
        (4, "larger than the 3 inputs of block"),
        ({"0.*": 2}, "no pattern for block '3"),
    ):
        with pytest.raises(SpecError, match=words):
            fit(build(name, rank=rank))
