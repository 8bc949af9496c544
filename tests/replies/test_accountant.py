"""ε of a run against computations of dp-accounting itself, and what a user sees of it."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedspan
from fedspan.cli.app import app
from fedspan.core.errors import CheckpointError
from fedspan.core.privacy import Privacy
from fedspan.core.spec import Spec
from fedspan.engine.history import main_metric
from fedspan.replies import accountant
from fedspan.replies.noise import Mechanism
from support.loops import RUN, Interrupt
from support.methods import build

pytest.importorskip(
    "dp_accounting", reason="dp-accounting is not installed; pip install 'fedspan[privacy]'"
)

PRIVATE: dict[str, Any] = RUN | {"participation": {"weights": "uniform"}}


def independent(
    noise: float, q: float, rounds: int, delta: float, beside: float | None = None
) -> float:
    """ε by an accountant of another kind (Rényi), which gives an upper bound; and by the library's own PLD events."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    one: Any = dp_accounting.GaussianDpEvent(noise)
    if beside is not None:
        one = dp_accounting.ComposedDpEvent([one, dp_accounting.GaussianDpEvent(beside)])
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(q, one), rounds)
    made = (
        dp_accounting.rdp.RdpAccountant(orders=range(2, 64))
        if beside is not None
        else PLDAccountant()
    )
    return float(made.compose(event).get_epsilon(delta))


@pytest.mark.parametrize(
    ("noise", "q", "rounds"), [(1.2, 0.2, 60), (2.0, 1.0, 10), (0.7, 0.05, 25)]
)
def test_epsilon_is_that_of_an_independent_computation(noise: float, q: float, rounds: int) -> None:
    assert accountant.epsilon(noise, q, rounds, 1e-5) == pytest.approx(
        independent(noise, q, rounds, 1e-5), rel=1e-4
    )


def test_one_gaussian_release_costs_what_the_formula_says() -> None:
    """Balle and Wang 2018: δ(ε) = Φ(1/(2σ) − εσ) − e^ε Φ(−1/(2σ) − εσ), without any library."""
    sigma, found = 1.5, accountant.epsilon(1.5, 1.0, 1, 1e-3)

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    delta = phi(0.5 / sigma - found * sigma) - math.exp(found) * phi(-0.5 / sigma - found * sigma)
    assert delta == pytest.approx(1e-3, rel=1e-3)


def test_without_noise_there_is_no_privacy() -> None:
    assert accountant.epsilon(0.0, 0.1, 3, 1e-5) == math.inf
    assert accountant.epsilon(1.0, 0.1, 0, 1e-5) == 0.0
    result = fedspan.run(
        PRIVATE | {"rounds": 2, "privacy": {"clip": 1.0, "noise": 0.0}}, progress=False
    )
    assert [line["epsilon"] for line in result.history] == [
        0.0,
        None,
        None,
    ]  # null stands for infinity


@pytest.mark.parametrize(("target", "q", "rounds"), [(8.0, 0.2, 60), (1.0, 1.0, 5), (0.5, 0.5, 2)])
def test_noise_is_solved_for_epsilon(target: float, q: float, rounds: int) -> None:
    noise = accountant.noise_for(target, q, rounds, 1e-5)
    assert 0.999 * target < accountant.epsilon(noise, q, rounds, 1e-5) <= target


def test_the_count_of_an_adapted_clip_is_paid_for() -> None:
    made = Mechanism(Privacy(clip=1.0, noise=1.1, quantile=0.5), 500, 100, 40)
    assert made.vector_noise > made.noise
    both = independent(
        made.vector_noise, 0.2, 40, 1e-5, beside=2 * made.count_noise
    )  # a count of ±1/2
    alone = independent(made.noise, 0.2, 40, 1e-5, beside=1e9)
    assert both == pytest.approx(alone, rel=1e-3)
    assert made.epsilon(40) <= both


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def clients(count: int = 12) -> list[Any]:
    torch.manual_seed(1)
    xs = [torch.randn(8, 6) for _ in range(count)]
    return [(x, (x[:, 0] > 0).long()) for x in xs]


def fit(**own: Any) -> fedspan.Result:
    given = {
        "privacy": Privacy(epsilon=8, delta=1e-3, clip=0.5),
        "rounds": 6,
        "clients_per_round": 4,
    } | own
    uniform = fedspan.Participation(weights="uniform")
    method = build("ssf", projector={"name": "coordinate", "rank": 0.5})
    return fedspan.fit(
        net(),
        clients(),
        method=method,
        participation=uniform,
        progress=False,
        test=clients()[0],
        **given,
    )


def test_a_user_trains_with_a_promised_epsilon(tmp_path: Path) -> None:
    result = fit(run_dir=tmp_path / "run")
    spent = [line["epsilon"] for line in result.history]
    assert spent[0] == 0
    assert all(a < b for a, b in itertools.pairwise(spent))
    assert 7.9 < spent[-1] <= 8
    assert main_metric(["loss", "epsilon", "clip"]) == "loss"  # nothing is judged by what was spent
    told = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"replies.key" not in told  # the checkpoint with the secret is gone


@pytest.mark.parametrize(("count", "width", "warned"), [(4, 40, True), (60, 6, False)])
def test_noise_that_drowns_the_signal_is_told(count: int, width: int, warned: bool) -> None:
    xs = [torch.randn(8, width) for _ in range(count)]
    data: list[Any] = [(x, (x[:, 0] > 0).long()) for x in xs]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fedspan.fit(
            nn.Linear(width, 2), data, method={"name": "fedavg", "lr": 0.1}, rounds=2, progress=False, test=data[0],
            privacy=Privacy(epsilon=8, delta=1e-3, clip=0.5), participation=fedspan.Participation(weights="uniform"),
        )  # fmt: skip
    told = [
        str(one.message) for one in seen if "signal-to-noise ratio is at most" in str(one.message)
    ]
    assert bool(told) == warned
    if warned:  # as norms: N C over σ C √d
        noise = accountant.noise_for(8, 1.0, 2, 1e-3)
        ratio = count / (noise * (2 * width + 2) ** 0.5)
        assert f"at most {ratio:.2g} in a round and {ratio * 2**0.5:.2g} over the run" in told[0]


def test_a_longer_run_is_refused_where_epsilon_was_promised(tmp_path: Path) -> None:
    fit(run_dir=tmp_path / "run")
    with pytest.raises(
        CheckpointError, match="rounds = 6, not 9; its noise was solved for this many rounds"
    ):
        fit(run_dir=tmp_path / "run", rounds=9, resume=True)


def test_a_longer_run_continues_the_count_of_a_given_noise(tmp_path: Path) -> None:
    spec = PRIVATE | {"rounds": 3, "privacy": {"clip": 1.0, "noise": 1.0}}
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(spec, tmp_path / "run", callbacks=[Interrupt(2)], progress=False)
    longer = fedspan.run(spec | {"rounds": 5}, tmp_path / "run", resume=True, progress=False)
    assert longer.history[-1]["epsilon"] == pytest.approx(accountant.epsilon(1.0, 3 / 7, 5, 1e-5))


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_the_secret_is_readable_by_its_owner_only_and_is_deleted_at_the_end(tmp_path: Path) -> None:
    spec = PRIVATE | {"privacy": {"clip": 1.0, "noise": 1.0}}
    with pytest.raises(KeyboardInterrupt):
        fedspan.run(spec, tmp_path / "run", callbacks=[Interrupt(2)], progress=False)

    def holding() -> list[Path]:
        return [one for one in (tmp_path / "run").iterdir() if b"replies.key" in one.read_bytes()]

    assert [path.name for path in holding()] == ["checkpoint.safetensors"]
    assert holding()[0].stat().st_mode & 0o077 == 0
    fedspan.run(spec, tmp_path / "run", resume=True, progress=False)
    assert not holding()
    with pytest.raises(CheckpointError, match="with `privacy` its secret key was deleted"):
        fedspan.run(spec | {"rounds": 99}, tmp_path / "run", resume=True, progress=False)


def test_several_seeds_have_secrets_of_their_own(tmp_path: Path) -> None:
    spec = PRIVATE | {"rounds": 3, "privacy": {"clip": 1.0, "noise": 1.0}}
    result = fedspan.run(spec, tmp_path / "run", seeds=2, progress=False)
    assert len(result.runs) == 2
    assert result.runs[0][-1]["up_bytes"] > 0


def test_plan_tells_the_noise_of_an_epsilon(tmp_path: Path) -> None:
    spec = PRIVATE | {"rounds": 20, "method": {"name": "ssf", "lr": 0.1, "rank": 4}}
    (tmp_path / "spec.toml").write_text(Spec.from_table(spec).toml())
    words = ["plan", str(tmp_path / "spec.toml"), "--methods", "ssf,ef,fedavg"]
    done = CliRunner().invoke(app, [*words, "--epsilon", "4", "--delta", "1e-3"])
    _, _, said = done.stdout.partition("ε = 4")
    noise = accountant.noise_for(4, 3 / 7, 20, 1e-3)
    assert f"noise multiplier {noise:.4g}" in said
    assert f"noise of {noise / 3:.3g} times the clip" in said
    assert "fedavg" in said
    assert "ef " not in said  # error feedback has no ε
