"""What is refused with privacy, by name and with its remedy: each would make ε wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedspan
from fedspan.core import refusals, registry
from fedspan.core.errors import SpecError
from fedspan.core.privacy import Privacy
from fedspan.core.spec import Spec
from support.loops import RUN
from support.methods import METHODS, TOPK, build

PRIVATE: dict[str, Any] = RUN | {"participation": {"weights": "uniform"}, "rounds": 2}
SETTINGS = Privacy(clip=1.0, noise=1.0, leak=0.1)
SSF: dict[str, Any] = {"name": "ssf", "lr": 0.1, "space": {"name": "coordinate", "rank": 4}}


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"epsilon": 8.0}, "clip"),
        ({"clip": 1.0}, "`privacy` needs `epsilon` or `noise`, got neither"),
        ({"clip": 1.0, "noise": 1.0, "epsilon": 1.0}, "got both"),
        ({"clip": 0.0, "noise": 1.0}, "clip` must be a positive number, got 0.0"),
        ({"clip": 1.0, "noise": -1.0}, "noise` must be a number of at least 0, got -1.0"),
        ({"clip": 1.0, "epsilon": 0.0}, "epsilon` must be a positive number"),
        ({"clip": 1.0, "noise": 1.0, "delta": 0.0}, "delta` must be above 0 and below 1"),
        ({"clip": 1.0, "noise": 1.0, "quantile": 1.0}, "quantile` must be above 0 and below 1"),
        ({"clip": 1.0, "noise": 1.0, "leak": 1.0}, "leak` must be at least 0 and below 1"),
        ({"clip": 1.0, "noise": 1.0, "sigma": 1.0}, "sigma"),
        ({"clip": 1.0, "noise": 1.0, "delta": 0.2}, "`delta` 0.2 is not below 1/7"),
        ({"clip": 1.0, "noise": 1.0, "delta": 1 / 7}, "is not below 1/7"),
    ],
)
def test_wrong_values(own: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        fedspan.run(PRIVATE | {"privacy": own}, progress=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"method": {"name": "fedavg", "lr": "search"}},
            "`method.lr` is 'search', which looks at the clients' data",
        ),
        (
            {"participation": {"weights": "examples"}},
            "`participation.weights` 'examples'.* set it to 'uniform'",
        ),
        ({"eval_clients_every": 1}, "`eval_clients_every` looks at the clients' data"),
        (
            {"callbacks": [{"name": "diagnostics"}]},
            "callback Diagnostics looks at the clients' data",
        ),
        (
            {"callbacks": [{"name": "training_loss"}]},
            "callback TrainingLoss looks at the clients' data",
        ),
        (
            {"method": SSF | {"server": "fedexp"}},
            "`privacy` .* ssf with these settings needs each reply.* server = 'fedexp'",
        ),
        (
            {"method": SSF | {"uplink": {"name": "topk", "k": 2}}},
            "ssf with these settings needs each reply.* leave out a coded `uplink`",
        ),
        (
            {"method": {"name": "ef", "lr": 0.1, "uplink": {"compressor": TOPK}}},
            "ef with these settings needs each reply.* leave out a coded `uplink`",
        ),
        (
            {"method": {"name": "powersgd", "lr": 0.1}},
            "powersgd with these settings needs each reply.* use a method such as fedavg",
        ),
        ({"method": SSF | {"name": "fedsub"}}, "fedsub is not for `privacy`"),
    ],
)
def test_settings_for_which_epsilon_would_be_wrong(change: dict[str, Any], words: str) -> None:
    privacy = {"clip": 1.0, "noise": 1.0, "leak": 0.1}
    with pytest.raises(SpecError, match=words):
        fedspan.run(PRIVATE | {"privacy": privacy} | change, progress=False)


def test_with_privacy_nothing_is_tested_and_all_clients_correct() -> None:
    """The default of SSF works; the spec and the history tell that there was no test."""
    result = fedspan.run(
        PRIVATE | {"method": SSF, "privacy": {"clip": 1.0, "noise": 1.0}}, progress=False
    )
    assert result.spec["method"]["drift"]["correction"] == "always"
    assert "correction_test" not in result.history[-1]
    with pytest.raises(
        SpecError, match=r"`drift\.correction` 'tested' of ssf is not for `privacy`"
    ):
        refusals.check(planned(build("ssf")))


def test_running_statistics_are_refused() -> None:
    data = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(3)]
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(SpecError, match="buffers, such as running statistics of BatchNorm"):
        fedspan.fit(
            network, data, method=build("fedavg"), privacy=Privacy(clip=1.0, noise=1.0), progress=False,
            participation=fedspan.Participation(weights="uniform"),
        )  # fmt: skip


def planned(method: Any) -> Spec:
    """A run of a method with privacy, whose tests are not left out."""
    spec = Spec.from_table(PRIVATE | {"privacy": {"clip": 1.0, "noise": 1.0}})
    object.__setattr__(spec, "method", method)
    return spec


def refusal(name: str, settings: dict[str, Any]) -> str | None:
    """Why a method is refused; None where it is accepted."""
    try:
        refusals.check(planned(build(name, **settings)))
    except SpecError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_accepted_or_refused_on_purpose(name: str) -> None:
    """A new method fails here until somebody has decided."""
    assert set(METHODS) == set(registry.choices("method"))
    accepted = [settings for settings in METHODS[name] if refusal(name, settings) is None]
    assert bool(accepted) == (name in refusals.SUMMED)
    for settings in accepted:
        assert not settings.get("extrapolate")
        assert "compressor" not in settings
        assert settings.get("correction") != "tested"


@pytest.mark.parametrize("own", [{}, {"clip": 1.0, "noise": 1.0}, {"secure": True}])
def test_an_unknown_level_names_both_and_what_they_protect(own: dict[str, Any]) -> None:
    with pytest.raises(
        SpecError, match=r"`level` must be 'client', .* all data of a client, or 'example', .* one"
    ):
        Privacy(level="patient", **own)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2])
def test_a_secure_sum_of_too_few_clients(count: int) -> None:
    pytest.importorskip("cryptography")
    clients = [(torch.ones(4, 3), torch.arange(4) % 2)] * count
    with pytest.raises(
        SpecError, match=f"`privacy.secure` needs at least 3 clients, got {count}: .*; leave it out"
    ):
        fedspan.fit(
            nn.Linear(3, 2), clients, method="fedavg", privacy=Privacy(secure=True), progress=False
        )
