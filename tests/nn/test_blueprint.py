"""Modules are built again from plain values."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from fedspan.core.errors import CheckpointError
from fedspan.nn.blueprint import blueprint, build
from fedspan.nn.models import build as by_name


class Local(nn.Module):
    """A class that keeps no argument of its constructor."""

    def __init__(self, hidden_units: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, hidden_units)


MODELS = {
    "mlp": (by_name("mlp", (5,), 3), (2, 5)),
    "cnn": (by_name("cnn", (1, 28, 28), 10), (2, 1, 28, 28)),
    "resnet8": (by_name("resnet8", (3, 32, 32), 10, "batch"), (2, 3, 32, 32)),
    "nested": (
        nn.Sequential(
            nn.Sequential(nn.Conv1d(2, 4, 3, padding=1, bias=False), nn.BatchNorm1d(4), nn.GELU()),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.LayerNorm(24),
            nn.Linear(24, 2, bias=False),
            nn.Softplus(beta=2.0),
        ),
        (3, 2, 6),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_built_again(name):
    model, shape = MODELS[name]
    again = build(json.loads(json.dumps(blueprint(model))))
    again.load_state_dict(model.state_dict())
    x = torch.randn(shape)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_a_class_that_does_not_keep_its_arguments_has_no_blueprint():
    assert blueprint(Local(4)) is None
    assert blueprint(nn.Sequential(nn.Linear(2, 3), Local(4))) is None


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"class": "os:system", "arguments": {"command": "true"}}, "no class of modules"),
        ({"class": "nowhere.at.all:Net", "arguments": {}}, "cannot be imported"),
        ({"class": "torch.nn:Nothing", "arguments": {}}, "cannot be imported"),
        ({"class": "torch.nn:Linear", "arguments": {"in_features": "x"}}, "cannot be built"),
        ({"class": "torch.nn.modules.container:Sequential"}, "cannot be built"),
        (3, "must name a class"),
    ],
)
def test_damaged_or_foreign_blueprints_are_refused(plan, said):
    with pytest.raises(CheckpointError) as caught:
        build(plan)
    assert said in str(caught.value)
