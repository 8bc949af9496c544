"""Privacy of single examples: gradients of examples are clipped and noised on the client, in d and in r numbers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedspan
from fedspan.core.config import Settings
from fedspan.core.errors import SpecError
from fedspan.core.privacy import Privacy
from fedspan.core.projector import draw
from fedspan.core.round import Round
from fedspan.methods import FedAvg
from fedspan.nn.client_data import as_client_data
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from fedspan.projectors import Coordinate
from fedspan.replies import accountant
from support.methods import build


def problem(noise: float, clip: float, examples: int = 12, batch: int = 12) -> TorchProblem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 3))
    torch.manual_seed(1)
    data = as_client_data((torch.randn(examples, 30), torch.arange(examples) % 3), "client 0")
    settings = Settings(batch_size=batch, privacy=Privacy(level="example", clip=clip, noise=noise))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return TorchProblem(model, [data], loss, projection_rules(model), settings)


def direction(of: TorchProblem, inside: bool) -> Any:
    rnd = Round(0, (0,), 1, of.layout, np.array([[0]]), np.array([[-1]]), local_steps=1)
    with torch.inference_mode():
        f = of.cohort(rnd)
        if not inside:
            return f.direction()(of.x0)
        P = draw(Coordinate(rank=0.2), of.layout, (0,), 0)
        return f.restrict(of.x0, P)(of.x0.new_zeros(1, 1, P.rank))


@pytest.mark.parametrize("inside", [False, True])
def test_each_examples_gradient_is_clipped(inside: bool) -> None:
    """Against gradients of single examples; the sum is divided by the batch size."""
    found, ones = direction(problem(0.0, 0.3), inside), []
    for number in range(12):
        alone = problem(0.0, 1e9)
        x, y = alone.client_data[0].parts  # type: ignore[union-attr]
        alone.client_data = [
            as_client_data((x[number : number + 1], y[number : number + 1]), "one")
        ]
        ones.append(direction(alone, inside))
    norms = [float(one.norm()) for one in ones]
    assert min(norms) > 0.3  # all are clipped
    expected = sum(one * min(1.0, 0.3 / norm) for one, norm in zip(ones, norms, strict=True)) / 12
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_noise_is_sigma_times_the_clip_over_the_batch_size_and_new_in_every_step() -> None:
    one, two = (direction(problem(5.0, 1e-3), False) for _ in range(2))
    assert float((one - two).std()) == pytest.approx(2**0.5 * 5.0 * 1e-3 / 12, rel=0.06)


def test_examples_are_drawn_by_coins() -> None:
    of = problem(0.0, 1.0, examples=40, batch=10)
    f = of.cohort(Round(0, (0,), 1, of.layout, np.array([[0]]), np.array([[-1]])))
    sizes = [len(next(f._losses)) for _ in range(60)]  # type: ignore[attr-defined]
    assert len(set(sizes)) > 3
    assert 7 < sum(sizes) / 60 < 13


def fit(**own: Any) -> fedspan.Result:
    torch.manual_seed(0)
    data = [(torch.randn(20, 6), torch.arange(20) % 2) for _ in range(3)]
    given: dict[str, Any] = {
        "method": build("ssf", rank=0.5),
        "batch_size": 5,
        "rounds": 3,
        "progress": False,
    } | own
    privacy = own.get("privacy", Privacy(level="example", clip=1.0, noise=1.0))
    return fedspan.fit(nn.Linear(6, 2), data, test=data[0], **given | {"privacy": privacy})


def test_epsilon_counts_local_steps() -> None:
    result = fit()
    assert result.history[-1]["epsilon"] == pytest.approx(
        accountant.epsilon(1.0, 5 / 20, 3 * 3, 1e-5)
    )
    assert fit(method=build("ef")).finished  # all that a client sends follows from noised gradients


@pytest.mark.parametrize("level", ["example", "client"])
def test_an_epsilon_that_promises_nothing_is_told(level: Any) -> None:
    more: dict[str, Any] = {
        "participation": fedspan.Participation(weights="uniform"),
        "method": build("fedavg"),
    }
    with pytest.warns(
        UserWarning,
        match=r"`privacy` spends ε = \d+.* above 10 it promises nothing .* more `noise`",
    ):
        fit(privacy=Privacy(level=level, clip=1.0, noise=0.3), **more)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`privacy` spends")
        assert (
            fit(privacy=Privacy(level=level, clip=1.0, noise=3.0), **more).history[-1]["epsilon"]
            < 10
        )


def test_each_example_has_its_own_augmentation() -> None:
    drawn: list[float] = []

    def note(batch: Any, generator: torch.Generator) -> Any:
        drawn.append(float(torch.rand((), generator=generator, dtype=torch.float64)))
        return batch

    assert fit(training=fedspan.Training(augment=note), batch_size=20, rounds=1).finished
    assert len(set(drawn)) == len(drawn) == 3 * 3 * 20  # clients, steps, examples


class Whole(FedAvg):
    """Looks at all of a client's data at once."""

    def client_step(self, client: Any, down: Any, f: Any, rnd: Any) -> Any:
        f.full_grad(down.x)
        return super().client_step(client, down, f, rnd)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="give `noise`"):
        Privacy(level="example", clip=1.0, epsilon=8)
    with pytest.raises(SpecError, match="is for level 'client'"):
        Privacy(level="example", clip=1.0, noise=1.0, leak=0.1)
    with pytest.raises(SpecError, match="use those of mini-batches"):
        fit(method=Whole(lr=0.1))
    with pytest.raises(
        SpecError, match=r"`delta` 0.1 is not below 1/20: .* one of 20 examples of a client"
    ):
        fit(privacy=Privacy(level="example", clip=1.0, noise=1.0, delta=0.1))
