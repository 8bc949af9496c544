"""Runs with secure aggregation in one process: the plain run's numbers, whoever drops out."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)

import fedspan
from fedspan.api.fit import spec_of
from fedspan.core.config import Engine
from fedspan.core.errors import SpecError
from fedspan.core.privacy import Privacy
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.methods.fedavg import FedAvg
from fedspan.replies.chain import Chain
from support.loops import RUN, advance, close, model, small, start
from support.methods import build

COORDINATES = {"projector": {"name": "coordinate", "rank": 4}}
FINE = Privacy(secure=True, secure_bits=64)
SUMMED: list[tuple[str, dict[str, Any]]] = [
    ("ssf", COORDINATES),
    ("ssf", COORDINATES | {"momentum": 0.5, "refresh": 3, "moments": "project"}),
    ("ssf", COORDINATES | {"server_momentum": 0.5}),
    ("ssf", COORDINATES | {"correction": "tested"}),
    ("subavg", COORDINATES),
    ("fedavg", {}),
    ("fedadam", {}),
    ("scaffold", {}),
    ("scaffold", {"momentum": 0.5}),
    ("fedsub", {"projector": {"name": "coordinate", "rank": 4}}),
]


def secure(method: Any, problem: Any, privacy: Privacy = FINE, **engine: Any) -> Loop:
    clients = Simulator(method, problem, Engine(**({"simulate": "loop"} | engine)))
    chain = Chain(method, runs=len(problem.seeds), secure=privacy)
    return start(method, problem, 4, clients, chain=chain)


@pytest.mark.parametrize(("name", "settings"), SUMMED)
@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_a_secure_run_is_the_plain_run(name: str, settings: dict[str, Any], weights: Any) -> None:
    method, problem = build(name, **settings), small(weights=weights)
    loop = advance(secure(method, problem), 8)
    plain = advance(start(method, problem, 4), 8)
    assert not loop.events
    close(model(loop), model(plain), 1e-7)
    if hasattr(loop.server, "c"):
        controls, w = loop.transport.clients().c, problem.weights  # type: ignore[attr-defined]
        shares = torch.full((7,), 1 / 7, dtype=torch.float64) if w is None else torch.from_numpy(w)
        close((shares[:, None] * controls[0]).sum(0), loop.server.c[0, 0], 1e-12)


@pytest.mark.parametrize("simulate", ["loop", "pool", "batched"])
def test_several_seeds_and_every_way_of_simulating(simulate: str) -> None:
    method, problem = build("ssf", **COORDINATES), small(seeds=(5, 6))
    loop = secure(method, problem, simulate=simulate)
    with loop.transport:  # type: ignore[attr-defined]
        advance(loop, 6)
    close(model(loop), model(advance(start(method, problem, 4), 6)), 1e-7)
    close(loop.transport.clients().c.mean(1), loop.server.c[:, 0], 1e-12)  # type: ignore[attr-defined]


def test_the_sum_is_exact_and_the_states_follow_from_what_was_sent() -> None:
    """With a coarse grid both ends still agree: rounding is part of the reply, not an error of the sum."""
    method, problem = build("ssf", **COORDINATES), small()
    coarse = Privacy(secure=True, secure_scale=64.0, secure_range=1024.0)
    loop = advance(secure(method, problem, coarse), 8)
    controls = loop.transport.clients().c[0]  # type: ignore[attr-defined]
    assert torch.equal(controls * 64, (controls * 64).round())
    close(controls.mean(0), loop.server.c[0, 0], 1e-12)
    plain = model(advance(start(method, problem, 4), 8))
    assert 1e-4 < float((model(loop) - plain).norm() / plain.norm()) < 0.1


def test_clipped_numbers_are_an_event() -> None:
    method, problem = build("ssf", **COORDINATES), small()
    loop = advance(secure(method, problem, Privacy(secure=True, secure_range=0.05)), 2)
    assert (
        "numbers were clipped to ±0.05; raise `privacy.secure_range`, or set `privacy.secure_bits`"
        in loop.events[0]
    )
    close(loop.transport.clients().c[0].mean(0), loop.server.c[0, 0], 1e-12)  # type: ignore[attr-defined]


def test_the_bytes_are_those_of_the_protocol() -> None:
    """Per client: keys 104 up; shares of 94 bytes each; 4 bytes per number and one more; 33 bytes per share again."""
    method, problem = build("ssf", correction="always", **COORDINATES), small()
    loop, plain = (
        advance(one, 1)
        for one in (secure(method, problem, Privacy(secure=True)), start(method, problem, 4))
    )
    r, n, session = 8, 4, 16
    up = 104 + 94 * n + 4 * (r + 1) + 33 * n
    down = session + (session + (104 + 8) * n + 8) + (session + (94 + 8) * n) + (session + 8 * n)
    assert loop.ledger.up.sum() == n * up
    assert loop.ledger.down.sum() == plain.ledger.down.sum() + n * down


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ({"name": "ef"}, {}, "ef with these settings needs each reply"),
        ({"name": "compressed"}, {}, "compressed with these settings needs each reply"),
        ({"name": "doublesqueeze"}, {}, "doublesqueeze with these settings needs each reply"),
        ({"name": "powersgd"}, {}, "powersgd with these settings needs each reply"),
        (
            {"name": "scallion"},
            {},
            "leave out a coded `uplink`",
        ),
        ({"name": "ssf", "server": "fedexp"}, {}, "server = 'fedexp'"),
        ({"name": "ssf", "uplink": {"name": "topk", "k": 0.5}}, {}, "leave out a coded `uplink`"),
        ({"name": "fedavg"}, {"clients_per_round": 2}, "hides nobody among 2 clients"),
        (
            {"name": "fedavg"},
            {"privacy": {"secure": True, "secure_scale": 2.0**28}},
            "overflow 32 bits",
        ),
    ],
)
def test_what_needs_single_replies_is_refused_by_name(method: Any, more: Any, words: str) -> None:
    spec = (
        RUN
        | {"privacy": {"secure": True}, "method": method | {"lr": 0.02, "local_steps": 3}}
        | more
    )
    with pytest.raises(SpecError, match=words):
        fedspan.run(spec, progress=False)


def test_a_users_run_and_its_resume(tmp_path: Path) -> None:
    """[privacy] secure = true in a spec; stopped in the middle and resumed it ends with the same model."""
    spec = RUN | {"rounds": 6, "privacy": {"secure": True, "secure_bits": 64}}
    whole = fedspan.run(spec, tmp_path / "whole", progress=False)
    fedspan.run(spec | {"rounds": 3}, tmp_path / "half", progress=False)
    half = fedspan.run(spec, tmp_path / "half", resume=True, progress=False)
    plain = fedspan.run(RUN | {"rounds": 6}, progress=False)
    assert half.history[-1]["rel_err"] == whole.history[-1]["rel_err"]
    assert whole.history[-1]["rel_err"] == pytest.approx(plain.history[-1]["rel_err"], rel=1e-6)


def test_buffers_are_part_of_the_sum() -> None:
    """Running statistics of norms would tell of single clients; only their mean change reaches the server."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    rng = np.random.default_rng(0)
    data = [
        (
            torch.from_numpy(rng.normal(size=(20, 6))).float(),
            torch.from_numpy(rng.integers(0, 3, 20)),
        )
        for _ in range(4)
    ]
    found = []
    for privacy in (None, FINE):
        spec = spec_of(copy.deepcopy(net), data, method=FedAvg(lr=0.1, local_steps=3), rounds=3)
        found.append(fedspan.run(replace(spec, privacy=privacy), progress=False).weights[0])
    plain, hidden = found
    assert float(plain["1.running_mean"].abs().max()) > 0.01
    for name, tensor in plain.items():
        torch.testing.assert_close(hidden[name], tensor, rtol=1e-4, atol=1e-5)


def test_dropout_cannot_be_batched() -> None:
    torch.manual_seed(0)
    net, x = (
        torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)),
        torch.randn(4, 9, 6),
    )
    data, found = [(one, torch.arange(9) % 3) for one in x], []
    for simulate in ("loop", "batched"):
        method, engine = FedAvg(lr=0.1, local_steps=3), Engine(simulate=simulate)  # type: ignore[arg-type]
        spec = replace(
            spec_of(copy.deepcopy(net), data, method=method, rounds=2, engine=engine), privacy=FINE
        )
        with (
            pytest.warns(UserWarning, match="using 'loop'")
            if simulate == "batched"
            else contextlib.nullcontext()
        ):
            found.append(fedspan.run(spec, progress=False).weights[0])
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_ssf_learns_digits_as_well_with_secure_sums() -> None:
    """Within 0.2 points of the plain run, at 32 bits and the default scale: as many bytes for numbers as float32."""
    table = {
        "rounds": 15, "eval_every": 15, "engine": {"simulate": "loop"}, "participation": {"weights": "uniform"},
        "method": {"name": "ssf", "rank": 0.2, "lr": 0.2, "local_steps": 5},
        "task": {
            "name": "classification", "data": "digits", "model": "mlp",
            "partition": {"name": "classes", "clients": 5, "classes_per_client": 4},
        },
    }  # fmt: skip
    plain, hidden = (
        fedspan.run(table | more, progress=False).history[-1]
        for more in ({}, {"privacy": {"secure": True}})
    )
    assert "events" not in hidden
    assert plain["accuracy"] > 0.5
    assert abs(hidden["accuracy"] - plain["accuracy"]) <= 0.002
