"""The shared preconditioner: its scale, what it costs, and that controls and convergence stay those of SSF."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedspan.core.bundle import Bundle
from fedspan.core.errors import SpecError
from fedspan.core.layout import Block, Layout
from fedspan.core.projector import draw
from fedspan.optimizers import Preconditioned
from fedspan.projectors import Coordinate, Identity
from support.equivalence import relative
from support.loops import advance, close, model, small, start
from support.methods import GAUSSIAN, build

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


def before(local: Preconditioned) -> Bundle:
    """What the server knows before round 0."""
    return Bundle(**local.init_server(torch.zeros(1, 1, 1, dtype=torch.float64), LAYOUT))


def test_the_scale_is_that_of_its_definition() -> None:
    local, P = Preconditioned(), draw(Coordinate(rank=0.5), LAYOUT, (0,), 0)
    w = torch.randn(1, 1, P.rank, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = local.server(before(local), w, P)["squares"]
    parts = [
        *w[0, 0, :12].split(4),
        *w[0, 0, 12:20].split(4),
        *w[0, 0, 20:28].split(4),
        w[0, 0, 28:],
    ]
    squares = torch.stack([part.square().mean() for part in parts]) * (1 - local.beta2)
    torch.testing.assert_close(v[0, 0], squares)
    D = local.scales(Bundle(squares=v), P)
    torch.testing.assert_close(D[0, 0], scale_by_hand(squares, [4] * 7 + [5], local.eps))
    torch.testing.assert_close(
        D, local.scales(Bundle(squares=100 * v), P)
    )  # the scale of the loss does not matter


def test_a_block_in_full_has_the_rows_of_its_inputs() -> None:
    """With P = I a row of `first`, whose inputs are its first axis, is a column of the tensor."""
    local, P = Preconditioned(), draw(Identity(), LAYOUT, (0,), 0)
    server = before(local)
    server.squares[..., 3], server.squares[..., 4] = 1.0, 4.0
    D = local.scales(server, P)
    first = LAYOUT.split(D)["first"][0, 0]
    assert torch.equal(first, first[:1].expand_as(first))
    assert first[0, 0] > 1.5 * first[0, 1]


def test_a_step_is_as_long_as_without_it() -> None:
    local, P = Preconditioned(), draw(Coordinate(rank=0.5), LAYOUT, (0,), 0)
    zero = before(local)
    assert torch.equal(
        local.scales(zero, P), torch.ones(1, 1, P.rank, dtype=torch.float64)
    )  # before the first round
    w = torch.randn(1, 1, P.rank, dtype=torch.float64) * torch.logspace(
        -3, 1, P.rank, dtype=torch.float64
    )
    D = local.scales(Bundle(**local.server(zero, w, P)), P)
    assert float((D * w).norm() / w.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"server_momentum": 0.5},
        {"compressor": {"name": "qsgd", "levels": 7}},
    ],
)
def test_it_converges_to_the_optimum_of_heterogeneous_clients(settings: dict[str, Any]) -> None:
    """The correction still cancels in the mean."""
    loop, error = ended("ssf", settings)
    assert error < 1e-6
    close(loop.transport.clients().c.mean(1, keepdim=True), loop.server.c)
    D = loop.method.local.scales(loop.server, loop.method.subspace(loop._round()))
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


def test_what_it_costs() -> None:
    """A number per row on the download, two rows here, and nothing on the upload."""
    costs = {}
    for name in ("none", "rows"):
        method = build("ssf", projector=GAUSSIAN, preconditioner=name)
        loop = advance(start(method, small(), 7), 3)
        up, down = int(loop.ledger.up.sum()), int(loop.ledger.down.sum())
        advance(loop, 1)
        costs[name] = (
            (int(loop.ledger.up.sum()) - up) // 56,
            (int(loop.ledger.down.sum()) - down) // 56,
        )
    assert costs["rows"] == (costs["none"][0], costs["none"][1] + 2)


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(SpecError, match=r"`eps` must be"):
        Preconditioned(eps=0.0)
    with pytest.raises(SpecError, match=r"`beta2` must be"):
        Preconditioned(beta2=1.0)
