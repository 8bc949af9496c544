"""Secure sums together with differential privacy: clipped, noised by the clients, then masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cryptography", reason="cryptography is not installed; pip install 'fedspan[privacy]'"
)
pytest.importorskip(
    "dp_accounting", reason="dp-accounting is not installed; pip install 'fedspan[privacy]'"
)

import fedspan
from fedspan.core.config import Engine
from fedspan.core.errors import SpecError
from fedspan.core.privacy import Privacy
from fedspan.engine.loop import Loop
from fedspan.engine.simulator import Simulator
from fedspan.replies.chain import Chain
from fedspan.replies.fixed_point import FixedPoint
from fedspan.replies.noise import Mechanism
from support.loops import RUN, advance, close, model, small
from support.methods import build

SSF = {"name": "ssf", "space": {"name": "coordinate", "rank": 4}, "drift": "controls"}
SECURE = {"secure": True, "secure_bits": 64}


def private(settings: dict[str, Any], rounds: int, secure: bool, per_round: int = 7) -> Loop:
    """A run of seven clients under both; cohorts and the server's noise follow from a fixed key."""
    method, problem = build(**SSF), small()
    terms = Privacy(clip=1.0, delta=1e-3, **settings, **(SECURE if secure else {}))
    engine = Engine(simulate="loop")
    noise = Mechanism(terms, 7, per_round, rounds, bytes(32))
    chain = Chain(method, noise=noise, secure=terms if secure else None)
    clients = Simulator(method, problem, engine)
    loop = Loop(method, problem, clients, problem.seeds, per_round, rounds=60, chain=chain)
    return advance(loop, rounds)


@pytest.mark.parametrize(("noise", "leak", "per_round"), [(0.0, 0.0, 7), (1.0, 0.1, 5)])
def test_the_private_sum_is_the_same_with_secure_sums(
    noise: float, leak: float, per_round: int
) -> None:
    """The same clipped replies, the same noise of the server; rounds of fewer clients than a sum needs hold noise."""
    hidden, plain = (
        private({"noise": noise, "leak": leak}, 4, secure, per_round) for secure in (True, False)
    )
    assert not [event for event in hidden.events if "nothing counted" not in event]
    if not hidden.events:
        close(model(hidden), model(plain), 1e-6)


def test_rounding_never_enlarges_a_norm() -> None:
    """ε counts on the norm of the clip; to the nearest, a reply on the sphere would leave it."""
    v = np.random.default_rng(0).normal(size=10_000)
    v /= np.linalg.norm(v)
    for private_sum in (True, False):
        fixed = FixedPoint(32, 2.0**10, 8.0, private_sum, {})
        _, counted, _ = fixed.encode({"v": torch.from_numpy(v)})
        assert (counted["v"].norm() <= 1.0) == private_sum
        assert fixed.encode({"v": torch.tensor([9.0])})[2] == (
            0 if private_sum else 1
        )  # the count would tell of the data


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        (
            {"secure": True, "clip": 1.0, "noise": 1.0, "quantile": 0.5, "delta": 1e-3},
            "`privacy.quantile`",
        ),
        (
            {"secure": True, "epsilon": 8.0},
            "epsilon` is of differential privacy, which needs `clip`",
        ),
        ({}, "needs `clip` with .*, or secure = true"),
    ],
)
def test_settings_that_do_not_go_together(privacy: dict[str, Any], words: str) -> None:
    method = SSF | {"lr": 0.02, "local_steps": 3}
    spec = RUN | {
        "privacy": privacy,
        "method": method,
        "clients_per_round": None,
        "participation": {"weights": "uniform"},
    }
    with pytest.raises(SpecError, match=words):
        fedspan.run(
            {key: value for key, value in spec.items() if value is not None}, progress=False
        )


def test_a_robust_aggregator_is_refused() -> None:
    spec = RUN | {
        "privacy": {"secure": True},
        "participation": {"aggregator": {"name": "trimmed_mean"}},
    }
    with pytest.raises(SpecError, match="'trimmed_mean' needs single replies"):
        fedspan.run(spec, progress=False)


def test_both_on_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flower = pytest.importorskip("support.flower")
    monkeypatch.setattr("os.fsync", lambda _: None)
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(flower.TaskIdentity, f"_{name}", 1)
    noise = {"clip": 1.0, "noise": 1.0, "delta": 1e-3}
    more = {"clients_per_round": 7, "participation": {"weights": "uniform"}}
    spec = flower.spec_of(rounds=2, privacy=noise | SECURE, **more)
    result = flower.serve(
        spec, flower.FakeGrid(spec, tmp_path / "states"), tmp_path / "out", backup=False
    )
    assert not flower.events_of(result)
    assert result.history[-1]["epsilon"] > 0
    assert torch.isfinite(torch.tensor(result.history[-1]["rel_err"]))
