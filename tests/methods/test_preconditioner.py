"""The shared preconditioner: its scale, what it costs, and that controls and convergence stay those of SSF."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_equivalences import relative

from conftest import GAUSSIAN, WireTransport, advance, build, close, model, small, start
from fedspan.core.errors import SpecError
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import draw
from fedspan.methods import SSF, SubAvg
from fedspan.optimizers import AdamW
from fedspan.projectors import Coordinate, Identity

ROWS: dict[str, Any] = {"preconditioner": "rows"}
LAYOUT = Layout(
    (
        Block("weight", (3, 8), 1),
        Block("first", (8, 2), 0),
        Block("head", (2, 4)),
        Block("bias", (5,)),
    ),
    torch.float64,
)


def scale_by_hand(v: torch.Tensor, sizes: list[int], eps: float) -> torch.Tensor:
    """D of every row: κ / (√v + ε σ), repeated for the numbers of the row."""
    repeated = torch.cat([value.expand(n) for value, n in zip(v, sizes, strict=True)])
    sigma = repeated.mean().sqrt()
    D = 1 / (repeated.sqrt() + eps * sigma)
    return D * (repeated.sum() / (D * D * repeated).sum()).sqrt()


def test_the_scale_is_that_of_its_definition() -> None:
    method, P = SSF(lr=0.1, rank=0.5, **ROWS), draw(Coordinate(rank=0.5), LAYOUT, (0,), 0)
    w = torch.randn(1, 1, P.rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = method.squares(method.no_squares(torch.zeros(1, 1, 1, dtype=torch.float64), LAYOUT), w, P)
    parts = [
        *w[0, 0, :12].split(4),
        *w[0, 0, 12:20].split(4),
        *w[0, 0, 20:28].split(4),
        w[0, 0, 28:],
    ]
    squares = torch.stack([part.square().mean() for part in parts]) * (1 - method.beta2)
    torch.testing.assert_close(v[0, 0], squares)
    D = method.scales(v, P)
    torch.testing.assert_close(D[0, 0], scale_by_hand(squares, [4] * 7 + [5], method.eps))
    torch.testing.assert_close(
        D, method.scales(100 * v, P)
    )  # the scale of the loss does not matter


def test_a_block_in_full_has_the_rows_of_its_inputs() -> None:
    """With P = I a row of `first`, whose inputs are its first axis, is a column of the tensor."""
    method, P = SSF(lr=0.1, projector=Identity(), **ROWS), draw(Identity(), LAYOUT, (0,), 0)
    v = method.no_squares(torch.zeros(1, 1, 1, dtype=torch.float64), LAYOUT)
    v[..., 3], v[..., 4] = 1.0, 4.0
    D = method.scales(v, P)
    first = LAYOUT.split(D)["first"][0, 0]
    assert torch.equal(first, first[:1].expand_as(first))
    assert first[0, 0] > 1.5 * first[0, 1]


def test_a_step_is_as_long_as_without_it() -> None:
    method, P = SSF(lr=0.1, rank=0.5, **ROWS), draw(Coordinate(rank=0.5), LAYOUT, (0,), 0)
    zero = method.no_squares(torch.zeros(1, 1, 1, dtype=torch.float64), LAYOUT)
    assert torch.equal(
        method.scales(zero, P), torch.ones(1, 1, P.rank, dtype=torch.float64)
    )  # before the first round
    w = torch.randn(1, 1, P.rank, dtype=torch.float64) * torch.logspace(
        -3, 1, P.rank, dtype=torch.float64
    )
    D = method.scales(method.squares(zero, w, P), P)
    assert float((D * w).norm() / w.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings", [{}, {"server_momentum": 0.5}, {"extrapolate": True, "server_lr": 0.7}]
)
def test_a_client_replays_it_from_the_log(settings: dict[str, Any]) -> None:
    """With `keep_control` nothing but the changes of x is sent, also under sampling and when replies are lost."""
    ends = []
    for keep in (True, False):
        problem, method = (
            small(),
            build("ssf", projector=GAUSSIAN, keep_control=keep, **ROWS, **settings),
        )
        transport = WireTransport(method, problem)
        loop = start(method, problem, 3, transport)
        for t in range(25):
            transport.lost = [0] if t % 4 == 1 else [0, 1, 2] if t % 9 == 8 else []
            advance(loop, 1)
        ends.append(loop)
    assert relative(model(ends[0]), model(ends[1])) < 1e-10
    assert relative(ends[0].server.v, ends[1].server.v) < 1e-10


def test_what_it_costs() -> None:
    """A number per row on the download, two rows here, and nothing on the upload; nothing at all with a kept c."""
    costs = {}
    for keep in (True, False):
        for name in ("none", "rows"):
            method = build("ssf", projector=GAUSSIAN, keep_control=keep, preconditioner=name)
            loop = advance(start(method, small(), 7), 3)
            up, down = int(loop.ledger.up.sum()), int(loop.ledger.down.sum())
            advance(loop, 1)
            costs[keep, name] = (
                (int(loop.ledger.up.sum()) - up) // 56,
                (int(loop.ledger.down.sum()) - down) // 56,
            )
    assert costs[False, "rows"] == (costs[False, "none"][0], costs[False, "none"][1] + 2)
    assert costs[True, "rows"] == costs[True, "none"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"keep_control": True, "server_momentum": 0.5},
        {"compressor": {"name": "qsgd", "levels": 7}},
    ],
)
def test_it_converges_to_the_optimum_of_heterogeneous_clients(settings: dict[str, Any]) -> None:
    """The correction still cancels in the mean."""
    loop, error = ended("ssf", settings)
    assert error < 1e-6
    close(loop.transport.clients().c.mean(1, keepdim=True), loop.server.c)
    D = loop.method.scales(loop.server.v, loop.method.subspace(loop._round()))
    assert float(D.max() / D.min()) > 1.01


def test_without_controls_a_floor_remains() -> None:
    assert ended("subavg", {})[1] > 1e-3


def ended(name: str, settings: dict[str, Any]) -> tuple[Any, float]:
    """A run with exact gradients, and its error."""
    loop = start(
        build(name, projector=GAUSSIAN, lr=0.03, **ROWS, **settings),
        small(batch="full", samples=40),
        7,
    )
    return loop, float(loop.problem.evaluate(model(advance(loop, 700)))["rel_err"][0])


def test_without_controls_it_is_subavg() -> None:
    ends = [
        model(
            advance(
                start(
                    build(name, projector=GAUSSIAN, server_momentum=0.5, **ROWS, **own), small(), 7
                ),
                20,
            )
        )
        for name, own in (("ssf", {"correction": "never"}), ("subavg", {}))
    ]
    assert relative(ends[0], ends[1]) < 1e-10


def test_it_takes_the_place_of_a_local_optimizer() -> None:
    with pytest.raises(SpecError, match="takes the place of `optimizer` and `momentum`"):
        SSF(optimizer=AdamW(), **ROWS)
    with pytest.raises(SpecError, match="takes the place of `optimizer` and `momentum`"):
        SubAvg(momentum=0.5, **ROWS)
    with pytest.raises(SpecError, match=r"`eps` must be"):
        SSF(eps=0.0)
    with pytest.raises(SpecError, match="`preconditioner` must be"):
        SSF(preconditioner="adam")  # type: ignore[arg-type]
