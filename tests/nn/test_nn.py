"""A module inside x + Pᵀz: gradients equal P∇f for every covered layer, and no full-size gradient is ever formed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedspan
from fedspan.core import tables
from fedspan.core.errors import SpecError
from fedspan.core.projector import draw
from fedspan.nn.models import build
from fedspan.nn.module import FlatModule, Restricted
from fedspan.nn.projection_rules import layout_of, projection_rules, summary

PROJECTORS = ["coordinate", "gaussian", "hadamard"]


def close(
    model: nn.Module,
    loss: Callable[[nn.Module], torch.Tensor],
    projector: str,
    rank: float = 0.4,
    **choice: Any,
) -> list[Any]:
    """Compare the restricted gradient with the projected full one at x + Pᵀz; the choices made."""
    model = copy.deepcopy(model).double()
    choices = projection_rules(model, **choice)
    layout = layout_of(choices, torch.float64)
    module = FlatModule(model, layout)
    P = draw(tables.build("projector", {"name": projector, "rank": rank}), layout, (3,), 1)
    x = module.flat.detach().clone().view(1, 1, -1)
    generator = torch.Generator().manual_seed(0)
    with Restricted(module, choices, x, P) as inside:
        for _ in range(3):  # several steps: the weights are moved to each z
            z = 0.1 * torch.randn(1, 1, P.rank, dtype=torch.float64, generator=generator)
            found = inside.grad(z, loss)
    full = module.grad(x + P.T @ z, loss)
    assert float((found - P @ full).norm() / (P @ full).norm()) < 1e-9
    assert not any("forward" in m.__dict__ for m in model.modules())
    return choices


@pytest.mark.parametrize("projector", PROJECTORS)
@settings(max_examples=12, deadline=None)
@given(
    inputs=st.integers(2, 40),
    outputs=st.integers(1, 20),
    batch=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    bias=st.booleans(),
)
def test_linear(projector: str, inputs: int, outputs: int, batch: list[int], bias: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias), nn.Tanh(), nn.Linear(outputs, 3))
    data = torch.randn(*batch, inputs, dtype=torch.float64)
    found = close(model, lambda m: m(data).square().sum(), projector, project_modules=["0.weight"])
    assert found[0].how == "fused"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("projector", PROJECTORS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_convolutions(projector: str, data: st.DataObject) -> None:
    torch.manual_seed(2)
    two = data.draw(st.booleans())
    groups = data.draw(st.sampled_from([1, 2, 3]))
    inputs, outputs = groups * data.draw(st.integers(2, 5)), groups * data.draw(st.integers(1, 3))
    kernel, stride, dilation = (data.draw(st.integers(1, 3)) for _ in range(3))
    padding = (
        data.draw(st.sampled_from([0, 1, 2, "same"]))
        if stride == 1
        else data.draw(st.integers(0, 2))
    )
    mode = data.draw(st.sampled_from(["zeros", "circular", "reflect"]))
    kind = nn.Conv2d if two else nn.Conv1d
    layer = kind(
        inputs, outputs, kernel, stride, padding, dilation, groups, data.draw(st.booleans()), mode
    )
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(2, inputs, *([9, 8] if two else [11]))
    model(x)
    x = x.double()
    found = close(model, lambda m: m(x).square().sum(), projector, project_modules=["0.weight"])
    plain = mode == "zeros" and padding != "same"
    assert found[0].how == ("fused" if plain else "projected")


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding(projector: str, padding: int | None) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(11, 6, padding), nn.Flatten(), nn.Linear(24, 2))
    index = torch.randint(0, 11, (5, 4))
    found = close(model, lambda m: m(index).square().sum(), projector, project_modules=["0.weight"])
    assert found[0].how == "fused"


class Odd(nn.Module):
    """Tied weights, a recurrent cell, attention, a custom tensor, a frozen layer, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.cell = nn.GRU(24, 24, batch_first=True)
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)
        self.mix = nn.Parameter(torch.randn(24, 24) / 5)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.norm = nn.LayerNorm(24)
        self.tied = nn.Linear(24, 30, bias=False)
        self.tied.weight = self.embed.weight
        self.head = nn.Linear(30, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.cell(self.embed(index))[0] @ self.mix
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.head(self.tied(torch.tanh(self.frozen(x))))


@pytest.mark.parametrize("projector", PROJECTORS)
def test_what_is_not_covered_falls_back_to_a_projected_gradient(projector: str) -> None:
    torch.manual_seed(4)
    index = torch.randint(0, 30, (4, 5))
    found = {c.name: c for c in close(Odd(), lambda m: m(index).square().sum(), projector)}
    assert found["embed.weight"].how == "fused"
    assert (found["embed.weight"].layer, found["embed.weight"].also) == ("embed", ("tied",))
    assert {n for n, c in found.items() if c.how == "projected"} == {
        "cell.weight_ih_l0", "cell.weight_hh_l0",
        "attention.in_proj_weight", "attention.out_proj.weight", "mix",
    }  # fmt: skip
    assert found["head.weight"].how == "full"
    assert found["norm.weight"].how == "full"
    assert not any(name.startswith("frozen") for name in found)
    assert "tied: used in 2 places" in summary(list(found.values()))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("projector", PROJECTORS)
def test_a_resnet(projector: str, norm: Any) -> None:
    model = build("resnet8", (3, 16, 16), 5, norm)
    data, labels = torch.randn(4, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 4])
    found = close(model, lambda m: F.cross_entropy(m(data), labels), projector, min_numel=100)
    assert sum(c.how == "fused" for c in found) == 7
    assert found[0].how == "fused"
    assert found[0].shape == (16, 3, 3, 3)


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # loading torch's compiler takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, torch.Tensor) and not value._is_view() and 0 not in value.stride():
                self.made.append(tuple(value.shape))
        return out


@pytest.mark.parametrize("projector", PROJECTORS)
@pytest.mark.parametrize("kind", ["linear", "conv", "embedding"])
def test_backward_makes_no_tensor_of_a_covered_weights_size(kind: str, projector: str) -> None:
    """Weights are much larger than activations here, so any full gradient would be the largest tensor made."""
    torch.manual_seed(5)
    if kind == "linear":
        model, data = (
            nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 2)),
            torch.randn(3, 200),
        )
    elif kind == "conv":
        layers = (
            nn.Conv2d(64, 96, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(96, 2),
        )
        model, data = nn.Sequential(*layers), torch.randn(2, 64, 4, 4)
    else:
        model, data = (
            nn.Sequential(nn.Embedding(500, 120), nn.Flatten(), nn.Linear(360, 2)),
            torch.randint(0, 500, (4, 3)),
        )
    choices = projection_rules(model)
    assert choices[0].how == "fused"
    layout = layout_of(choices)
    module = FlatModule(model, layout)
    P = draw(tables.build("projector", {"name": projector, "rank": 0.1}), layout, (3,), 1)
    kept: list[torch.Tensor] = []
    weight = layout.blocks[0].size
    with Restricted(module, choices, module.flat.detach().clone().view(1, 1, -1), P) as inside:
        z = torch.zeros(1, 1, P.rank)
        inside.grad(z, lambda m: m(data).square().sum())
        for piece, part in zip(inside.pieces, z.view(-1).split(list(P.sizes)), strict=True):
            piece.write(part)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            loss = model(data).square().sum()
        with Sizes() as seen:
            torch.autograd.grad(loss, [piece.leaf for piece in inside.pieces])
    own = {p.data_ptr() for p in module.params}
    assert max(t.numel() for t in kept if t.data_ptr() not in own) < 0.25 * weight
    assert seen.made
    assert max(int(np.prod(shape)) for shape in seen.made) < 0.25 * weight


def test_layers_can_be_named() -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20), nn.Linear(20, 50))
    assert [c.how for c in projection_rules(model) if c.name.endswith("weight")] == [
        "fused",
        "fused",
        "full",
    ]
    named = projection_rules(model, full_modules=["0.*"], project_modules=["2.weight"])
    assert [c.how for c in named if c.name.endswith("weight")] == ["full", "fused", "fused"]
    with pytest.raises(SpecError, match=r"'9.weight' matches no trained tensor"):
        projection_rules(model, full_modules=["9.weight"])
    with pytest.raises(SpecError, match="no parameter"):
        projection_rules(model.requires_grad_(False))


def test_a_weight_used_behind_its_layers_back_is_reported() -> None:
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(30, 30), nn.Linear(30, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(x @ self.a.weight.detach())

    model = Behind()
    choices = projection_rules(model)
    layout = layout_of(choices)
    module = FlatModule(model, layout)
    P = draw(tables.build("projector", {"name": "coordinate", "rank": 0.1}), layout, (3,), 1)
    data = torch.randn(4, 30)
    with (
        Restricted(module, choices, module.flat.detach().clone().view(1, 1, -1), P) as inside,
        pytest.raises(SpecError, match=r"'a.weight' is not used through its own layer"),
    ):
        inside.grad(torch.zeros(1, 1, P.rank), lambda m: m(data).sum())


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["blocks.*.weight"], {"blocks.0.q_proj.weight", "blocks.1.q_proj.weight"}),
        (["head"], {"head.weight", "head.bias"}),
        (["blocks.0"], {"blocks.0.q_proj.weight", "blocks.0.q_proj.bias"}),
        (["q_proj"], {f"blocks.{i}.q_proj.{name}" for i in (0, 1) for name in ("weight", "bias")}),
        (
            ["q_proj.bias", "head.weight"],
            {"blocks.0.q_proj.bias", "blocks.1.q_proj.bias", "head.weight"},
        ),
        (
            ["*"],
            {
                *(f"blocks.{i}.q_proj.{n}" for i in (0, 1) for n in ("weight", "bias")),
                "head.weight",
                "head.bias",
            },
        ),
    ],
)
def test_patterns_name_tensors_modules_parents_and_ends(
    patterns: list[str], found: set[str]
) -> None:
    def model() -> nn.Module:
        blocks = nn.ModuleList(nn.ModuleDict({"q_proj": nn.Linear(30, 30)}) for _ in range(2))
        return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(30, 30)})

    why = {rule.name: rule.why for rule in projection_rules(model(), full_modules=patterns)}
    assert {name for name, reason in why.items() if "full_modules" in reason} == found
    if len(found) < 6:
        left = {rule.name for rule in projection_rules(model(), frozen_modules=patterns)}
        assert left == why.keys() - found
    with pytest.raises(SpecError, match="`project_modules` 'proj' matches no trained tensor"):
        projection_rules(model(), project_modules=["proj"])


def test_a_tied_weight_goes_by_all_its_names() -> None:
    (rule,) = (
        r for r in projection_rules(Odd(), full_modules=["tied"]) if r.name == "embed.weight"
    )
    assert rule.how == "full"


class Scaled(nn.Module):
    """Scores times a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x) * self.scale


def test_a_parameter_of_one_number_can_be_batched() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(30, 6), Scaled()
    clients = [(x[i::3], x[i::3, :3].argmax(1)) for i in range(3)]
    found = [
        fedspan.fit(
            copy.deepcopy(model), clients, method="fedavg", rounds=2, batch_size=5, progress=False,
            engine=fedspan.Engine(simulate=way),
        ).weights[0]
        for way in ("loop", "batched")
    ]  # fmt: skip
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name])
    assert float(found[0]["scale"]) != 2.0
