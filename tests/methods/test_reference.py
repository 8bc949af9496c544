"""Every method against `reference`, with all clients alike and with clients of unequal size."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from support.reference import LORA, R, compare, projected

PROJECTORS = ["gaussian", "coordinate", "hadamard"]


@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_fedavg(tmp_path: Path, server_lr: float) -> None:
    compare(tmp_path, {"name": "fedavg", "server_lr": server_lr})


@pytest.mark.parametrize(("mu", "server_lr"), [(0.5, 1.0), (3.0, 0.7)])
def test_fedprox(tmp_path: Path, mu: float, server_lr: float) -> None:
    compare(tmp_path, {"name": "fedprox", "mu": mu, "server_lr": server_lr})


@pytest.mark.parametrize(("server_momentum", "server_lr"), [(0.9, 1.0), (0.5, 0.7)])
def test_fedavgm(tmp_path: Path, server_momentum: float, server_lr: float) -> None:
    compare(
        tmp_path, {"name": "fedavgm", "server_momentum": server_momentum, "server_lr": server_lr}
    )


@pytest.mark.parametrize(("beta1", "tau"), [(0.9, 1e-3), (0.0, 0.1)])
@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad"])
def test_adaptive_servers(tmp_path: Path, name: str, beta1: float, tau: float) -> None:
    beta2 = {} if name == "fedadagrad" else {"beta2": 0.8}
    compare(tmp_path, {"name": name, "server_lr": 0.1, "beta1": beta1, "tau": tau, **beta2})


@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_scaffold(tmp_path: Path, server_lr: float) -> None:
    compare(tmp_path, {"name": "scaffold", "server_lr": server_lr})


@pytest.mark.parametrize(("refresh", "server_lr"), [(1, 1.0), (3, 1.0), (1, 0.7)])
@pytest.mark.parametrize("control", ["exact", "paper"])
@pytest.mark.parametrize("projector", PROJECTORS)
def test_ssf(tmp_path: Path, projector: str, control: str, refresh: int, server_lr: float) -> None:
    compare(
        tmp_path,
        projected(
            "ssf",
            projector,
            correction="always",
            control=control,
            refresh=refresh,
            server_lr=server_lr,
        ),
    )


@pytest.mark.parametrize(("refresh", "server_lr"), [(1, 1.0), (3, 0.7)])
@pytest.mark.parametrize("projector", PROJECTORS)
def test_subavg(tmp_path: Path, projector: str, refresh: int, server_lr: float) -> None:
    compare(tmp_path, projected("subavg", projector, refresh=refresh, server_lr=server_lr))


@pytest.mark.parametrize(("refresh", "server_lr"), [(1, 1.0), (2, 1.0), (5, 1.0), (2, 0.7)])
@pytest.mark.parametrize("variant", ["zero_sum", "stale"])
@pytest.mark.parametrize("projector", PROJECTORS)
def test_fedsub(
    tmp_path: Path, projector: str, variant: str, refresh: int, server_lr: float
) -> None:
    compare(
        tmp_path,
        projected("fedsub", projector, variant=variant, refresh=refresh, server_lr=server_lr),
    )


@pytest.mark.parametrize("variant", ["zero_sum", "stale"])
def test_fedsub_with_momentum(tmp_path: Path, variant: str) -> None:
    compare(tmp_path, projected("fedsub", "gaussian", variant=variant, refresh=2, momentum=0.5))


@pytest.mark.parametrize("server_lr", [1.0, 0.7])
@pytest.mark.parametrize("name", LORA)
def test_lora(tmp_path: Path, name: str, server_lr: float) -> None:
    compare(tmp_path, {"name": name, "rank": R, "server_lr": server_lr})


@pytest.mark.parametrize("server_lr", [1.0, 0.7])
def test_powersgd(tmp_path: Path, server_lr: float) -> None:
    compare(tmp_path, {"name": "powersgd", "rank": 1, "server_lr": server_lr})


MIXED = [
    {"name": "fedavg"},
    {"name": "fedprox", "mu": 0.5},
    {"name": "fedavgm", "server_momentum": 0.9},
    {"name": "fedadam", "server_lr": 0.1, "beta1": 0.9, "beta2": 0.9, "tau": 1e-2},
    {"name": "scaffold"},
    projected("ssf", "gaussian", refresh=3, correction="always"),
    projected("ssf", "hadamard", control="paper", correction="always"),
    projected("subavg", "gaussian"),
    {"name": "fedit", "rank": R},
    {"name": "ffalora", "rank": R},
    {"name": "powersgd", "rank": 1},
    projected("fedsub", "gaussian", refresh=2),
    projected("fedsub", "coordinate", refresh=2, variant="stale"),
]


@pytest.mark.parametrize("batch", ["full", 4])
@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize(
    "spec", MIXED, ids=lambda spec: "-".join(str(v) for v in spec.values() if isinstance(v, str))
)
def test_clients_of_unequal_size(
    tmp_path: Path,
    spec: dict[str, Any],
    weights: Literal["uniform", "examples"],
    batch: int | Literal["full"],
) -> None:
    compare(tmp_path, spec, weights, batch, unequal=True)
