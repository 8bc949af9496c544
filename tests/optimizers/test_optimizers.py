"""AdamW against torch's own, inside the subspace and out of it, and with which methods it goes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedspan
from fedspan import Spec
from fedspan.api.step_size import search
from fedspan.core.axes import Optimizer
from fedspan.core.errors import SpecError
from fedspan.core.objective import Flat
from fedspan.core.round import Round
from fedspan.optimizers.adamw import AdamW
from fedspan.optimizers.sgd import SGD
from fedspan.theory.diagnosis import corollary_lr
from support.loops import advance, close, model, small, start
from support.methods import ADAMW, GAUSSIAN, METHODS, build, takes
from support.moments import STEPS, layout

IDENTITY = {"name": "identity"}


def quadratic(clients: int = 1, n: int = 6) -> Any:
    """y ↦ H_i (y − b_i), a client each, of very different curvatures."""
    draws = torch.Generator().manual_seed(3)
    h = torch.logspace(-2, 1, n, dtype=torch.float64)
    b = torch.randn(1, clients, n, generator=draws, dtype=torch.float64)
    return lambda y: h * (y - b)


def by_torch(p: torch.Tensor, grad: Any, steps: int, **settings: Any) -> torch.Tensor:
    """torch.optim.AdamW from p."""
    weight = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([weight], **settings)
    for _ in range(steps):
        weight.grad = grad(weight.detach()).clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    "settings",
    [{}, {"beta1": 0.5, "beta2": 0.9}, {"eps": 0.1}, {"decay": 0.3}, {"beta1": 0.0, "beta2": 0.0}],
)
@pytest.mark.parametrize("steps", [1, 20])
def test_it_is_torchs_adamw(settings: dict[str, float], steps: int) -> None:
    ours, grad, p = AdamW(**settings), quadratic(), torch.ones(1, 1, 6, dtype=torch.float64)
    same = {
        "betas": (ours.beta1, ours.beta2),
        "eps": ours.eps,
        "weight_decay": ours.decay,
        "lr": 0.05,
    }
    theirs = by_torch(p, grad, steps, **same)
    close(ours.descend(p, grad, 0.05, steps)[0], theirs, 1e-13)
    shifted, *_ = ours.descend(torch.zeros_like(p), lambda z: grad(p + z), 0.05, steps, origin=p)
    close(p + shifted, theirs, 1e-13)
    assert float((p - theirs).abs().max()) > 1e-3


def test_in_float32_it_is_torchs_to_its_last_digits() -> None:
    """1 − β_2^t = 0.001 in the first step: written in float32 it would be off by 5e-5."""
    p = torch.ones(1, 1, 6)
    grad = quadratic()
    single = lambda y: grad(y.double()).float()  # noqa: E731
    theirs = by_torch(p, single, 10, lr=0.05, weight_decay=0.0)
    torch.testing.assert_close(
        AdamW().descend(p, single, 0.05, 10)[0], theirs, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "optimizer", [AdamW(decay=0.1), SGD(momentum=0.7)], ids=["adamw", "momentum"]
)
def test_a_memory_goes_on_where_it_was(optimizer: Optimizer) -> None:
    """Also for clients that have taken different numbers of steps; what is given stays as it is."""
    grad, at = quadratic(2), torch.zeros(1, 1, 6, dtype=torch.float64)
    whole, memory, _ = optimizer.descend(at, grad, 0.05, 7)
    assert memory.shape == (1, 2, optimizer.size(6))
    half, held, _ = optimizer.descend(at, grad, 0.05, 4)
    before = held.clone(), half.clone()
    end, again, _ = optimizer.descend(half, grad, 0.05, 3, held=held)
    close(end, whole, 1e-14)
    close(again, memory, 1e-14)
    assert torch.equal(held, before[0])
    assert torch.equal(half, before[1])
    mixed = torch.cat([held[:, :1], torch.zeros_like(held[:, 1:])], 1)  # the second client is new
    started = torch.cat([half[:, :1], at], 1)
    both, *_ = optimizer.descend(started, grad, 0.05, 3, held=mixed)
    close(both[:, :1], whole[:, :1], 1e-14)
    close(both[:, 1:], optimizer.descend(at, grad, 0.05, 3)[0][:, 1:], 1e-14)


@pytest.mark.parametrize("extra", [{"optimizer": ADAMW}, {"optimizer": ADAMW | {"decay": 0.2}}])
def test_in_the_whole_space_ssf_is_scaffold_and_subavg_is_fedavg(extra: dict[str, Any]) -> None:
    problem = small()
    always = {"projector": IDENTITY, "correction": "always"}
    for inside, outside, own in (
        ("ssf", "scaffold", always),
        ("subavg", "fedavg", {"projector": IDENTITY}),
    ):
        one, other = (
            start(build(inside, **own, **extra), problem),
            start(build(outside, **extra), problem),
        )
        for _ in range(30):
            advance(one, 1)
            advance(other, 1)
            close(model(one), model(other), 1e-11)
            if inside == "ssf":
                close(one.transport.clients().c, other.transport.clients().c, 1e-11)
                close(one.server.c, one.transport.clients().c.mean(1, keepdim=True))
    plain = advance(start(build("ssf", **always), problem), 30)
    assert one.ledger.up.sum() == plain.ledger.up.sum()  # SubAvg's, as ever
    assert (
        advance(start(build("ssf", **always, **extra), problem), 30).ledger.up.sum()
        == 2 * one.ledger.up.sum()
    )


def test_controls_take_client_drift_out_of_scaled_steps_too() -> None:
    """Exact gradients, an ε that leaves steps room to shrink: SSF goes to x*, without controls there is a floor."""
    problem, scaled = small(batch="full"), {"name": "adamw", "eps": 3.0, "beta2": 0.9}
    errors = {}
    for name in ("ssf", "subavg"):
        loop = start(build(name, projector=GAUSSIAN, lr=0.3, optimizer=scaled), problem, 7)
        errors[name] = float(problem.evaluate(model(advance(loop, 500)))["rel_err"][0])
    assert errors["ssf"] < 1e-6
    assert errors["subavg"] > 1e-2


def test_decay_acts_on_the_factors_of_lora_and_on_weights_that_have_none() -> None:
    """Without a gradient all that is trained shrinks by (1 − η λ)^K, A as it is and not as its change."""
    x = torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rnd = Round(0, (5,), 7, layout(), np.array([[2]]), np.array([[-1]]), local_steps=STEPS)
    for name, sizes in (("ffalora", [4 * 3, 4]), ("fedit", [4 * 3 + 3 * 9, 4])):
        method = build(name, rank=3, lr=0.1, optimizer={"name": "adamw", "decay": 0.5})
        server = method.init_server(x, layout())
        server = server.replace(u=torch.ones_like(server.u))
        _, up = method.client_step(
            method.init_client(x, layout()), method.broadcast(server, rnd), Flat(), rnd
        )
        assert list(method.sizes(layout())) == sizes
        at = server.u.clone()
        at[..., -4:] += x[..., -4:]
        if name == "fedit":
            at[..., 12:-4] += method.start(rnd).factors[0].columns().mT.flatten()
        close(up.du, at * (0.95**STEPS - 1), 1e-13)


def test_ffalora_with_adamw_is_subavg_in_one_subspace() -> None:
    problem, adamw = small(), {"name": "adamw", "eps": 0.3}
    lora = build("ffalora", rank=3, lr=0.02, optimizer=adamw)
    subavg = build("subavg", projector=GAUSSIAN, refresh=10**6, lr=0.02, optimizer=adamw)
    close(
        model(advance(start(lora, problem), 20)), model(advance(start(subavg, problem), 20)), 1e-11
    )


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("fedavg", {"optimizer": {"name": "adam"}}, "did you mean 'adamw'"),
        ("fedavg", {"optimizer": "adam"}, "did you mean 'adamw'"),
        (
            "fedavg",
            {"local": 3},
            "`method.local` must be an optimizer, its name or a table with `name`, got 3",
        ),
        (
            "fedavg",
            {"optimizer": ADAMW | {"beta1": 1.0}},
            "`method.local.beta1` must be at least 0 and below 1",
        ),
        (
            "fedavg",
            {"optimizer": ADAMW | {"beta2": -0.1}},
            "`method.local.beta2` must be at least 0 and below 1",
        ),
        (
            "fedavg",
            {"optimizer": ADAMW | {"eps": 0.0}},
            "`method.local.eps` must be a positive number",
        ),
        (
            "fedavg",
            {"optimizer": ADAMW | {"decay": -1.0}},
            "`method.local.decay` must be a number of at least 0",
        ),
        ("ssf", {"local": {"name": "sgd", "moments": "project"}}, "plain steps have none"),
        ("ssf", {"local": ADAMW | {"moments": "projct"}}, "`method.local.moments` must be"),
        ("fedsub", {"rank": 3, "optimizer": ADAMW}, "`method.local` 'adamw' is not for fedsub"),
        *(
            (
                name,
                {"local": local},
                f"`method.local` '{local['name']}' keeps states between rounds",
            )
            for name in ("fedsub", "powersgd", "fedit", "ffalora")
            for local in (ADAMW | {"moments": "project"}, {"name": "preconditioned"})
        ),
    ],
)
def test_what_cannot_be_is_named(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build(name, **settings)


def test_every_method_takes_adamw_or_says_why_not() -> None:
    refused = []
    for name in METHODS:
        extra = {"rank": 3} if takes(name, "rank") else {}
        try:
            build(name, optimizer=ADAMW, **extra)
        except SpecError:
            refused.append(name)
            continue
        assert any("optimizer" in settings for settings in METHODS[name]), (
            f"{name} is not held to the contract with it"
        )
    assert sorted(refused) == ["fedsub", "mimelite", "scaffnew", "tamuna"]


def test_the_corollary_does_not_know_it_and_the_search_does() -> None:
    method, problem = build("ssf", rank=6, optimizer=ADAMW), small()
    with pytest.raises(SpecError, match="does not cover `local` 'adamw'"):
        corollary_lr(method, problem, 7, 100)
    found = search(method, problem, 7, 400)
    before, after = (
        float(problem.evaluate(x)["rel_err"][0])
        for x in (
            problem.x0,
            model(advance(start(dataclasses.replace(method, lr=found.lr), problem, 7), 400)),
        )
    )
    assert after < 0.3 * before


def test_a_spec_names_it(tmp_path: Path) -> None:
    table = {
        "rounds": 4,
        "method": {
            "name": "ssf",
            "rank": 0.5,
            "lr": 0.02,
            "space": {"name": "coordinate", "refresh": 2},
            "local": {"name": "adamw", "moments": "project"},
        },
        "task": {"name": "regression", "clients": 4, "dim": 6, "outputs": 2, "samples": 9},
        "batch_size": 4,
    }
    spec = Spec.from_table(table)
    path = tmp_path / "spec.toml"
    path.write_text(spec.toml(), "utf-8")
    assert Spec.load(path) == spec
    changed: Any = Spec.load(path, ("method.local.decay=0.1",)).method
    assert changed.local == AdamW(decay=0.1, moments="project")
    assert fedspan.optimizers.AdamW is AdamW
    whole = fedspan.run(spec, tmp_path / "out")
    assert whole.finished
