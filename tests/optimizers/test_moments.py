"""The optimizer's memory between a client's rounds: reset or re-projected, beside torch's own optimizers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fedspan.core.config import Engine
from fedspan.core.projector import draw
from fedspan.core.round import Round
from fedspan.engine.simulator import Simulator
from fedspan.optimizers.adamw import carried_squares
from fedspan.optimizers.sgd import SGD
from fedspan.projectors.coordinate import Coordinate
from fedspan.projectors.gaussian import Gaussian
from support.loops import advance, close, model, small, start
from support.methods import ADAMW, GAUSSIAN, build
from support.moments import LR, STEPS, layout
from support.simulated import method_of, mlp, model_after, problem_of

CARRY = SGD(momentum=0.5).carry


class Written:
    """SSF and SubAvg once more: P as an array, and for every client a torch optimizer of its own that lives on."""

    def __init__(self, method: Any, problem: Any) -> None:
        self.method, self.problem = method, problem
        self.x, self.c = problem.x0.flatten().clone(), torch.zeros(24, dtype=torch.float64)
        self.own = torch.zeros(7, 24, dtype=torch.float64)
        self.optimizers: dict[
            int, tuple[int, Any]
        ] = {}  # client → the epoch it is of, its optimizer

    def matrix(self, epoch: int) -> torch.Tensor:
        P = draw(self.method.space, self.problem.layout, (5,), epoch)
        return torch.cat([P @ row.view(1, 1, -1) for row in torch.eye(24, dtype=torch.float64)], 1)[
            0
        ].T

    def made(self, weight: torch.Tensor) -> Any:
        how = self.method.local
        if isinstance(how, SGD):
            return torch.optim.SGD([weight], lr=LR, momentum=how.momentum)
        return torch.optim.AdamW(
            [weight], lr=LR, betas=(how.beta1, how.beta2), eps=how.eps, weight_decay=how.decay
        )

    def begun(self, client: int, weight: torch.nn.Parameter, epoch: int) -> Any:
        """An optimizer of this round: new, or with the state of the one before."""
        optimizer = self.made(weight)
        was, old = self.optimizers.get(client, (epoch, None))
        if old is not None and self.method.local.moments == "project":
            state = dict(next(iter(old.state.values())))
            if was != epoch:
                overlap = self.matrix(epoch) @ self.matrix(was).T
                for key in ("exp_avg", "momentum_buffer"):
                    if key in state:
                        state[key] = overlap @ state[key]
                if "exp_avg_sq" in state:
                    state["exp_avg_sq"] = self.squares(overlap.square(), state["exp_avg_sq"])
            optimizer.state[weight] = state
        self.optimizers[client] = (epoch, optimizer)
        return optimizer

    def squares(self, overlap: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The mean of a row of the projected weight, 2 × r, where the old subspace says nothing."""
        means = v.view(2, -1).mean(1, keepdim=True).expand(2, v.numel() // 2).reshape(-1)
        return overlap @ v + (1 - overlap.sum(1)) * means

    def step(self, rnd: Round) -> None:
        epoch, controlled = rnd.t // self.method.space.refresh, bool(self.method.controls)
        P, f = self.matrix(epoch), self.problem.cohort(rnd)
        ids = rnd.ids[0].tolist()
        weights = [torch.nn.Parameter(P @ self.x) for _ in ids]
        optimizers = [self.begun(client, w, epoch) for client, w in zip(ids, weights, strict=True)]
        total = torch.zeros(len(ids), len(P), dtype=torch.float64)
        for _ in range(STEPS):
            z = torch.stack([w.detach() - P @ self.x for w in weights])
            g = f.grad((self.x + z @ P).unsqueeze(0))[0] @ P.T
            total += g / STEPS
            for place, client in enumerate(ids):
                u = P @ (self.c - self.own[client]) if controlled else 0
                weights[place].grad = g[place] + u
                optimizers[place].step()
        z = torch.stack([w.detach() - P @ self.x for w in weights])
        change = (total - self.own[ids] @ P.T) @ P
        self.x = self.x + z.mean(0) @ P
        self.own[ids] += change
        self.c = self.c + change.sum(0) / 7


@pytest.mark.parametrize("moments", ["reset", "project"])
@pytest.mark.parametrize("refresh", [2, 10**6])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (
            "ssf",
            {"correction": "always", "projector": GAUSSIAN, "optimizer": ADAMW | {"decay": 0.1}},
        ),
        (
            "ssf",
            {
                "correction": "always",
                "projector": {"name": "coordinate", "rank": 7},
                "optimizer": ADAMW,
            },
        ),
        ("subavg", {"projector": {"name": "hadamard", "rank": 5}, "momentum": 0.6}),
        (
            "ssf",
            {
                "correction": "always",
                "projector": {"name": "coordinate", "rank": 7},
                "momentum": 0.6,
            },
        ),
    ],
)
def test_moments_are_what_is_said_of_them(
    name: str, settings: dict[str, Any], refresh: int, moments: str
) -> None:
    """Three of seven clients a round, so that some come back after several subspaces."""
    problem = small()
    method = build(name, lr=LR, local_steps=STEPS, refresh=refresh, moments=moments, **settings)
    loop, written = start(method, problem), Written(method, problem)
    for _ in range(24):
        written.step(loop._round())
        advance(loop, 1)
        close(model(loop)[0, 0], written.x, 1e-10)
    if name == "ssf":
        close(loop.server.c, loop.transport.clients().c.mean(1, keepdim=True))


def test_what_a_change_of_coordinates_leaves_of_the_moments() -> None:
    P, Q = (draw(Coordinate(rank=5), layout(), (1,), epoch) for epoch in (0, 1))
    v = torch.rand(1, 2, P.rank, dtype=torch.float64)
    assert torch.equal(carried_squares(v, P, P), v)
    assert torch.equal(CARRY(v, P, P), v)
    new = carried_squares(v, P, Q)
    assert torch.equal(new[..., -4:], v[..., -4:])  # the bias goes whole
    old_places, new_places = (f.index.flatten().tolist() for f in (P.factors[0], Q.factors[0]))
    assert 0 < len(set(old_places) & set(new_places)) < 5
    before, after = (part[..., :-4].unflatten(-1, (4, 5)) for part in (v, new))
    for number, place in enumerate(new_places):
        known = place in old_places
        wanted = before[..., old_places.index(place)] if known else before.mean(-1)
        close(after[..., number], wanted, 1e-14)


@pytest.mark.parametrize("kind", [Coordinate, Gaussian])
def test_of_full_rank_nothing_is_lost(kind: type) -> None:
    """m comes back from any other basis; v does where the basis is the same coordinates."""
    P, Q = (draw(kind(rank=1.0), layout(), (1,), epoch) for epoch in (0, 1))
    m = torch.randn(1, 2, P.rank, dtype=torch.float64)
    close(CARRY(CARRY(m, P, Q), Q, P), m)
    if kind is Coordinate:
        close(carried_squares(m.square(), P, Q), m.square())
    close(carried_squares(m.square(), P, Q).sum(), m.square().sum())  # E ‖g‖² is that of any basis


def test_equal_squares_stay_equal_whatever_the_subspaces() -> None:
    for kind in (Coordinate(rank=3), Gaussian(rank=3)):
        P, Q = (draw(kind, layout(), (1, 2), epoch) for epoch in (0, 1))
        v = torch.full((2, 3, P.rank), 0.7, dtype=torch.float64)
        close(carried_squares(v, P, Q), v)


def test_kept_moments_are_lost_with_the_clients_state_and_begin_anew() -> None:
    method = build("ssf", rank=3, refresh=9, moments="project", optimizer=ADAMW)
    assert method.private == ("moments",)
    assert build("ssf", rank=3, optimizer=ADAMW).private == ()
    assert build("ssf", rank=3, optimizer=ADAMW, moments="reset") == build(
        "ssf", rank=3, optimizer=ADAMW
    )
    state = method.init_client(small().x0, small().layout)
    assert state.moments.shape == (1, 1, 2 * 6 + 1)
    assert build("ssf", rank=3).init_client(small().x0, small().layout).get("moments") is None


@pytest.mark.parametrize("moments", ["reset", "project"])
@pytest.mark.parametrize("projector", ["coordinate", "gaussian"])
def test_on_a_network_all_ways_agree(projector: str, moments: str) -> None:
    method = dataclasses.replace(
        method_of("ssf", projector, optimizer={"name": "adamw", "eps": 1e-2}, moments=moments),
        lr=0.01,
    )
    loop, batched, pool = (
        model_after(problem_of(mlp()), method, way) for way in ("loop", "batched", "pool")
    )
    assert torch.equal(loop, pool)
    assert torch.allclose(loop, batched, rtol=1e-3, atol=1e-5)
    turn = dataclasses.replace(method.local, moments="project" if moments == "reset" else "reset")
    other = dataclasses.replace(method, local=turn)
    assert not torch.allclose(loop, model_after(problem_of(mlp()), other), atol=1e-4)


def test_states_on_disk_hold_the_moments(tmp_path: Path) -> None:
    method = build("ssf", rank=0.25, lr=0.01, refresh=3, moments="project", optimizer=ADAMW)
    found = []
    for folder in (None, tmp_path / "states"):
        problem = problem_of(mlp())
        with Simulator(method, problem, Engine(simulate="loop", states_dir=folder)) as clients:
            found.append(advance(start(method, problem, 4, clients), 7))
    assert torch.equal(model(found[0]), model(found[1]))
    assert (tmp_path / "states" / "moments.states").exists()
