"""Chains of plain layers with a backward pass written by hand: the numbers are those of autograd, in few operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedspan.core.config import Engine, Settings, Training
from fedspan.core.projector import draw
from fedspan.core.round import Round
from fedspan.drifts.controls import First
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods import SSF, FedAvg, Scaffold
from fedspan.nn.chain import known_loss
from fedspan.nn.client_data import as_client_data
from fedspan.nn.objective import Cohort, TorchObjective
from fedspan.nn.problem import TorchProblem
from fedspan.nn.projection_rules import projection_rules
from fedspan.projectors import Coordinate, Gaussian

LENGTHS = (12, 17, 9)  # examples of the clients


def entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def problem_of(
    *layers: nn.Module,
    loss: Any = entropy,
    shape: tuple[int, ...] = (2, 8, 8),
    target: Any = None,
    **training: Any,
) -> TorchProblem:
    torch.manual_seed(1)
    target = target or (lambda n: torch.randint(0, 3, (n,)))
    data = [as_client_data((torch.randn(n, *shape).double(), target(n)), str(n)) for n in LENGTHS]
    model = nn.Sequential(*layers).double()
    rules = projection_rules(model, min_numel=20)
    return TorchProblem(
        model, data, loss, rules, Settings(batch_size=4, training=Training(**training))
    )


def round_of(problem: TorchProblem) -> Round:
    ids = np.arange(len(LENGTHS))[None]
    return Round(3, (0,), len(LENGTHS), problem.layout, ids, np.full_like(ids, -1), local_steps=5)


def images(first: nn.Module, pool: nn.Module | None = None) -> list[nn.Module]:
    """A convolution, pooling, another convolution, and a linear head."""
    pool = pool or nn.MaxPool2d(2)
    torch.manual_seed(0)
    found = [
        first,
        nn.ReLU(),
        pool,
        nn.Conv2d(first.out_channels, 5, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    ]
    width = nn.Sequential(*found)(torch.zeros(1, first.in_channels, 8, 8)).shape[1]
    return [*found, nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, 3)]


NETWORKS: dict[str, Callable[[], TorchProblem]] = {
    "mlp": lambda: problem_of(nn.Flatten(), nn.Linear(128, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)),
    "no bias": lambda: problem_of(nn.Flatten(), nn.Linear(128, 9, bias=False), nn.ReLU(), nn.Linear(9, 3, bias=False)),
    "few channels": lambda: problem_of(*images(nn.Conv2d(2, 4, 3, padding=1))),
    "strides": lambda: problem_of(*images(nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1)))),
    "more channels": lambda: problem_of(*images(nn.Conv2d(6, 4, 3)), shape=(6, 8, 8)),
    "groups": lambda: problem_of(*images(nn.Conv2d(6, 4, 3, groups=2, bias=False)), shape=(6, 8, 8)),
    "few groups": lambda: problem_of(*images(nn.Conv2d(2, 4, 3, groups=2))),
    "windows": lambda: problem_of(*images(nn.Conv2d(2, 4, 3), nn.MaxPool2d(3, 2, 1, ceil_mode=True))),
    "pooled first": lambda: problem_of(nn.MaxPool2d(2), *images(nn.Conv2d(2, 4, 3)), shape=(2, 16, 16)),
    "nested": lambda: problem_of(nn.Sequential(nn.Flatten(), nn.Linear(128, 9)), nn.ReLU(), nn.Linear(9, 3)),
    "squares": lambda: problem_of(
        nn.Flatten(), nn.Linear(128, 2), loss=lambda m, b: F.mse_loss(m(b[0]), b[1]),
        target=lambda n: torch.randn(n, 2).double(),
    ),
    "logits": lambda: problem_of(
        nn.Flatten(), nn.Linear(128, 2), loss=lambda m, b: nn.BCEWithLogitsLoss()(m(b[0]), b[1]),
        target=lambda n: torch.rand(n, 2).double(),
    ),
    "ignored": lambda: problem_of(
        nn.Flatten(), nn.Linear(128, 3), loss=lambda m, b: nn.CrossEntropyLoss(ignore_index=1)(m(b[0]), b[1])
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "inside",
    [None, Coordinate(rank=0.5), Gaussian(rank=0.5)],
    ids=["full", "coordinate", "gaussian"],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_autograd(name: str, inside: Any) -> None:
    """On the same batches, for several passes over clients with different numbers of examples."""
    problem = NETWORKS[name]()
    rnd, x = round_of(problem), problem.x0
    P = None if inside is None else draw(inside, problem.layout, (0,), 0)
    together = problem.cohort(rnd)
    assert isinstance(together, Cohort)
    assert problem.formulas is not None
    alone = [TorchObjective(problem, rnd, client) for client in range(len(LENGTHS))]
    batched = together.direction() if P is None else together.restrict(x, P)
    torch.manual_seed(2)
    for step in range(7):
        y = (
            torch.randn(1, len(LENGTHS), problem.layout.size if P is None else P.rank).double()
            * 0.1
        )
        found = batched(y)
        for client, one in enumerate(alone):
            at = y[:, client : client + 1]
            wanted = one.direction()(at) if P is None else one.restrict(x, P)(at)
            assert torch.allclose(found[:, client : client + 1], wanted, rtol=1e-10, atol=1e-12), (
                step,
                client,
            )
            problem.release()
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", ["mlp", "few channels"])
def test_fused_steps_are_those_of_the_local_solver(name: str, inside: bool, plus: bool) -> None:
    problem, solver = NETWORKS[name](), FedAvg(lr=0.1).local
    rnd, x = round_of(problem), problem.x0
    P = draw(Coordinate(rank=0.5), problem.layout, (0,), 0)
    start = x.new_zeros(1, len(LENGTHS), P.rank) if inside else x
    torch.manual_seed(3)
    u = torch.randn(1, len(LENGTHS), start.shape[-1]).double() if plus else None
    ends = []
    for fused in (True, False):
        f = problem.cohort(rnd)
        direction: Any = f.restrict(x, P, u) if inside else f.direction(u)
        assert direction.takes_steps
        ends.append(
            solver.descend(start, direction if fused else lambda y, d=direction: d(y), 0.1, 6)[0]
        )
    assert torch.allclose(*ends, rtol=1e-10, atol=1e-12)
    assert ends[0].shape == (1, len(LENGTHS), start.shape[-1])


@pytest.mark.parametrize("inside", [False, True])
def test_fused_steps_tell_the_product_with_the_first_gradient(inside: bool) -> None:
    problem, solver = NETWORKS["mlp"](), FedAvg(lr=0.1).local
    rnd, x = round_of(problem), problem.x0
    P = draw(Coordinate(rank=0.5), problem.layout, (0,), 0)
    start = x.new_zeros(1, len(LENGTHS), P.rank) if inside else x
    u = torch.randn(1, len(LENGTHS), start.shape[-1]).double()
    for steps in (1, 6):
        firsts, ends = [], []
        for fused in (True, False):
            f = problem.cohort(rnd)
            direction: Any = f.restrict(x, P, u) if inside else f.direction(u)
            firsts.append(First(direction if fused else lambda y, d=direction: d(y), u))
            assert firsts[-1].takes_steps == fused
            ends.append(solver.descend(start, firsts[-1], 0.1, steps)[0])
        assert torch.allclose(*ends, rtol=1e-10, atol=1e-12)
        assert torch.allclose(*[first.along for first in firsts], rtol=1e-9, atol=1e-10)
        assert firsts[0].along.shape == (1, len(LENGTHS), 1)


def test_equal_numbers_in_a_window_share_no_gradient() -> None:
    """As in torch, the first of them gets it: constant images, as the background of digits."""
    problem = problem_of(*images(nn.Conv2d(2, 4, 3, padding=1)))
    for data in problem.client_data:
        data.parts[0].fill_(1.0)  # type: ignore[attr-defined]
    rnd = round_of(problem)
    found = problem.cohort(rnd).grad(problem.x0)
    wanted = torch.cat(
        [TorchObjective(problem, rnd, client).grad(problem.x0) for client in range(len(LENGTHS))], 1
    )
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


class Own(nn.Linear):
    """A layer that is not what its base class is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def frozen() -> TorchProblem:
    first = nn.Linear(128, 9)
    first.weight.requires_grad_(False)
    return problem_of(nn.Flatten(), first, nn.Linear(9, 3))


def tied() -> TorchProblem:
    layer = nn.Linear(9, 9)
    return problem_of(nn.Flatten(), nn.Linear(128, 9), layer, nn.ReLU(), layer, nn.Linear(9, 3))


def hooked() -> TorchProblem:
    first = nn.Linear(128, 3)
    first.register_forward_hook(lambda _module, _inputs, out: 2 * out)
    return problem_of(nn.Flatten(), first)


@pytest.mark.parametrize(
    "make",
    [
        frozen,
        tied,
        hooked,
        lambda: problem_of(nn.Flatten(), Own(128, 3)),
        lambda: problem_of(nn.Flatten(), nn.Linear(128, 9), nn.Tanh(), nn.Linear(9, 3)),
        lambda: problem_of(nn.Linear(8, 4), nn.Flatten(), nn.Linear(64, 3)),  # rows of an image are not examples
        lambda: problem_of(nn.Flatten(), nn.Linear(128, 3), loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]) * 2),
        lambda: problem_of(
            nn.Flatten(), nn.Linear(128, 1), loss=lambda m, b: F.mse_loss(m(b[0]).squeeze(1), b[1]),
            target=lambda n: torch.randn(n).double(),
        ),
    ],
)  # fmt: skip
def test_other_networks_and_losses_are_left_to_autograd(make: Callable[[], TorchProblem]) -> None:
    problem = make()
    together, rnd = problem.cohort(round_of(problem)), round_of(problem)
    assert isinstance(together, Cohort)
    assert problem.formulas is None
    wanted = torch.cat(
        [TorchObjective(problem, rnd, client).grad(problem.x0) for client in range(len(LENGTHS))], 1
    )
    assert torch.allclose(together.grad(problem.x0), wanted, rtol=1e-10, atol=1e-12)


def test_a_loss_is_known_only_if_it_does_nothing_else() -> None:
    known = [
        entropy,
        lambda m, b: nn.MSELoss()(m(b[0]), b[1]),
        lambda m, b: nn.CrossEntropyLoss()(m(b[0]), b[1]),
    ]
    other = [
        lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.ones(3)),
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"),
        lambda m, b: F.cross_entropy(b[0], b[1]),
        lambda m, b: F.cross_entropy(m(b[0]), b[0]),
        lambda m, b: F.cross_entropy(m(b[0] * 2), b[1]),
        lambda m, b: F.cross_entropy(m(b[0], 1), b[1]),
        lambda m, b: F.l1_loss(m(b[0]), b[1]),
        lambda m, b: F.mse_loss(m(b[0]), b[1]) + m.weight.norm(),
        lambda m, b: torch.tensor(1.0),
    ]
    assert all(known_loss(loss) is not None for loss in known)
    assert all(known_loss(loss) is None for loss in other)
    smooth = problem_of(
        nn.Flatten(),
        nn.Linear(128, 3),
        loss=lambda m, b: nn.CrossEntropyLoss(label_smoothing=0.1)(m(b[0]), b[1]),
    )
    assert smooth.formulas is None


class Counted(TorchDispatchMode):
    """Counts operations of torch that compute something; views cost next to nothing."""

    calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # loading torch's compiler takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "bound"),
    [(FedAvg, 14), (Scaffold, 18), (SSF, 22)],
    ids=["fedavg", "scaffold", "ssf"],
)
def test_a_local_step_of_a_cohort_takes_few_operations(kind: Any, bound: int) -> None:
    """However many clients there are; what a step costs is the difference of rounds with 9 and with 4 steps."""
    counts = []
    for steps in (9, 4):
        problem = problem_of(nn.Flatten(), nn.Linear(128, 9), nn.ReLU(), nn.Linear(9, 3))
        problem.batch_size = 1  # so that both draw from one pass
        method = kind(lr=0.1, local_steps=steps)
        loop = Loop(
            method,
            problem,
            Simulator(method, problem, Engine(simulate="batched")),
            (0,),
            len(LENGTHS),
        )
        with torch.inference_mode():
            loop.step()
            with Counted() as counted:
                loop.step()
        counts.append(counted.calls)
    assert (counts[0] - counts[1]) / 5 <= bound, (counts[0] - counts[1]) / 5
